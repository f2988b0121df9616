"""FedAvg-M-VR: FedAvg-M whose local steps compare the same minibatch at y and at x⁻.

Cheng, Huang, Wu, Yuan: "Momentum Benefits Non-IID Federated Learning Simply and Provably",
ICLR 2024, Algorithm 3 (variance reduction in the manner of STORM).
Deviations: the paper analyses full participation; here S < N works too. x⁻ does not travel: with
the same number of steps everywhere and constant rates, clients recover it as x + η_g·η·K·g; where
that would not be exact, it is sent. The paper's absolute server rate γ is η_g·η·K.
Defaults: η = 0.005, η_g = 10, β = 0.8: the theorem wants short client steps and a server's step
η_g = γ/(ηK) well above 1; the numbers are from a grid on examples/mnist.toml, where β of 0.2, the
plain rule's, diverges. g⁰ is the mean of K minibatch gradients of every client.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, Self

from pydantic import Field

from ..algorithm import Arrays, ClientState, Objective, Plan, Reply, ServerState, weighted_sum
from ..errors import ConfigError
from ._gradient_start import GradientStartRule


class FedAvgWithMomentumVR(GradientStartRule):
    """y ← y − η(∇F(y;ξ) + (1−β)(g − ∇F(x⁻;ξ))), K times; g ← −Σ w_i Δ_i/(ηK_i); x ← x + η_g Δ̄."""

    name: ClassVar[str] = "fedavg_m_vr"
    compares_points: ClassVar[bool] = True
    server_state: ClassVar[tuple[str, ...]] = ("model", "server_momentum", "previous_model")
    reduces_to = ({"momentum": 1.0}, "fedavg", {})

    client_learning_rate: float = Field(0.005, gt=0, title="η", description="client step size")
    server_learning_rate: float = Field(
        10.0, gt=0, title="η_g", description="server step size, relative to the mean movement"
    )
    momentum: float = Field(
        0.8, ge=0, le=1, title="β", description="weight of the new gradient; 1 is FedAvg"
    )
    initial_batches: int | None = Field(
        None, ge=1, description="minibatches a client for g⁰; K if not given"
    )
    previous_model: Literal["sent", "recovered", "same"] | None = Field(
        None,
        title="x⁻",
        description="how clients learn x⁻: recovered where that is exact; the same as x at first",
    )

    @property
    def broadcast_names(self) -> tuple[str, ...]:
        previous = () if self.previous_model in ("recovered", "same") else ("previous_model",)
        return ("model", "server_momentum", *previous)

    @property
    def start_batches(self) -> int | None:
        return self.initial_batches

    def resolve(self, plan: Plan) -> Self:
        given = self.previous_model
        equal = len(set(plan.local_steps.values())) == 1 and not plan.steps_may_change
        exact = plan.constant_rates and equal
        if given == "same" or (given == "recovered" and not exact):
            raise ConfigError(
                f"algorithm.previous_model: got {given!r}, with which clients would take another "
                "model than the last round's; say 'sent' or leave it out"
            )
        if given is not None:
            return self
        return self.model_copy(update={"previous_model": "recovered" if exact else "sent"})

    def at_round(self, state: ServerState, number: int) -> Self:
        unmoved = state["previous_model"].equal(state["model"])  # no round has counted yet
        if unmoved and self.previous_model == "recovered":
            return self.model_copy(update={"previous_model": "same"})
        return self

    def client_update(
        self, received: Arrays, client_state: ClientState, objective: Objective
    ) -> tuple[Arrays, ClientState]:
        eta, beta = self.client_learning_rate, self.momentum
        x, g = received["model"], received["server_momentum"]
        x_prev = received.get("previous_model", x)
        if self.previous_model == "recovered":
            x_prev = x.add(g, alpha=self.server_learning_rate * eta * objective.num_steps)
        y, drift = x.clone(), g * (eta * (1 - beta))
        for batch in objective.batches():
            y_next = y.add(objective.gradient(x_prev, batch), alpha=eta * (1 - beta)).sub_(drift)
            y = y_next.sub_(objective.gradient(y, batch), alpha=eta)
        return {"delta": y - x}, client_state

    def server_update(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        eta, eta_g, x = self.client_learning_rate, self.server_learning_rate, state["model"]
        delta = weighted_sum([(r.weight, r.upload["delta"]) for r in replies])
        g = weighted_sum([(-r.weight / (eta * r.num_steps), r.upload["delta"]) for r in replies])
        return state.replace(model=x.add(delta, alpha=eta_g), server_momentum=g, previous_model=x)

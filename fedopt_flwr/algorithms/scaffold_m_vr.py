"""SCAFFOLD-M-VR: SCAFFOLD-M whose local steps compare the same minibatch at y and at x⁻.

Cheng, Huang, Wu, Yuan: "Momentum Benefits Non-IID Federated Learning Simply and Provably",
ICLR 2024, Algorithm 4; c_i from gradients and g = c at the start, as in Theorem 4.
Deviations: only d = βc + (1−β)g travels down, as clients use c and g in no other way. The paper's
absolute server rate γ is η_g·η·K.
Defaults: η = 0.005, η_g = 10, β = 0.8: Theorem 4 wants short client steps and a server's step
η_g = γ/(ηK) well above 1; the numbers are from a grid on examples/mnist.toml, where β of 0.2, the
plain rule's, diverges.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from ..algorithm import Arrays, ClientState, Objective, Reply, ServerState, weighted_sum
from ._control_variates import GradientVariateRule


class ScaffoldMVR(GradientVariateRule):
    """u = ∇F(y;ξ) + β(c − c_i) + (1−β)(g − ∇F(x⁻;ξ)); y ← y − ηu, K times; x ← x + η_g Δ̄;
    g ← −Σ w_i Δ_i/(ηK_i); c ← c + Σ p_i (c_i⁺ − c_i)."""

    name: ClassVar[str] = "scaffold_m_vr"
    compares_points: ClassVar[bool] = True
    server_state: ClassVar[tuple[str, ...]] = (
        "model",
        "control_variate",
        "server_momentum",
        "previous_model",
    )
    broadcast_names: ClassVar[tuple[str, ...]] = ("model", "previous_model", "direction")
    upload_names: ClassVar[tuple[str, ...]] = ("delta", "control_variate_change")
    reduces_to = ({"momentum": 1.0}, "scaffold", {})

    client_learning_rate: float = Field(0.005, gt=0, title="η", description="client step size")
    server_learning_rate: float = Field(
        10.0, gt=0, title="η_g", description="server step size, relative to the mean movement"
    )
    momentum: float = Field(
        0.8, ge=0, le=1, title="β", description="weight of the new gradient; 1 is SCAFFOLD"
    )

    def server_start(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        state = super().server_start(state, replies)
        return state.replace(server_momentum=state["control_variate"])  # g = c

    def broadcast(self, state: ServerState) -> Arrays:
        c, g, beta = state["control_variate"], state["server_momentum"], self.momentum
        d = (c * beta).add_(g, alpha=1 - beta)
        return {"model": state["model"], "previous_model": state["previous_model"], "direction": d}

    def client_update(
        self, received: Arrays, client_state: ClientState, objective: Objective
    ) -> tuple[Arrays, ClientState]:
        eta, beta, c_i = self.client_learning_rate, self.momentum, client_state["control_variate"]
        x, x_prev, d = received["model"], received["previous_model"], received["direction"]
        y, correction = x.clone(), d.sub(c_i, alpha=beta).mul_(eta)  # η(d − βc_i)
        gradient_sum = y.new_zeros(y.shape)
        for batch in objective.batches():
            y_next = y.add(objective.gradient(x_prev, batch), alpha=eta * (1 - beta))
            gradient = objective.gradient(y, batch)
            gradient_sum.add_(gradient)
            y = y_next.sub_(gradient, alpha=eta).sub_(correction)
        change = gradient_sum.div_(objective.num_steps).sub_(c_i)
        upload = {"delta": y - x, "control_variate_change": change}
        return upload, {"control_variate": c_i + change}

    def server_update(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        eta, x = self.client_learning_rate, state["model"]
        delta = weighted_sum([(r.weight, r.upload["delta"]) for r in replies])
        g = weighted_sum([(-r.weight / (eta * r.num_steps), r.upload["delta"]) for r in replies])
        change = weighted_sum([(r.importance, r.upload["control_variate_change"]) for r in replies])
        return state.replace(
            model=x.add(delta, alpha=self.server_learning_rate),
            previous_model=x,
            server_momentum=g,
            control_variate=state["control_variate"] + change,
        )

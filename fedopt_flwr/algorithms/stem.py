"""STEM: stochastic two-sided momentum, on the clients and on the server.

Khanduri, Sharma, Yang, Hong, Liu, Rajawat, Varshney: "STEM: A Stochastic Two-Sided Momentum
Algorithm Achieving Near-Optimal Sample and Communication Complexities for Federated Learning",
NeurIPS 2021; a baseline of FedMoS (Wang et al., INFOCOM 2023).
A reconstruction from the published description: no line of the authors' Algorithm was available.
K batches give K directions; the last of them is averaged with the models it was found at, and is
the server's step. It begins with x⁰ − ηū⁰, ū⁰ the mean of K minibatch gradients of every client.
With a = 1 it is FedAvg from there on.
Deviations: a is a constant; the authors' a_t = cη_t² falls with η_t ∝ t^(−1/3). A round begins with
y_prev = x + ηū: the mean model ȳ, except where η changes or η_g is not 1, when it lies beside it.
Defaults: η = 0.05, a = 0.1, η_g = 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ..algorithm import Arrays, ClientState, Objective, Reply, ServerState, weighted_sum
from ._gradient_start import GradientStartRule

if TYPE_CHECKING:
    from torch import Tensor


class STEM(GradientStartRule):
    """u ← ∇F(y;ξ) + (1−a)(u − ∇F(y_prev;ξ)), K times, with y_prev ← y; y ← y − ηu in between;
    ȳ, ū are the means of y and u; x = ȳ − ηū; clients begin at y = x, y_prev = x + ηū, u = ū."""

    name: ClassVar[str] = "stem"
    compares_points: ClassVar[bool] = True
    broadcast_names: ClassVar[tuple[str, ...]] = ("model", "direction")
    upload_names: ClassVar[tuple[str, ...]] = ("delta", "direction")

    client_learning_rate: float = Field(0.05, gt=0, title="η", description="step size")
    server_learning_rate: float = Field(
        1.0, gt=0, title="η_g", description="server step size, relative to the mean movement"
    )
    local_momentum: float = Field(
        0.1, ge=0, le=1, title="a", description="weight of the new gradient; 1 is FedAvg"
    )

    def server_start(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        state = super().server_start(state, replies)
        step = state["server_momentum"] * self.client_learning_rate
        return state.replace(model=state["model"] - step)

    def broadcast(self, state: ServerState) -> Arrays:
        return {"model": state["model"], "direction": state["server_momentum"]}

    def client_update(
        self, received: Arrays, client_state: ClientState, objective: Objective
    ) -> tuple[Arrays, ClientState]:
        x, u, eta = received["model"], received["direction"].clone(), self.client_learning_rate
        y, following = x.add(u, alpha=eta), x
        for batch in objective.batches():
            y_prev, y = y, following
            u.sub_(objective.gradient(y_prev, batch)).mul_(1 - self.local_momentum)
            u.add_(objective.gradient(y, batch))
            following = y.sub(u, alpha=eta)  # but for the last one, whose step is the server's
        return {"delta": y - x, "direction": u}, client_state

    def server_update(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        u: Tensor = weighted_sum([(r.weight, r.upload["direction"]) for r in replies])
        delta = weighted_sum([(r.weight, r.upload["delta"]) for r in replies])
        delta.sub_(u, alpha=self.client_learning_rate)
        x = state["model"].add(delta, alpha=self.server_learning_rate)
        return state.replace(model=x, server_momentum=u)

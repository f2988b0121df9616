"""STEM: stochastic two-sided momentum, on the clients and on the server.

Khanduri, Sharma, Yang, Hong, Liu, Rajawat, Varshney: "STEM: A Stochastic Two-Sided Momentum
Algorithm Achieving Near-Optimal Sample and Communication Complexities for Federated Learning",
NeurIPS 2021; a baseline of FedMoS (Wang et al., INFOCOM 2023).
A reconstruction from the published description: no line of the authors' Algorithm was available.
Deviations: perhaps in the order of steps; all K local steps move y before ū and ȳ are averaged, so
that the last direction moves the model twice. A round begins with y_prev = x + ηū: that is the mean
model ȳ, except in round 1 and where η changes or η_g is not 1, when it is a point beside it.
Defaults: η = 0.05, a = 0.1, η_g = 1; ū⁰ is the mean of K minibatch gradients of every client.
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
    """u ← ∇F(y;ξ) + (1−a)(u − ∇F(y_prev;ξ)); y_prev ← y; y ← y − ηu, K times;
    ȳ, ū are the means of y and u; x = ȳ − ηū; clients begin at y = x, y_prev = x + ηū, u = ū."""

    name: ClassVar[str] = "stem"
    broadcast_names: ClassVar[tuple[str, ...]] = ("model", "direction")
    upload_names: ClassVar[tuple[str, ...]] = ("delta", "direction")

    client_learning_rate: float = Field(0.05, gt=0, title="η", description="step size")
    server_learning_rate: float = Field(
        1.0, gt=0, title="η_g", description="server step size, relative to the mean movement"
    )
    local_momentum: float = Field(
        0.1, ge=0, le=1, title="a", description="weight of the new gradient; 1 is local SGD"
    )

    def broadcast(self, state: ServerState) -> Arrays:
        return {"model": state["model"], "direction": state["server_momentum"]}

    def client_update(
        self, received: Arrays, client_state: ClientState, objective: Objective
    ) -> tuple[Arrays, ClientState]:
        x, u, eta = received["model"], received["direction"].clone(), self.client_learning_rate
        y, y_prev = x, x.add(u, alpha=eta)
        for batch in objective.batches():
            u.sub_(objective.gradient(y_prev, batch)).mul_(1 - self.local_momentum)
            u.add_(objective.gradient(y, batch))
            y_prev, y = y, y.sub(u, alpha=eta)
        return {"delta": y - x, "direction": u}, client_state

    def server_update(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        u: Tensor = weighted_sum([(r.weight, r.upload["direction"]) for r in replies])
        delta = weighted_sum([(r.weight, r.upload["delta"]) for r in replies])
        delta.sub_(u, alpha=self.client_learning_rate)
        x = state["model"].add(delta, alpha=self.server_learning_rate)
        return state.replace(model=x, server_momentum=u)

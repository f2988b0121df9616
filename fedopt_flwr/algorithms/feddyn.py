"""FedDyn: local problems that are bent round by round until all clients' minima meet.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama: "Federated Learning Based on Dynamic
Regularization", ICLR 2021, Algorithm 1 (reconstruction: the text could not be read): a client
minimises F_i(y) − ⟨h_i, y⟩ + (α/2)‖y − x‖², h_i ← h_i − αΔ_i; h ← h − α(1/N) Σ Δ_i;
x ← x + Δ̄ − h/α.
Deviations: the local problem is worked on by K gradient steps, as in the authors' experiments; h is
weighed by p_i, which is 1/N unless `federation.weighting` says otherwise.
Facts: h = Σ p_i h_i always. `local_dual` is h_i, `server_dual` is h.
Defaults: η = 0.05, α = 0.1. A client that was away is missing in h, not in x.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from pydantic import Field

from ..algorithm import Algorithm, Arrays, ClientState, Objective, Reply, ServerState, weighted_sum


class FedDyn(Algorithm):
    """y ← y − η(∇F(y;ξ) − h_i + α(y − x)), K times; h_i ← h_i − αΔ_i; h ← h − αΣ p_i Δ_i;
    x ← x + Δ̄ − h/α."""

    name: ClassVar[str] = "feddyn"
    server_state: ClassVar[tuple[str, ...]] = ("model", "server_dual")
    client_state: ClassVar[tuple[str, ...]] = ("local_dual",)
    client_means: ClassVar[Mapping[str, str]] = {"server_dual": "local_dual"}

    client_learning_rate: float = Field(0.05, gt=0, title="η", description="client step size")
    regularization: float = Field(
        0.1, gt=0, title="α", description="weight of the pull back to the server's model, and of h"
    )

    def client_update(
        self, received: Arrays, client_state: ClientState, objective: Objective
    ) -> tuple[Arrays, ClientState]:
        x, h_i, alpha = received["model"], client_state["local_dual"], self.regularization
        y = objective.working_copy(x)
        for batch in objective.batches():
            bent = (y - x).mul_(alpha).sub_(h_i)
            y.sub_(bent.add_(objective.gradient(y, batch)), alpha=self.client_learning_rate)
        delta = y - x
        return {"delta": delta}, {"local_dual": h_i.sub(delta, alpha=alpha)}

    def client_changes(self, state: ServerState, reply: Reply) -> Arrays:
        return {"local_dual": reply.upload["delta"] * -self.regularization}

    def server_update(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        alpha = self.regularization
        delta = weighted_sum([(r.weight, r.upload["delta"]) for r in replies])
        total = weighted_sum([(r.importance, r.upload["delta"]) for r in replies])
        h = state["server_dual"].sub(total, alpha=alpha)
        return state.replace(
            model=delta.add_(state["model"]).sub_(h, alpha=1 / alpha), server_dual=h
        )

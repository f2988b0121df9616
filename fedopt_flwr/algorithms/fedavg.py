"""FedAvg: local gradient steps, then the average of the clients' movements.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: "Communication-Efficient Learning of Deep Networks
from Decentralized Data", AISTATS 2017, Algorithm 1.
Deviations: the average of the movements is scaled by a server step size η_g (1 gives the paper's
rule), and replies weigh alike by default where the paper weighs by examples
(`federation.weighting = "examples"`).
Defaults: η = 0.05, η_g = 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from ..algorithm import Algorithm, Arrays, ClientState, Objective, Reply, ServerState, weighted_sum


class FedAvg(Algorithm):
    """y ← y − η∇F(y;ξ), K times; x ← x + η_g Δ̄."""

    name: ClassVar[str] = "fedavg"

    client_learning_rate: float = Field(0.05, gt=0, title="η", description="client step size")
    server_learning_rate: float = Field(
        1.0, gt=0, title="η_g", description="server step size, relative to the mean movement"
    )

    def client_update(
        self, received: Arrays, client_state: ClientState, objective: Objective
    ) -> tuple[Arrays, ClientState]:
        x = received["model"]
        y = objective.working_copy(x)
        for batch in objective.batches():
            y.sub_(objective.gradient(y, batch), alpha=self.client_learning_rate)
        return {"delta": y - x}, client_state

    def server_update(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        delta = weighted_sum([(r.weight, r.upload["delta"]) for r in replies])
        return state.replace(model=state["model"].add(delta, alpha=self.server_learning_rate))

"""FedSPS: FedAvg whose clients take Polyak's step size, from each minibatch's loss and gradient.

Mukherjee, Loizou, Stich: "Locally Adaptive Federated Learning", TMLR 2024, Algorithm 1
(reconstruction: the text could not be read): η = min{(F(y;ξ) − ℓ*)/(c‖∇F(y;ξ)‖²), η_b}.
Deviations: ℓ* = 0, the paper's choice for losses that are never negative; F is the loss alone,
without what `training.weight_decay` adds to the gradient.
Taken from `fedavg`: the server's half.
Defaults: c = 0.5, η_b = 1, η_g = 1. Nothing to tune.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from ..algorithm import Algorithm, Arrays, ClientState, Objective, Reply, ServerState
from .fedavg import FedAvg


class FedSPS(Algorithm):
    """y ← y − min{F(y;ξ)/(c‖∇F(y;ξ)‖²), η_b}∇F(y;ξ), K times; x ← x + η_g Δ̄."""

    name: ClassVar[str] = "fedsps"

    server_learning_rate: float = Field(
        1.0, gt=0, title="η_g", description="server step size, relative to the mean movement"
    )
    polyak_divisor: float = Field(0.5, gt=0, title="c", description="divides Polyak's step size")
    largest_learning_rate: float = Field(
        1.0, gt=0, title="η_b", description="bound of a client's step size"
    )

    def client_update(
        self, received: Arrays, client_state: ClientState, objective: Objective
    ) -> tuple[Arrays, ClientState]:
        x = received["model"]
        y = objective.working_copy(x)
        for batch in objective.batches():
            q = objective.gradient(y, batch)
            square = q.square().sum(-1, keepdim=True).mul_(self.polyak_divisor)
            loss = objective.last_loss.clamp(min=0)
            # 0/0, where nothing is left to learn, moves nothing
            eta = (loss / square).nan_to_num(0.0).clamp_(max=self.largest_learning_rate)
            y.sub_(q.mul_(eta))
        return {"delta": y - x}, client_state

    def server_update(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        half = FedAvg(server_learning_rate=self.server_learning_rate)
        return half.server_update(state, replies)

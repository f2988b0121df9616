"""SignFedAvg: FedAvg whose clients follow only the sign of their gradient.

An example of a rule of your own, in one file outside the package; no paper. Both halves of
`algorithm.Algorithm` that a stateless rule needs stand below.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from fedopt_flwr.algorithm import (
    Algorithm,
    Arrays,
    ClientState,
    Objective,
    Reply,
    ServerState,
    weighted_sum,
)

if TYPE_CHECKING:
    from torch import Tensor


class SignFedAvg(Algorithm):
    """y ← y − η sign(∇F(y;ξ)), K times; x ← x + Δ̄."""

    name: ClassVar[str] = "sign_fedavg"

    client_learning_rate: float = Field(0.002, gt=0, title="η", description="client step size")

    def client_update(
        self, received: Arrays, client_state: ClientState, objective: Objective
    ) -> tuple[Arrays, ClientState]:
        x = received["model"]
        y: Tensor = objective.working_copy(x)
        for batch in objective.batches():
            y.sub_(objective.gradient(y, batch).sign(), alpha=self.client_learning_rate)
        return {"delta": y - x}, {}

    def server_update(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        delta = weighted_sum([(reply.weight, reply.upload["delta"]) for reply in replies])
        return state.replace(model=state["model"] + delta)

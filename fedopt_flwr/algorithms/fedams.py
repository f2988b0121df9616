"""FedAMS: FedAdam that divides by the largest second moment so far, as AMSGrad does.

Wang, Lin, Chen: "Communication-Efficient Adaptive Federated Learning", ICML 2022, Algorithm 1,
option 1 (max stabilisation: v̂ ← max(v̂, v, ε)).
Deviations: none. m, v and v̂ start at 0.
Taken from `fedavg`: the clients' half.
Defaults: η = 0.05, η_g = 0.01, β₁ = 0.9, β₂ = 0.99, ε = 1e-3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from ..algorithm import Reply, ServerState, weighted_sum
from .fedavg import FedAvg


class FedAMS(FedAvg):
    """m ← β₁m + (1−β₁)Δ̄; v ← β₂v + (1−β₂)Δ̄²; v̂ ← max(v̂, v, ε); x ← x + η_g m/√v̂."""

    name: ClassVar[str] = "fedams"
    server_state: ClassVar[tuple[str, ...]] = (
        "model",
        "first_moment",
        "second_moment",
        "largest_second_moment",
    )

    server_learning_rate: float = Field(
        0.01, gt=0, title="η_g", description="step size of the server's optimiser"
    )
    first_decay: float = Field(0.9, ge=0, lt=1, title="β₁", description="decay of the first moment")
    second_decay: float = Field(
        0.99, ge=0, lt=1, title="β₂", description="decay of the second moment"
    )
    adaptivity: float = Field(1e-3, gt=0, title="ε", description="smallest v̂")

    def server_update(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        delta = weighted_sum([(r.weight, r.upload["delta"]) for r in replies])
        m = state["first_moment"].lerp(delta, 1 - self.first_decay)
        v = state["second_moment"].lerp(delta.square_(), 1 - self.second_decay)
        v_hat = v.maximum(state["largest_second_moment"]).clamp_(min=self.adaptivity)
        x = state["model"].addcdiv(m, v_hat.sqrt(), value=self.server_learning_rate)
        return state.replace(model=x, first_moment=m, second_moment=v, largest_second_moment=v_hat)

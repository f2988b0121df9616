"""FedAvgM: FedAvg whose server adds the clients' mean movement to a momentum buffer.

Hsu, Qi, Brown: "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", arXiv:1909.06335, 2019, section 4.3 (no Algorithm): v ← βv + Δw; w ← w − v.
Deviations: none (our Δ is new minus old, so the step is added); η_g is 1 there.
Flower's own FedAvgM with server_momentum = β₁ and server_learning_rate = η_g computes the same.
Taken from `fedavg`: the clients' half.
Defaults: η = 0.05, η_g = 1, β₁ = 0.9. β₁ = 0 is FedAvg.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from ..algorithm import Reply, ServerState, weighted_sum
from .fedavg import FedAvg


class FedAvgM(FedAvg):
    """y ← y − η∇F(y;ξ), K times; m ← β₁m + Δ̄; x ← x + η_g m."""

    name: ClassVar[str] = "fedavgm"
    server_state: ClassVar[tuple[str, ...]] = ("model", "first_moment")
    reduces_to = ({"momentum": 0.0}, "fedavg", {})

    momentum: float = Field(
        0.9, ge=0, le=1, title="β₁", description="weight of the old buffer; 0 is FedAvg"
    )

    def server_update(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        delta = weighted_sum([(r.weight, r.upload["delta"]) for r in replies])
        m = delta.add_(state["first_moment"], alpha=self.momentum)
        x = state["model"].add(m, alpha=self.server_learning_rate)
        return state.replace(model=x, first_moment=m)

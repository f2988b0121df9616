"""What FedAdagrad, FedAdam, FedYogi and FedAMS share: moments of the clients' mean movement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ..algorithm import Plan, Reply, ServerState, weighted_sum
from .fedavg import FedAvg

if TYPE_CHECKING:
    from torch import Tensor


class ServerAdaptiveRule(FedAvg):
    """Clients as in FedAvg; m ← β₁m + (1−β₁)Δ̄; v by the rule; x ← x + η_g m/(√v + τ)."""

    server_state: ClassVar[tuple[str, ...]] = ("model", "first_moment", "second_moment")

    server_learning_rate: float = Field(
        0.01, gt=0, title="η_g", description="step size of the server's optimiser"
    )
    first_decay: float = Field(0.9, ge=0, lt=1, title="β₁", description="decay of the first moment")
    adaptivity: float = Field(
        1e-3, gt=0, title="τ", description="floor of the divisor; v starts at τ²"
    )

    def init_server(self, x: Tensor, plan: Plan) -> ServerState:
        v = x.new_full(x.shape, self.adaptivity**2)
        m = x.new_zeros(x.shape)
        return ServerState(plan, {"model": x, "first_moment": m, "second_moment": v})

    def server_update(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        delta = weighted_sum([(r.weight, r.upload["delta"]) for r in replies])
        m = state["first_moment"].lerp(delta, 1 - self.first_decay)
        v = self.next_second_moment(state["second_moment"], delta.square_())
        step = m / v.sqrt().add_(self.adaptivity)
        x = state["model"].add(step, alpha=self.server_learning_rate)
        return state.replace(model=x, first_moment=m, second_moment=v)

    def next_second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        """Return v for the next round from v and Δ̄²."""
        raise TypeError(f"{type(self).__name__}: next_second_moment is missing")

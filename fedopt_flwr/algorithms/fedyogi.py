"""FedYogi: FedAdam whose second moment changes by an amount that does not depend on its size.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: "Adaptive Federated Optimization",
ICLR 2021, Algorithm 2, FEDYOGI. Deviations: none. Flower's own FedYogi starts v at 0.
Taken from `fedavg`: the clients' half.
Defaults: η = 0.05, η_g = 0.01, β₁ = 0.9, β₂ = 0.99, τ = 1e-3; v starts at τ², m at 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ._server_adaptive import ServerAdaptiveRule

if TYPE_CHECKING:
    from torch import Tensor


class FedYogi(ServerAdaptiveRule):
    """m as FedAdam; v ← v − (1−β₂)Δ̄² sign(v − Δ̄²); x ← x + η_g m/(√v + τ)."""

    name: ClassVar[str] = "fedyogi"

    second_decay: float = Field(
        0.99, ge=0, lt=1, title="β₂", description="decay of the second moment"
    )

    def next_second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        change = (v - squared).sign_().mul_(squared)
        return v.sub(change, alpha=1 - self.second_decay)

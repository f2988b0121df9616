"""FedYogi: FedAdam whose second moment changes by an amount that does not depend on its size.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: "Adaptive Federated Optimization",
ICLR 2021, Algorithm 2, FEDYOGI. Deviations: none. Flower's own FedYogi starts v at 0.
Defaults: η = 0.05, η_g = 0.01, β₁ = 0.9, β₂ = 0.99, τ = 1e-3; v starts at τ², m at 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from .fedadam import FedAdam

if TYPE_CHECKING:
    from torch import Tensor


class FedYogi(FedAdam):
    """m as FedAdam; v ← v − (1−β₂)Δ̄² sign(v − Δ̄²); x ← x + η_g m/(√v + τ)."""

    name: ClassVar[str] = "fedyogi"

    def next_second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        change = (v - squared).sign_().mul_(squared)
        return v.sub(change, alpha=1 - self.second_decay)

"""FedAdagrad: the server divides the mean movement by the root of all its squares so far.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: "Adaptive Federated Optimization",
ICLR 2021, Algorithm 2, FEDADAGRAD. Deviations: none; β₁ = 0 is what its experiments use.
Flower's own FedAdagrad keeps m with β₁ = 0 and starts v at 0.
Taken from `fedavg`: the clients' half.
Defaults: η = 0.05, η_g = 0.01, β₁ = 0.9, τ = 1e-3; v starts at τ², m at 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ._server_adaptive import ServerAdaptiveRule

if TYPE_CHECKING:
    from torch import Tensor


class FedAdagrad(ServerAdaptiveRule):
    """y ← y − η∇F(y;ξ), K times; m ← β₁m + (1−β₁)Δ̄; v ← v + Δ̄²; x ← x + η_g m/(√v + τ)."""

    name: ClassVar[str] = "fedadagrad"

    def next_second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v + squared

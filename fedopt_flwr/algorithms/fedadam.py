"""FedAdam: the server takes the clients' mean movement as the gradient of an Adam step.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: "Adaptive Federated Optimization",
ICLR 2021, Algorithm 2, FEDADAM. Deviations: none. Like the paper, no bias correction; Flower's own
FedAdam multiplies its step by √(1−β₂^(t+1))/(1−β₁^(t+1)), t from 1, and starts v at 0.
Taken from `fedavg`: the clients' half.
Defaults: η = 0.05, η_g = 0.01, β₁ = 0.9, β₂ = 0.99, τ = 1e-3; v starts at τ², m at 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ._server_adaptive import ServerAdaptiveRule

if TYPE_CHECKING:
    from torch import Tensor


class FedAdam(ServerAdaptiveRule):
    """Clients as FedAvg; m ← β₁m + (1−β₁)Δ̄; v ← β₂v + (1−β₂)Δ̄²; x ← x + η_g m/(√v + τ)."""

    name: ClassVar[str] = "fedadam"

    second_decay: float = Field(
        0.99, ge=0, lt=1, title="β₂", description="decay of the second moment"
    )

    def next_second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v.lerp(squared, 1 - self.second_decay)

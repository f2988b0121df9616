"""LocalAdam: FedAvg whose clients take Adam steps and keep their second moment between rounds.

The baseline of the FAdamGC paper (see `fadamgc`) without gradient correction, which has no
Algorithm of its own there: AMSGrad's maximum, no bias correction, ε outside the root. RMSProp and
AdamW in Adam's place are those of its appendix J, figure 12.
Deviations: where the paper leaves it open, v̂ begins a round at v; ε stands outside the root for
RMSProp too; AdamW, of which the paper gives no formula, is the usual one.
Defaults: η = 0.001, β₁ = 0.9, β₂ = 0.99, ε = 1e-8, η_g = 1. m starts every round at 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ..algorithm import Algorithm, Arrays, ClientState, Objective, Reply, ServerState, weighted_sum

if TYPE_CHECKING:
    from torch import Tensor

LocalOptimizer = Literal["adam", "rmsprop", "adamw"]


class LocalAdam(Algorithm):
    """m ← β₁m + (1−β₁)∇F; v ← β₂v + (1−β₂)∇F²; v̂ ← max(v̂, v); y ← y − η m/(√v̂ + ε) (or RMSProp,
    AdamW), K times; x ← x + η_g Δ̄."""

    name: ClassVar[str] = "local_adam"
    client_state: ClassVar[tuple[str, ...]] = ("second_moment",)
    client_means: ClassVar[Mapping[str, str]] = {}

    client_learning_rate: float = Field(0.001, gt=0, title="η", description="client step size")
    server_learning_rate: float = Field(
        1.0, gt=0, title="η_g", description="server step size, relative to the mean movement"
    )
    first_decay: float = Field(0.9, ge=0, lt=1, title="β₁", description="decay of the first moment")
    second_decay: float = Field(
        0.99, ge=0, lt=1, title="β₂", description="decay of the second moment"
    )
    adaptivity: float = Field(1e-8, gt=0, title="ε", description="floor of the divisor")
    optimizer: LocalOptimizer = Field("adam", description="local optimiser")
    decoupled_weight_decay: float = Field(
        0.01, ge=0, title="λ", description="of adamw alone: y ← y − η(step + λy)"
    )

    def client_update(
        self, received: Arrays, client_state: ClientState, objective: Objective
    ) -> tuple[Arrays, ClientState]:
        x = received["model"]
        moments = AdamMoments(
            client_state["second_moment"], self.first_decay, self.second_decay, self.adaptivity
        )
        y = objective.working_copy(x)
        for batch in objective.batches():
            gradient = objective.gradient(y, batch)
            step = moments.step_of(self.optimizer, gradient, y, self.decoupled_weight_decay)
            y.sub_(step, alpha=self.client_learning_rate)
        return {"delta": y - x}, {"second_moment": moments.second}

    def server_update(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        delta = weighted_sum([(r.weight, r.upload["delta"]) for r in replies])
        return state.replace(model=state["model"].add(delta, alpha=self.server_learning_rate))


class AdamMoments:
    """m and v̂ of one client in one round, and v, which it keeps; vectors of shape [size]."""

    def __init__(
        self, second_moment: Tensor, first_decay: float, second_decay: float, adaptivity: float
    ) -> None:
        self._first_decay = first_decay  # β₁
        self._second_decay = second_decay  # β₂
        self._adaptivity = adaptivity  # ε
        self._first = second_moment.new_zeros(second_moment.shape)  # m
        self.second = second_moment.clone()  # v
        self._largest = second_moment.clone()  # v̂

    def step(self, gradient: Tensor) -> Tensor:
        """Take in a gradient (kept unchanged) and return m/(√v̂ + ε)."""
        import torch

        self._first.lerp_(gradient, 1 - self._first_decay)
        self._renew_second(gradient)
        torch.maximum(self._largest, self.second, out=self._largest)
        return self._first / self._largest.sqrt().add_(self._adaptivity)

    def step_of(
        self, optimizer: LocalOptimizer, gradient: Tensor, y: Tensor, weight_decay: float
    ) -> Tensor:
        """Take in a gradient (kept unchanged) and return Adam's step, RMSProp's ∇F/(√v + ε), or
        AdamW's, which adds weight_decay times y."""
        if optimizer == "rmsprop":
            self._renew_second(gradient)
            return gradient / self.second.sqrt().add_(self._adaptivity)
        step = self.step(gradient)
        return step.add_(y, alpha=weight_decay) if optimizer == "adamw" else step

    def _renew_second(self, gradient: Tensor) -> None:
        self.second.mul_(self._second_decay)
        self.second.addcmul_(gradient, gradient, value=1 - self._second_decay)

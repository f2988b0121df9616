"""Δ-SGD: FedAvg whose clients find every step size from how fast their own gradient changes.

Kim, Toghani, Uribe, Kyrillidis: "Adaptive Federated Learning with Auto-Tuned Clients", ICLR 2024,
Algorithm 1 (reconstruction: the text could not be read): η_k = min{γ‖y_k − y_{k−1}‖/(2‖q_k −
q_{k−1}‖), √(1 + δθ_{k−1}) η_{k−1}}, θ_k = η_k/η_{k−1}, q_k = ∇F(y_k; ξ_k); η₀ and θ₀ count at the
first step of every round.
Deviations: none; the two gradients are of two minibatches, as they come. A step along a zero
gradient measured nothing and bounds nothing.
Taken from `fedavg`: the server's half, where η_g is 1.
Defaults, the paper's: γ = 2, δ = 0.1, η₀ = 0.2, θ₀ = 1. Nothing to tune.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from ..algorithm import Algorithm, Arrays, ClientState, Objective, Reply, ServerState
from .fedavg import FedAvg

_FIRST_RATIO = 1.0  # θ₀


class DeltaSGD(Algorithm):
    """η_k = min{γ‖y_k − y_{k−1}‖/(2‖q_k − q_{k−1}‖), √(1 + δη_{k−1}/η_{k−2}) η_{k−1}};
    y ← y − η_k q_k, K times; x ← x + Δ̄."""

    name: ClassVar[str] = "delta_sgd"

    smoothness_share: float = Field(
        2.0, gt=0, title="γ", description="twice the share of the measured 1/L that is taken"
    )
    growth: float = Field(0.1, ge=0, title="δ", description="how fast a step may grow")
    first_learning_rate: float = Field(
        0.2, gt=0, title="η₀", description="step size that begins every round"
    )

    def client_update(
        self, received: Arrays, client_state: ClientState, objective: Objective
    ) -> tuple[Arrays, ClientState]:
        import torch

        x = received["model"]
        y = objective.working_copy(x)
        eta = torch.full_like(x[..., :1], self.first_learning_rate)
        ratio = torch.full_like(eta, _FIRST_RATIO)
        moved = q_before = None
        for batch in objective.batches():
            q = objective.gradient(y, batch)
            if q_before is not None and moved is not None:
                before = eta
                changed = torch.linalg.vector_norm(q - q_before, dim=-1, keepdim=True)
                length = torch.linalg.vector_norm(moved, dim=-1, keepdim=True)
                bound = length * (self.smoothness_share / 2) / changed
                bound = bound.where(length > 0, torch.inf)  # where nothing moved there is none
                eta = torch.minimum(bound, (1 + self.growth * ratio).sqrt() * before)
                ratio = (eta / before).nan_to_num(_FIRST_RATIO)
            q_before = q.clone()
            moved = q_before * eta
            y.sub_(moved)
        return {"delta": y - x}, client_state

    def server_update(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        return FedAvg().server_update(state, replies)

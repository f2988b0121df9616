"""FedNova: FedAvg that takes the mean of the clients' movements a step, not of whole movements.

Wang, Liu, Liang, Joshi, Poor: "Tackling the Objective Inconsistency Problem in Heterogeneous
Federated Optimization", NeurIPS 2020, Algorithm 1 (reconstruction: the text could not be read) for
plain local SGD, ‖a_i‖₁ = K_i: x ← x − τ_eff Σ w_i η d_i with d_i = −Δ_i/(ηK_i), τ_eff = Σ w_i K_i.
Deviations: an η_g, 1 in the paper. `training.gradient_momentum` is not part of ‖a_i‖₁.
Taken from `fedavg`: the clients' half.
Defaults: η = 0.05, η_g = 1. With equal K_i it is FedAvg; give `training.local_epochs` to see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ..algorithm import Reply, ServerState, weighted_sum
from .fedavg import FedAvg


class FedNova(FedAvg):
    """y ← y − η∇F(y;ξ), K_i times; x ← x + η_g (Σ w_i K_i)(Σ w_i Δ_i/K_i)."""

    name: ClassVar[str] = "fednova"
    reduces_to = ({}, "fedavg", {})  # with equal K_i

    def server_update(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        step = weighted_sum([(r.weight / r.num_steps, r.upload["delta"]) for r in replies])
        steps = sum(r.weight * r.num_steps for r in replies)  # τ_eff
        x = state["model"].add(step, alpha=self.server_learning_rate * steps)
        return state.replace(model=x)

"""FedAvg-M: local steps along a mixture of the gradient and the server's direction (= FedCM).

Cheng, Huang, Wu, Yuan: "Momentum Benefits Non-IID Federated Learning Simply and Provably",
ICLR 2024, Algorithm 1. The same rule as FedCM: Xu, Wang, Wang, Yao, arXiv:2106.10874.
Deviations: the paper analyses full participation; here S < N works too, as in FedCM. The paper's
absolute server rate γ is η_g·η·K. Not to be confused with Hsu et al.'s server momentum, `fedavgm`.
Taken from `fedavg`: the server's x, and both step sizes.
Defaults: η = 0.05, β = 0.2 (the paper's MLP experiments), η_g = 1 (γ = ηK). β = 1 is FedAvg.
The paper's ResNet experiments take g/β and η̂ = βη: their η̂ = 0.001 with β = 0.1 is η = 0.01 here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from ..algorithm import Arrays, ClientState, Objective, Reply, ServerState, weighted_sum
from .fedavg import FedAvg


class FedAvgWithMomentum(FedAvg):
    """y ← y − η(β∇F(y;ξ) + (1−β)g), K times; g ← −Σ w_i Δ_i/(ηK_i); x ← x + η_g Δ̄."""

    name: ClassVar[str] = "fedavg_m"
    server_state: ClassVar[tuple[str, ...]] = ("model", "server_momentum")
    broadcast_names: ClassVar[tuple[str, ...]] = ("model", "server_momentum")
    reduces_to = ({"momentum": 1.0}, "fedavg", {})

    momentum: float = Field(
        0.2, ge=0, le=1, title="β", description="weight of the new gradient; 1 is no momentum"
    )

    def client_update(
        self, received: Arrays, client_state: ClientState, objective: Objective
    ) -> tuple[Arrays, ClientState]:
        eta, beta = self.client_learning_rate, self.momentum
        x, g = received["model"], received["server_momentum"]
        y = objective.working_copy(x)
        drift = g * (eta * (1 - beta))  # η(1−β)g, the same at every step
        for batch in objective.batches():
            y.sub_(objective.gradient(y, batch), alpha=eta * beta).sub_(drift)
        return {"delta": y - x}, client_state

    def server_update(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        eta = self.client_learning_rate
        g = weighted_sum([(-r.weight / (eta * r.num_steps), r.upload["delta"]) for r in replies])
        return super().server_update(state, replies).replace(server_momentum=g)

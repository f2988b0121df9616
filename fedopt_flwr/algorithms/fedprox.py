"""FedProx: FedAvg whose local steps are pulled back to the server's model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in Heterogeneous Networks",
MLSys 2020, Algorithm 2: the local problem is F_i(y) + (μ/2)‖y − x‖².
Deviations: the local problem is worked on by K gradient steps, as in the authors' experiments, and
clients are drawn uniformly.
Taken from `fedavg`: the server's half.
Defaults: μ = 0.01, η = 0.05, η_g = 1. μ = 0 is FedAvg.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ..algorithm import Arrays, ClientState, Objective
from .fedavg import FedAvg


class FedProx(FedAvg):
    """y ← y − η(∇F(y;ξ) + μ(y − x)), K times; x ← x + η_g Δ̄."""

    name: ClassVar[str] = "fedprox"
    reduces_to = ({"proximal_strength": 0.0}, "fedavg", {})

    proximal_strength: float = Field(
        0.01, ge=0, title="μ", description="weight of the pull back to the server's model"
    )

    def client_update(
        self, received: Arrays, client_state: ClientState, objective: Objective
    ) -> tuple[Arrays, ClientState]:
        x = received["model"]
        y = objective.working_copy(x)
        for batch in objective.batches():
            pull = (y - x).mul_(self.proximal_strength)  # μ(y − x)
            pull.add_(objective.gradient(y, batch))
            y.sub_(pull, alpha=self.client_learning_rate)
        return {"delta": y - x}, client_state

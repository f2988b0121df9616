"""FedExP: FedAvg whose server step follows from how much the clients' movements disagree.

Jhunjhunwala, Wang, Joshi: "FedExP: Speeding Up Federated Averaging via Extrapolation", ICLR 2023,
Algorithm 1 (reconstruction: the text could not be read):
η_g = max{1, Σ w_i‖Δ_i‖²/(2(‖Δ̄‖² + ε))}; what is evaluated is the mean of the last two iterates.
Deviations: none. "iterate_model" is what travels; "model" is that mean, and the run's result.
Taken from `fedavg`: the clients' half.
Defaults: η = 0.05, ε = 0.001. Where replies agree η_g is 1, and the iterates are FedAvg's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from ..algorithm import Algorithm, Arrays, ClientState, Objective, Reply, ServerState, weighted_sum
from .fedavg import FedAvg


class FedExP(Algorithm):
    """y ← y − η∇F(y;ξ), K times; z ← z + max{1, Σ w_i‖Δ_i‖²/(2(‖Δ̄‖² + ε))} Δ̄; x = ½(z + z_old)."""

    name: ClassVar[str] = "fedexp"
    server_state: ClassVar[tuple[str, ...]] = ("model", "iterate_model")

    client_learning_rate: float = Field(0.05, gt=0, title="η", description="client step size")
    adaptivity: float = Field(0.001, gt=0, title="ε", description="floor of the divisor")

    def broadcast(self, state: ServerState) -> Arrays:
        return {"model": state["iterate_model"]}

    def client_update(
        self, received: Arrays, client_state: ClientState, objective: Objective
    ) -> tuple[Arrays, ClientState]:
        half = FedAvg(client_learning_rate=self.client_learning_rate)
        return half.client_update(received, client_state, objective)

    def server_update(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        mean = weighted_sum([(r.weight, r.upload["delta"]) for r in replies])
        squares = weighted_sum([(r.weight, r.upload["delta"].square()) for r in replies])
        disagreement = squares.sum(-1, keepdim=True)  # Σ w_i‖Δ_i‖²
        agreement = mean.square().sum(-1, keepdim=True).add_(self.adaptivity)
        server_step = disagreement.div_(agreement.mul_(2)).clamp_(min=1)  # η_g
        before = state["iterate_model"]
        after = before + mean.mul_(server_step)
        return state.replace(model=(before + after).div_(2), iterate_model=after)

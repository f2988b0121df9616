"""MimeLite: momentum of the server's model alone, which clients apply and do not change.

Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh: "Mime: Mimicking Centralized Stochastic
Algorithms in Federated Learning", 2020, arXiv:2008.03606, Algorithm 1 with SGD and momentum
(reconstruction: the text could not be read): a client's full gradient at x moves the server's
momentum. With β the weight of the new gradient, as in all our rules (the paper's is 1 − β).
Deviations: an η_g, 1 in the paper. Mime itself is not here: its control variate is the mean
gradient at x of the round's own clients, needed before their first step: a second exchange.
Taken from `fedavg`: both step sizes.
Defaults: η = 0.05, η_g = 1, β = 0.1. β = 1 is FedAvg.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from ..algorithm import Arrays, ClientState, Objective, Reply, ServerState, weighted_sum
from .fedavg import FedAvg


class MimeLite(FedAvg):
    """y ← y − η(β∇F(y;ξ) + (1−β)g), K times; x ← x + η_g Δ̄; g ← βΣ w_i ∇F_i(x) + (1−β)g."""

    name: ClassVar[str] = "mimelite"
    server_state: ClassVar[tuple[str, ...]] = ("model", "server_momentum")
    broadcast_names: ClassVar[tuple[str, ...]] = ("model", "server_momentum")
    upload_names: ClassVar[tuple[str, ...]] = ("delta", "gradient")
    reduces_to = ({"momentum": 1.0}, "fedavg", {})

    momentum: float = Field(0.1, gt=0, le=1, title="β", description="weight of the new gradient")

    def client_update(
        self, received: Arrays, client_state: ClientState, objective: Objective
    ) -> tuple[Arrays, ClientState]:
        beta, x = self.momentum, received["model"]
        old = received["server_momentum"] * (1 - beta)  # (1−β)g, the same at every step
        gradient = objective.full_gradient(x)
        y = objective.working_copy(x)
        for batch in objective.batches():
            u = old.add(objective.gradient(y, batch), alpha=beta)
            y.sub_(u, alpha=self.client_learning_rate)
        return {"delta": y - x, "gradient": gradient}, client_state

    def server_update(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        gradient = weighted_sum([(r.weight, r.upload["gradient"]) for r in replies])
        g = gradient.mul_(self.momentum).add_(state["server_momentum"], alpha=1 - self.momentum)
        return super().server_update(state, replies).replace(server_momentum=g)

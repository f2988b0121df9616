"""SCAFFOLD-M: SCAFFOLD whose local steps also follow the server's momentum.

Cheng, Huang, Wu, Yuan: "Momentum Benefits Non-IID Federated Learning Simply and Provably",
ICLR 2024, Algorithm 2 and equation (3); starts as in Theorem 3 (c_i from gradients, g = 0).
Deviations: only d = βc + (1−β)g travels down, since clients use c and g in no other way; c_i⁺ − c_i
does not travel up, see `scaffold` (Δ = −ηK_i[β(c_i⁺ − c_i) + d]). The paper's γ is η_g·η·K.
Taken from `scaffold`: the clients' half, written there for any β and d, and the server's x and c.
Defaults: η = 0.05, β = 0.2 (the paper's MLP experiments), η_g = 1 (γ = ηK). β = 1 is SCAFFOLD.
The paper's ResNet experiments take g/β and η̂ = βη: their η̂ = 0.001 with β = 0.1 is η = 0.01 here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from ..algorithm import Arrays, Reply, ServerState, weighted_sum
from .scaffold import Scaffold


class ScaffoldM(Scaffold):
    """y ← y − η(β(∇F(y;ξ) − c_i + c) + (1−β)g), K times; g ← −Σ w_i Δ_i/(ηK_i);
    x, c as SCAFFOLD."""

    name: ClassVar[str] = "scaffold_m"
    server_state: ClassVar[tuple[str, ...]] = ("model", "control_variate", "server_momentum")
    reduces_to = ({"momentum": 1.0}, "scaffold", {})

    momentum: float = Field(
        0.2, ge=0, le=1, title="β", description="weight of the new gradient; 1 is SCAFFOLD"
    )

    @property
    def beta(self) -> float:
        return self.momentum

    def broadcast(self, state: ServerState) -> Arrays:
        c, g = state["control_variate"], state["server_momentum"]
        direction = (c * self.momentum).add_(g, alpha=1 - self.momentum)  # d = βc + (1−β)g
        return {"model": state["model"], "direction": direction}

    def server_update(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        eta = self.client_learning_rate
        g = weighted_sum([(-r.weight / (eta * r.num_steps), r.upload["delta"]) for r in replies])
        return super().server_update(state, replies).replace(server_momentum=g)

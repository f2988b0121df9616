"""FedMoS: local momentum with variance reduction, server momentum, and a choice of samplers.

X. Wang, Chen, Li, Liao, Jin, B. Li: "FedMoS: Taming Client Drift in Federated Learning with Double
Momentum and Adaptive Selection", INFOCOM 2023, Algorithm 1, equations (3) and (4); its samplers are
`federation.sampler`.
Deviations: η_g, 1 in the paper; b = −ηI·u, so that it stands where every rule's step size stands,
and keeps the η of its rounds where a schedule changes η. Where K_i differ, I being undefined in the
paper, Δ_i counts as it is, and who takes more steps counts more. With the sampler `clustered` the
warm-up rounds train the model and count in T; in the authors' script they do neither. The summary
says how many they were (`warmup_rounds`): subtract them where samplers are compared.
Defaults: a = 0.1, β = 0.8, μ = 0.001, from the authors' published script; the theory wants
β ≤ min{√(Lη/(24μ)), 1/4} and μI in [1, 9/8]. η = 0.05, η_g = 1. p_i = n_i/Σn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from ..algorithm import Algorithm, Arrays, ClientState, Objective, Reply, ServerState, weighted_sum


class FedMoS(Algorithm):
    """d = ∇F_i(x), then d ← ∇F(y;ξ) + (1−a)(d − ∇F(y_prev;ξ)); y ← y − ηd − μ(y − x), K times;
    b ← βb + Σ w_i Δ_i; x ← x + η_g b."""

    name: ClassVar[str] = "fedmos"
    compares_points: ClassVar[bool] = True
    weighting: ClassVar[str] = "examples"
    unbiased_weights: ClassVar[bool] = True
    server_state: ClassVar[tuple[str, ...]] = ("model", "server_momentum")
    reduces_to = (
        {"local_momentum": 1.0, "momentum": 0.0, "proximal_strength": 0.0},
        "fedavg",
        {},
    )

    client_learning_rate: float = Field(0.05, gt=0, title="η", description="client step size")
    server_learning_rate: float = Field(
        1.0, gt=0, title="η_g", description="server step size, relative to the mean movement"
    )
    local_momentum: float = Field(
        0.1, ge=0, le=1, title="a", description="weight of a new gradient in the local direction"
    )
    momentum: float = Field(
        0.8, ge=0, le=1, title="β", description="weight of the server's old buffer"
    )
    proximal_strength: float = Field(
        0.001, ge=0, title="μ", description="pull back to the server's model, not multiplied by η"
    )
    initial_batch_size: int = Field(
        0, ge=0, title="B_{i,0}", description="examples of the first direction; 0: all"
    )

    def client_update(
        self, received: Arrays, client_state: ClientState, objective: Objective
    ) -> tuple[Arrays, ClientState]:
        x = received["model"]
        d = objective.full_gradient(x, self.initial_batch_size)
        y, y_prev = x, x
        for step, batch in enumerate(objective.batches()):
            if step > 0:
                d.sub_(objective.gradient(y_prev, batch)).mul_(1 - self.local_momentum)
                d.add_(objective.gradient(y, batch))
            pull = y.sub(x).mul_(self.proximal_strength)
            y_prev, y = y, y.sub(d, alpha=self.client_learning_rate).sub_(pull)
        return {"delta": y - x}, client_state

    def server_update(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        b = weighted_sum([(r.weight, r.upload["delta"]) for r in replies])
        b.add_(state["server_momentum"], alpha=self.momentum)
        x = state["model"].add(b, alpha=self.server_learning_rate)
        return state.replace(model=x, server_momentum=b)

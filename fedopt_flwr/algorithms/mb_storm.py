"""MB-STORM: one step a round along a minibatch gradient with momentum-based variance reduction.

Patel, Wang, Woodworth, Bullins, Srebro: "Towards Optimal Communication Complexity in Distributed
Non-Convex Optimization", NeurIPS 2022; a baseline of Cheng et al., ICLR 2024.
A reconstruction from the published description: no line of the authors' Algorithm was available.
Deviations: perhaps in constants and order.
Defaults: η = 0.02 (0.05 diverges on examples/mnist.toml), η_g = 1, β = 0.2; the step is η_g·ηK,
so that rates compare with FedAvg's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from ..algorithm import Arrays, ClientState, Objective, Reply, ServerState, weighted_sum
from ._gradient_start import GradientStartRule


class MBSTORM(GradientStartRule):
    """q_i = h_i(x) − (1−β)h_i(x⁻), h_i the mean of K minibatch gradients;
    g ← Σ w_i q_i + (1−β)g; x⁻ ← x; x ← x − η_g·ηK·g. Clients take no local steps."""

    name: ClassVar[str] = "mb_storm"
    compares_points: ClassVar[bool] = True
    server_state: ClassVar[tuple[str, ...]] = ("model", "server_momentum", "previous_model")
    broadcast_names: ClassVar[tuple[str, ...]] = ("model", "previous_model")
    upload_names: ClassVar[tuple[str, ...]] = ("gradient_change",)

    client_learning_rate: float = Field(
        0.02, gt=0, title="η", description="step size for each of the K minibatches"
    )
    server_learning_rate: float = Field(
        1.0, gt=0, title="η_g", description="server step size, relative to ηK"
    )
    momentum: float = Field(
        0.2, ge=0, le=1, title="β", description="weight of the new gradient; 1 is minibatch SGD"
    )

    def client_update(
        self, received: Arrays, client_state: ClientState, objective: Objective
    ) -> tuple[Arrays, ClientState]:
        x, x_prev = received["model"], received["previous_model"]
        before, q = x.new_zeros(x.shape), x.new_zeros(x.shape)
        for batch in objective.batches():
            before.add_(objective.gradient(x_prev, batch))
            q.add_(objective.gradient(x, batch))  # last, so that buffers end at x
        before.div_(objective.num_steps)
        q.div_(objective.num_steps).sub_(before, alpha=1 - self.momentum)
        return {"gradient_change": q}, client_state

    def server_update(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        x, g = state["model"], state["server_momentum"]
        g = weighted_sum(
            [(r.weight, r.upload["gradient_change"]) for r in replies] + [(1 - self.momentum, g)]
        )
        step = self.server_learning_rate * self.client_learning_rate * state.plan.mean_local_steps
        return state.replace(model=x.sub(g, alpha=step), previous_model=x, server_momentum=g)

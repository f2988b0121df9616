"""FAdamGC: local Adam whose gradients are corrected by control variates before the moments.

"Gradient Correction in Federated Learning with Adaptive Optimization" (authors withheld for
review), Algorithm 1; RMSProp from its appendix J. Only a subset of the sampled clients renews its
control variate, which saves uplink.
Deviations: c_i⁺ − c_i travels instead of c_i⁺; c_i start from K minibatch gradients, the paper's
full local gradient is "full_gradient"; v̂ begins a round at v, which the paper leaves open; ε stands
outside the root for RMSProp too, whose v is of corrected gradients, which the paper leaves open;
AdamW, of which the paper gives no formula, is the usual one.
Taken from `local_adam`: the moments of a client and the three optimisers (`AdamMoments`).
Defaults: η = 0.001, β₁ = 0.9, β₂ = 0.99, ε = 1e-8, η_g = 1, S̃ = S.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from ..algorithm import Arrays, ClientState, Objective, Reply, ServerState, weighted_sum
from ._control_variates import TrackedAdamRule
from .local_adam import AdamMoments, LocalOptimizer


class FAdamGC(TrackedAdamRule):
    """ĝ = ∇F(y;ξ) + c − c_i goes through Adam (RMSProp, AdamW); c_i⁺ = (1/K) Σ ∇F(y_k;ξ_k);
    x ← x + η_g Δ̄; c ← c + Σ_tracked p_i (c_i⁺ − c_i)."""

    name: ClassVar[str] = "fadamgc"

    optimizer: LocalOptimizer = Field("adam", description="local optimiser")
    decoupled_weight_decay: float = Field(
        0.01, ge=0, title="λ", description="of adamw alone: y ← y − η(step + λy)"
    )

    @property
    def upload_names(self) -> tuple[str, ...]:
        return ("delta", "control_variate_change") if self.tracks else ("delta",)

    def client_start(
        self, received: Arrays, client_state: ClientState, objective: Objective
    ) -> tuple[Arrays, ClientState]:
        if self.control_variate_start == "gradient":
            return super().client_start(received, client_state, objective)
        c_i = objective.full_gradient(received["model"])
        return {"control_variate": c_i}, {**client_state, "control_variate": c_i}

    def client_update(
        self, received: Arrays, client_state: ClientState, objective: Objective
    ) -> tuple[Arrays, ClientState]:
        x, c_i = received["model"], client_state["control_variate"]
        correction = received["control_variate"] - c_i
        moments = AdamMoments(
            client_state["second_moment"], self.first_decay, self.second_decay, self.adaptivity
        )
        y, gradient_sum = objective.working_copy(x), x.new_zeros(x.shape)
        for batch in objective.batches():
            gradient = objective.gradient(y, batch)
            gradient_sum.add_(gradient)
            step = moments.step_of(
                self.optimizer, gradient.add_(correction), y, self.decoupled_weight_decay
            )
            y.sub_(step.mul_(self.client_learning_rate))
        upload, state = {"delta": y - x}, {**client_state, "second_moment": moments.second}
        if self.tracks:
            change = gradient_sum.div_(objective.num_steps).sub_(c_i)
            upload["control_variate_change"] = change
            state["control_variate"] = c_i + change
        return upload, state

    def server_update(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        delta = weighted_sum([(r.weight, r.upload["delta"]) for r in replies])
        change = delta.new_zeros(delta.shape)
        for r in replies:
            for own in self.client_changes(state, r).values():
                change.add_(own, alpha=r.importance)
        x = state["model"].add(delta, alpha=self.server_learning_rate)
        return state.replace(model=x, control_variate=state["control_variate"] + change)

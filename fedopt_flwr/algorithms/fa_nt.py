"""FA-NT: local Adam whose steps are corrected after the moments ("naive tracking").

The baseline of the FAdamGC paper (see `fadamgc`), its Algorithm 2, that puts SCAFFOLD's correction
beside Adam's step instead of into its gradient. Control variates hold steps, not gradients, so they
start at zero (the listing names no start; its proof takes normalised gradients).
Deviations: ε outside the root, as in Algorithm 1; c_i⁺ − c_i = −Δ/(ηK_i) − c does not
travel: both sides compute it from Δ. v̂ begins a round at v, which the paper leaves open.
Taken from `local_adam`: the moments of a client (`AdamMoments`).
Defaults: η = 0.001, β₁ = 0.9, β₂ = 0.99, ε = 1e-8, η_g = 1, S̃ = S.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ..algorithm import Arrays, ClientState, Objective, Reply, ServerState, divided, weighted_sum
from ._control_variates import TrackedAdamRule
from .local_adam import AdamMoments

if TYPE_CHECKING:
    from torch import Tensor


class FANT(TrackedAdamRule):
    """y ← y − η(m/(√v̂ + ε) + c − c_i), K times; c_i⁺ = c_i − c + (x − y_K)/(Kη);
    x ← x + η_g Δ̄; c ← c + Σ_tracked p_i (c_i⁺ − c_i)."""

    name: ClassVar[str] = "fa_nt"

    control_variate_start: Literal["zero"] = Field(
        "zero", title="c_i⁰", description="a gradient would have the wrong scale"
    )

    def client_update(
        self, received: Arrays, client_state: ClientState, objective: Objective
    ) -> tuple[Arrays, ClientState]:
        eta, x, c = self.client_learning_rate, received["model"], received["control_variate"]
        c_i = client_state["control_variate"]
        moments = AdamMoments(
            client_state["second_moment"], self.first_decay, self.second_decay, self.adaptivity
        )
        y, correction = objective.working_copy(x), c - c_i
        for batch in objective.batches():
            y.sub_(moments.step(objective.gradient(y, batch)).add_(correction), alpha=eta)
        delta, state = y - x, {**client_state, "second_moment": moments.second}
        if self.tracks:
            state["control_variate"] = c_i + self._change(delta, c, objective.num_steps)
        return {"delta": delta}, state

    def client_changes(self, state: ServerState, reply: Reply) -> Arrays:
        if not self.for_client(reply.rank).tracks:
            return {}
        c = state["control_variate"]
        return {"control_variate": self._change(reply.upload["delta"], c, reply.num_steps)}

    def server_update(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        delta = weighted_sum([(r.weight, r.upload["delta"]) for r in replies])
        change = delta.new_zeros(delta.shape)
        for r in replies:
            for own in self.client_changes(state, r).values():
                change.add_(own, alpha=r.importance)
        x = state["model"].add(delta, alpha=self.server_learning_rate)
        return state.replace(model=x, control_variate=state["control_variate"] + change)

    def _change(self, delta: Tensor, c: Tensor, num_steps: int) -> Tensor:
        """c_i⁺ − c_i = −Δ/(ηK_i) − c; client and server must round it alike."""
        return divided(delta, -self.client_learning_rate * num_steps).sub_(c)

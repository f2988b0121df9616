"""PAdaMFed-DoG, experimental: PAdaMFed with step sizes from the distance travelled so far.

Ours; no paper's Algorithm and no proof. Deviations: none. PAdaMFed's theorems set one hidden
distance to 1; here it is estimated, with nothing to tune, in the spirit of
Ivgi, Hinder, Carmon: "DoG is SGD's Best Friend", ICML 2023.
With ḡ_s = Δ̄_s/(η_s K), r₀ = 0.01(1 + ‖x⁰‖) and t = 0 in the first round:
D_t = max(r₀, max_{s≤t} ‖x_s − x⁰‖); γ_0 = D_0, γ_t = D_t/√(Σ_{s<t} ‖ḡ_s‖²)·(1 − t/T);
η_t = γ_t/(K√β). γ_t and D_t stand in every record.
Taken from `padamfed`: both halves; the step sizes alone are its own.
Defaults: β = 0.3. It can grow too far: with a smaller β and in long runs on small data it was seen
to diverge (docs/experiments.md); a run that does says so. [schedule] changes η_t, not γ_t's record.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import Field

from ..algorithm import Plan, Reply, ServerState, weighted_sum
from .padamfed import PAdaMFed

if TYPE_CHECKING:
    from torch import Tensor

_INITIAL_SHARE = 0.01  # of 1 + ‖x⁰‖


class PAdaMFedDoG(PAdaMFed):
    """As PAdaMFed, with η_t = γ_t/(K√β), x ← x + γ_t ḡ_t, ḡ_t = Δ̄_t/(η_t K),
    γ_t = D_t/√(Σ_{s<t} ‖ḡ_s‖²)·(1 − t/T), D_t the largest distance from x⁰ so far."""

    name: ClassVar[str] = "padamfed_dog"
    experimental: ClassVar[bool] = True
    server_state: ClassVar[tuple[str, ...]] = (
        *PAdaMFed.server_state,
        "initial_model",
        "distance",
        "squared_gradients",
    )
    reduces_to = ({"momentum": 0.4}, "padamfed", {"momentum": 0.4})  # with both rates given

    client_learning_rate: float | None = Field(
        None, gt=0, title="η_t", description="client step size; derived in every round"
    )
    server_learning_rate: float | None = Field(
        None, gt=0, title="η_g", description="relative server step; derived: γ_t/(η_t K)"
    )
    momentum: float = Field(0.3, gt=0, le=1, title="β", description="weight of a new gradient")

    def resolve(self, plan: Plan) -> Self:
        return self

    def init_server(self, x: Tensor, plan: Plan) -> ServerState:
        zero, distance = x.new_zeros(1), _INITIAL_SHARE * (1 + x.norm().reshape(1))
        state = super().init_server(x, plan)
        return state.replace(distance=distance, squared_gradients=zero)

    def at_round(self, state: ServerState, number: int) -> Self:
        eta = self.client_learning_rate
        gamma, steps = self._movement(state, number), state.plan.mean_local_steps
        if eta is None:
            eta = gamma / (steps * math.sqrt(self.momentum))
        eta_g = self.server_learning_rate or gamma / (eta * steps)
        rates = {"client_learning_rate": eta, "server_learning_rate": eta_g, "step_scale": 1.0}
        return self.model_copy(update=rates)

    def _movement(self, state: ServerState, number: int) -> float:
        """Return γ_t."""
        gamma, squares = float(state["distance"]), float(state["squared_gradients"])
        if squares > 0:  # not before the second round
            horizon = state.plan.num_rounds
            gamma = gamma / math.sqrt(squares) * (1 - (min(number, horizon) - 1) / horizon)
        return self.step_scale * gamma

    def report(self, state: ServerState, number: int) -> dict[str, float]:
        rule, gamma = self.at_round(state, number), self._movement(state, number)
        if self.server_learning_rate is not None:
            rates = rule.derived("client_learning_rate") * self.server_learning_rate
            gamma = rates * state.plan.mean_local_steps
        return {"gamma": gamma, "distance": float(state["distance"])}

    def server_update(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        eta, x0 = self.derived("client_learning_rate"), state["initial_model"]
        mean = weighted_sum([(r.weight / (eta * r.num_steps), r.upload["delta"]) for r in replies])
        following = super().server_update(state, replies)
        distance = (following["model"] - x0).norm().reshape(1).maximum(state["distance"])
        squares = state["squared_gradients"] + mean.square().sum()
        return following.replace(distance=distance, squared_gradients=squares)

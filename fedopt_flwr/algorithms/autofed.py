"""AutoFed: a step length that is found in the first rounds, then SCAFFOLD-M with it; no rate.

Ours; no paper's Algorithm and no proof. Deviations: none. A range test, in the spirit of Smith:
"Cyclical Learning Rates for Training Neural Networks", WACV 2017, on how far a round goes.
Directions are SCAFFOLD-M's, u = β(∇F(y;ξ) − c_i + c) + (1−β)g, and a round moves by γ at most:
y ← y − (γ/K)u/max(‖u‖, U).
Ramp, U = 0: γ begins at 0.01(1 + ‖x⁰‖) and doubles in every round whose fresh mean gradient
G = c + Σ w_i(c_i⁺ − c_i) still falls along the movement m before it: the slope
p = −⟨G, m⟩/‖m‖ is above 0.3 of the largest so far, and the cosine p/‖G‖ above 0.3.
The first other round ends it, or one whose loss is above twice the largest F_i(x⁰) (above 0, where
that is negative), then with a quarter of γ; any later such round halves γ. A round that is taken
back because the model was no longer finite does the same to γ, without an end. From the end on U =
3‖g‖/‖ḡ‖, ḡ = Δ̄/γ, and γ is 3 times as long, so that γ/(KU) is the rate which that round had and
only directions three times as long are cut. For half of the remaining rounds γ stays, but grows by
a quarter in each round in which the cosine and its mean are above 0.15 and the mean loss, at its
lowest so far, above a quarter of the first: the ground may be flatter than where the ramp ended.
Once the mean loss is 1.2 times its lowest, half of these growths are taken back for good. Means
have weight β for the newest.
x itself stays where it is: of all that was measured no round needed more than a shorter γ.
In the other half γ falls to 0 in a line, if `decays`; without that nothing depends on T.
Taken from `padamfed`: both halves; the lengths alone are its own.
Defaults: β = 0.2 and the numbers above. Nothing to tune.
γ, U and the last slope stand in every record, `ramp_end` once it is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import Field

from ..algorithm import Arrays, ClientState, Objective, Plan, Reply, ServerState, weighted_sum
from ..errors import ConfigError
from ._control_variates import GradientVariateRule
from .padamfed import PAdaMFed

if TYPE_CHECKING:
    from torch import Tensor

_SCALARS = (
    *("step_length", "norm_floor", "slope", "largest_slope", "ramp_end"),
    *("first_loss", "largest_first_loss"),
    *("mean_cosine", "mean_loss", "lowest_loss", "num_growths"),  # since the ramp
)
_HOPELESS = 1.0  # the rise of the loss over F_i(x⁰), as a share of it: no useful length does that
_WORSE = 0.2  # the rise over the lowest mean loss, as a share of it: γ has grown too far
_MOSTLY_DONE = 0.25  # of the loss at x⁰: what is left needs no other rate


class AutoFed(GradientVariateRule):
    """u = β(∇F(y;ξ) − c_i + c) + (1−β)g; y ← y − (γ/K)u/max(‖u‖, U), K times; x ← x + Δ̄; c and g as
    PAdaMFed; γ doubles, with U = 0, while −⟨G, m⟩/‖m‖ stays large."""

    name: ClassVar[str] = "autofed"
    server_state: ClassVar[tuple[str, ...]] = (*PAdaMFed.server_state, "movement", *_SCALARS)
    broadcast_names: ClassVar[tuple[str, ...]] = PAdaMFed.broadcast_names
    upload_names: ClassVar[tuple[str, ...]] = ("delta", "control_variate_change")

    momentum: float = Field(0.2, gt=0, le=1, title="β", description="weight of a new gradient")
    first_share: float = Field(0.01, gt=0, description="γ of round 1, as a share of 1 + ‖x⁰‖")
    growth: float = Field(2.0, gt=1, description="what γ is multiplied by in the ramp")
    least_slope: float = Field(
        0.3, ge=0, lt=1, description="share of the largest slope, and cosine, that ends the ramp"
    )
    later_growth: float = Field(1.25, ge=1, description="what γ is multiplied by after the ramp")
    least_cosine: float = Field(
        0.15, gt=0, lt=1, description="cosine, and mean cosine, that this needs"
    )
    slack: float = Field(3.0, ge=1, description="how much longer than usual a direction may be")
    decays: bool = Field(True, description="γ falls to 0 by round T; false where no end is known")
    local_step: float | None = Field(None, gt=0, title="γ/K", description="found in every round")
    norm_floor: float | None = Field(None, ge=0, title="U", description="found in every round")
    round_number: int | None = Field(None, ge=1, description="known in every round")

    def resolve(self, plan: Plan) -> Self:
        for name in ("local_step", "norm_floor", "round_number"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"algorithm.{name}: got {getattr(self, name)}; autofed finds it; leave it out"
                )
        return self

    def init_server(self, x: Tensor, plan: Plan) -> ServerState:
        zero = x.new_zeros(1)
        state = super().init_server(x, plan).replace(**dict.fromkeys(_SCALARS, zero))
        return state.replace(step_length=self.first_share * (1 + x.norm().reshape(1)))

    def server_start(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        loss = sum(r.importance * r.loss for r in replies) / sum(r.importance for r in replies)
        state = _with(state, first_loss=loss, largest_first_loss=max(r.loss for r in replies))
        return self._half().server_start(state, replies)

    def at_round(self, state: ServerState, number: int) -> Self:
        found = self.report(state, number)
        step = found["gamma"] / state.plan.mean_local_steps
        floor = found["norm_floor"]
        update = {"local_step": step, "norm_floor": floor, "round_number": number}
        return self.model_copy(update=update)

    def report(self, state: ServerState, number: int) -> dict[str, float]:
        gamma, end, horizon = (
            float(state["step_length"]),
            int(state["ramp_end"]),
            state.plan.num_rounds,
        )
        if end and self.decays:
            left = max(horizon - number + 1, 1)  # an own loop may run on behind T
            gamma *= min(1.0, 2 * left / max(horizon - end, 1))
        shown = {"gamma": gamma, **{n: float(state[n]) for n in ("norm_floor", "slope")}}
        return {**shown, "ramp_end": end} if end else shown

    def broadcast(self, state: ServerState) -> Arrays:
        return self._half().broadcast(state)

    def client_update(
        self, received: Arrays, client_state: ClientState, objective: Objective
    ) -> tuple[Arrays, ClientState]:
        return self._half().client_update(received, client_state, objective)

    def server_update(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        loss, gamma = sum(r.weight * r.loss for r in replies), state["step_length"]
        first = float(state["first_loss"]) or loss
        largest_first = float(state["largest_first_loss"]) or max(r.loss for r in replies)
        following = self._half().server_update(state, replies)
        before, movement = state["movement"], following["model"] - state["model"]
        following = _with(following, first_loss=first, largest_first_loss=largest_first)
        following = following.replace(movement=movement)
        if not (float(before.norm()) and float(movement.norm())):
            return following
        changes = [(r.weight, r.upload["control_variate_change"]) for r in replies]
        fresh = weighted_sum(changes).add_(state["control_variate"])  # G
        slope = -(fresh @ before).reshape(1) / before.norm()  # p
        following = following.replace(slope=slope)
        is_hopeless = not loss - largest_first <= _HOPELESS * abs(largest_first)
        if int(state["ramp_end"]):
            if is_hopeless:
                return self.taken_back(following)
            size = fresh.norm()
            return self._after_ramp(following, loss, float(slope / size) if size else 0.0)
        largest = slope.maximum(state["largest_slope"])
        following = following.replace(largest_slope=largest)
        falls = bool(slope > self.least_slope * largest.maximum(fresh.norm()))
        if falls and not is_hopeless:
            return following.replace(step_length=self.growth * gamma)
        floor = following["server_momentum"].norm() * gamma / movement.norm()  # ‖g‖/‖ḡ‖
        found = gamma / self.growth**2 if is_hopeless else gamma
        return following.replace(
            step_length=self.slack * found,
            norm_floor=self.slack * floor,
            ramp_end=gamma.new_full((1,), self.round_number or 0),
        )

    def taken_back(self, state: ServerState) -> ServerState:
        """In the ramp the next good round doubles γ, to half of what was too long."""
        by = self.growth if int(state["ramp_end"]) else self.growth**2
        return state.replace(step_length=state["step_length"] / by)

    def _after_ramp(self, state: ServerState, loss: float, cosine: float) -> ServerState:
        """Let γ grow while that pays, and take half of the growths back where it did not."""
        gamma, grown = float(state["step_length"]), int(state["num_growths"])
        mean_loss, mean_cosine = float(state["mean_loss"]) or loss, float(state["mean_cosine"])
        mean_loss += self.momentum * (loss - mean_loss)
        mean_cosine += self.momentum * (cosine - mean_cosine)
        lowest = min(float(state["lowest_loss"]) or math.inf, mean_loss)
        end, horizon = int(state["ramp_end"]), state.plan.num_rounds
        may_grow = not self.decays or (self.round_number or 0) < (horizon + end) / 2
        is_due = min(cosine, mean_cosine) > self.least_cosine
        first = float(state["first_loss"])
        is_due = is_due and (first < 0 or mean_loss > _MOSTLY_DONE * first)
        if grown > 0 and mean_loss - lowest > _WORSE * abs(lowest):
            gamma, grown = gamma / self.later_growth ** (grown / 2), -1  # for good
        elif grown >= 0 and may_grow and is_due and mean_loss == lowest:
            gamma, grown = gamma * self.later_growth, grown + 1
        state = _with(state, step_length=gamma, num_growths=grown, mean_cosine=mean_cosine)
        return _with(state, mean_loss=mean_loss, lowest_loss=lowest)

    def _half(self) -> PAdaMFed:
        return _Capped(
            client_learning_rate=self.local_step,
            server_learning_rate=1.0,
            momentum=self.momentum,
            norm_floor=self.norm_floor or 0.0,
        )


def _with(state: ServerState, **numbers: float) -> ServerState:
    return state.replace(**{n: state[n].new_full((1,), value) for n, value in numbers.items()})


class _Capped(PAdaMFed):
    """PAdaMFed that divides its directions by max(‖u‖, U)."""

    norm_floor: float = 0.0

    def move(self, y: Tensor, u: Tensor) -> None:
        import torch

        if self.norm_floor:
            norm = torch.linalg.vector_norm(u, dim=-1, keepdim=True).clamp_(min=self.norm_floor)
            y.addcdiv_(u, norm, value=-self.derived("client_learning_rate"))
        else:
            super().move(y, u)

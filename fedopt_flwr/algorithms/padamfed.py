"""PAdaMFed: normalised local steps, control variates and momentum, with no rate to tune.

Yan, Zhang, Wang, Cao: "Problem-Parameter-Free Federated Learning", ICLR 2025, Algorithm 1 (its
line numbers stand below); step sizes from Theorem 1: η = 1/(K√T), γ = (SK)^¼/T^¾, β = √(SK/T).
Deviations: c_i⁺ − c_i travels up instead of c_i⁺, so that both sides add the same numbers; with
unequal local steps K is the mean of K_i over all N clients and Δ̄ = K Σ w_i Δ_i/K_i; β is capped at
1 (when T < SK), with a warning where it is not below (T ≤ SK). Where the preprint's line for c_i
sums k = 1..K, we take the K gradients of the loop, k = 0..K−1, as its equation (2) does. η_g is
γ/(ηK).
`step_scale` multiplies the theorem's η and γ, whose hidden distance is 1, and is 1 in the paper.
`normalize = false` is the paper's ablation; β = 1 is SCAFFOLD with normalised steps.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import Field, model_validator

from ..algorithm import (
    Arrays,
    ClientState,
    Objective,
    Plan,
    Reply,
    ServerState,
    add_unit_,
    weighted_sum,
)
from ..errors import FedoptWarning
from ._control_variates import GradientVariateRule

if TYPE_CHECKING:
    from torch import Tensor


class PAdaMFed(GradientVariateRule):
    """u = β(∇F(y;ξ) − c_i + c) + (1−β)g; y ← y − η u/‖u‖, K times; x ← x + η_g Δ̄;
    g ← β(Σ w_i(c_i⁺ − c_i) + c) + (1−β)g; c ← c + Σ p_i(c_i⁺ − c_i)."""

    name: ClassVar[str] = "padamfed"
    server_state: ClassVar[tuple[str, ...]] = ("model", "control_variate", "server_momentum")
    broadcast_names: ClassVar[tuple[str, ...]] = ("model", "direction")
    reduces_to = (
        {"normalize": False, "momentum": 0.4, "control_variate_start": "zero"},
        "scaffold_m",
        {"momentum": 0.4, "control_variate_start": "zero"},
    )

    client_learning_rate: float | None = Field(
        None, gt=0, title="η", description="client step size; derived: 1/(K√T)"
    )
    server_learning_rate: float | None = Field(
        None, gt=0, title="η_g", description="relative server step; derived: γ/(ηK)"
    )
    momentum: float | None = Field(
        None, ge=0, le=1, title="β", description="weight of a new gradient; derived: √(SK/T)"
    )
    normalize: bool = Field(True, description="divide every local direction by its norm")
    step_scale: float = Field(1.0, gt=0, description="multiplies the derived η and γ")

    @model_validator(mode="after")
    def _one_way_to_a_step(self) -> Self:
        for field in ("client_learning_rate", "server_learning_rate"):
            if self.step_scale != 1 and getattr(self, field) is not None:
                raise ValueError(
                    f"algorithm.step_scale: got {self.step_scale} beside algorithm.{field} = "
                    f"{getattr(self, field)}; it multiplies step sizes that are derived; leave one "
                    "of the two out"
                )
        return self

    @property
    def upload_names(self) -> tuple[str, ...]:
        return ("delta", "control_variate_change")

    def resolve(self, plan: Plan) -> Self:
        samples, horizon = plan.clients_per_round * plan.mean_local_steps, plan.num_rounds  # SK, T
        path, gamma, beta = self.theorem(samples, horizon)
        if beta >= 1 and self.momentum is None:
            warnings.warn(
                f"algorithm.momentum: the theorem's β = {beta:.3g} is not below 1 with SK = "
                f"{samples:g} and T = {horizon}; 1 is used, which means no momentum; more rounds "
                "or fewer local steps would avoid that",
                FedoptWarning,
                stacklevel=2,
            )
        steps, scale = plan.mean_local_steps, self.step_scale
        eta = self.client_learning_rate or scale * path / steps
        eta_g = self.server_learning_rate or scale * gamma / (eta * steps)
        beta = min(1.0, beta) if self.momentum is None else self.momentum
        derived = {"client_learning_rate": eta, "server_learning_rate": eta_g, "momentum": beta}
        return self.model_copy(update={**derived, "step_scale": 1.0})  # it is in them now

    def theorem(self, samples: float, horizon: int) -> tuple[float, float, float]:
        """Return ηK, γ and β of the theorem from SK and T."""
        return 1 / math.sqrt(horizon), samples**0.25 / horizon**0.75, math.sqrt(samples / horizon)

    def server_start(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        state = super().server_start(state, replies)
        return state.replace(server_momentum=state["control_variate"])  # line 1: g = c

    def broadcast(self, state: ServerState) -> Arrays:
        c, g, beta = state["control_variate"], state["server_momentum"], self.derived("momentum")
        return {"model": state["model"], "direction": (c * beta).add_(g, alpha=1 - beta)}  # line 17

    def client_update(
        self, received: Arrays, client_state: ClientState, objective: Objective
    ) -> tuple[Arrays, ClientState]:
        import torch

        beta = self.derived("momentum")
        x, d, c_i = received["model"], received["direction"], client_state["control_variate"]
        y = objective.working_copy(x)
        offset = d.sub(c_i, alpha=beta)  # d − βc_i, the same at every step
        gradient_sum = y.new_zeros(y.shape)
        for batch in objective.batches():
            u = objective.gradient(y, batch)
            gradient_sum.add_(u)
            torch.add(offset, u, alpha=beta, out=u)  # line 7
            self.move(y, u)  # line 8
        change = gradient_sum.div_(objective.num_steps).sub_(c_i)  # line 10
        upload = {"delta": torch.sub(y, x, out=offset), "control_variate_change": change}
        return upload, {"control_variate": c_i + change}

    def move(self, y: Tensor, u: Tensor) -> None:
        """y ← y − ηu/‖u‖, in place; u is overwritten."""
        eta = self.derived("client_learning_rate")
        if self.normalize:
            add_unit_(y, u, alpha=-eta)
        else:
            y.sub_(u, alpha=eta)

    def server_update(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        steps, beta = state.plan.mean_local_steps, self.derived("momentum")
        c, g = state["control_variate"], state["server_momentum"]
        delta = weighted_sum([(r.weight * steps / r.num_steps, r.upload["delta"]) for r in replies])
        fresh = weighted_sum([(r.weight, r.upload["control_variate_change"]) for r in replies])
        total = weighted_sum([(r.importance, r.upload["control_variate_change"]) for r in replies])
        return state.replace(
            model=state["model"].add(delta, alpha=self.derived("server_learning_rate")),  # line 14
            control_variate=c + total,  # line 15
            server_momentum=fresh.add_(c).mul_(beta).add_(g, alpha=1 - beta),  # line 16: old c, g
        )

    def derived(self, field: str) -> float:
        """Return η, η_g or β; ValueError, which names the field, where the plan must set it yet."""
        value: float | None = getattr(self, field)
        if value is None:
            raise ValueError(
                f"{self.name}: {field} is not derived yet; call resolve(plan), and "
                "at_round(state, number) in every round, before a rule is used"
            )
        return value

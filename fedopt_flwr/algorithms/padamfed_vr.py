"""PAdaMFed-VR: PAdaMFed whose local steps compare the same minibatch at y and at x⁻.

Yan, Zhang, Wang, Cao: "Problem-Parameter-Free Federated Learning", ICLR 2025, Algorithm 1 with its
lines for VR; step sizes from Theorem 2: η = 1/(KT), γ = β = (SK)^⅓/T^⅔.
Both papers print one line 16 for both rules, "printed". The ICLR text says beside equation (2) that
it means g = Σ_{i,k} g_i^{t,k}, and the proof of Theorem 2 begins there: g ← Σ w_i ū_i with
ū_i = (1/K) Σ_k u_k, "proved" (the default), with one more vector up.
Without normalisation "proved" is SCAFFOLD-M-VR; only it falls at the theorem's rate.
Taken from `padamfed`: the step along u/‖u‖, the server's half and how the rates are derived.
Deviations: those of `padamfed`; β is capped at 1 when T² < SK.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from ..algorithm import Arrays, ClientState, Objective, Reply, ServerState, weighted_sum
from .padamfed import PAdaMFed


class PAdaMFedVR(PAdaMFed):
    """u = ∇F(y;ξ) + β(c − c_i) + (1−β)(g − ∇F(x⁻;ξ)); y ← y − η u/‖u‖, K times; x, c as PAdaMFed;
    g as PAdaMFed ("printed") or g ← Σ w_i ū_i, ū_i the mean of the client's u ("proved")."""

    name: ClassVar[str] = "padamfed_vr"
    compares_points: ClassVar[bool] = True
    server_state: ClassVar[tuple[str, ...]] = (*PAdaMFed.server_state, "previous_model")
    broadcast_names: ClassVar[tuple[str, ...]] = ("model", "previous_model", "direction")
    reduces_to = (
        {"normalize": False, "momentum": 0.4},
        "scaffold_m_vr",
        {"momentum": 0.4},
    )

    client_learning_rate: float | None = Field(
        None, gt=0, title="η", description="client step size; derived: 1/(KT)"
    )
    momentum: float | None = Field(
        None, ge=0, le=1, title="β", description="weight of a new gradient; derived: (SK)^⅓/T^⅔"
    )
    momentum_rule: Literal["printed", "proved"] = Field(
        "proved", description="the server's g: the algorithm's line 16, or that of the proof"
    )

    @property
    def upload_names(self) -> tuple[str, ...]:
        proved = ("mean_direction",) if self.momentum_rule == "proved" else ()
        return ("delta", "control_variate_change", *proved)

    def theorem(self, samples: float, horizon: int) -> tuple[float, float, float]:
        gamma = samples ** (1 / 3) / horizon ** (2 / 3)
        return 1 / horizon, gamma, gamma

    def broadcast(self, state: ServerState) -> Arrays:
        return {**super().broadcast(state), "previous_model": state["previous_model"]}

    def client_update(
        self, received: Arrays, client_state: ClientState, objective: Objective
    ) -> tuple[Arrays, ClientState]:
        x, x_prev, d = received["model"], received["previous_model"], received["direction"]
        y, beta, c_i = x.clone(), self.derived("momentum"), client_state["control_variate"]
        offset = d.sub(c_i, alpha=beta)  # d − βc_i, the same at every step
        gradient_sum = y.new_zeros(y.shape)
        u_sum = y.new_zeros(y.shape) if self.momentum_rule == "proved" else None
        for batch in objective.batches():
            u = offset.sub(objective.gradient(x_prev, batch), alpha=1 - beta)
            gradient = objective.gradient(y, batch)
            gradient_sum.add_(gradient)
            u.add_(gradient)
            if u_sum is not None:
                u_sum.add_(u)
            self.move(y, u)
        change = gradient_sum.div_(objective.num_steps).sub_(c_i)
        upload = {"delta": y - x, "control_variate_change": change}
        if u_sum is not None:
            upload["mean_direction"] = u_sum.div_(objective.num_steps)
        return upload, {"control_variate": c_i + change}

    def server_update(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        following = super().server_update(state, replies).replace(previous_model=state["model"])
        if self.momentum_rule == "printed":
            return following
        g = weighted_sum([(r.weight, r.upload["mean_direction"]) for r in replies])
        return following.replace(server_momentum=g)

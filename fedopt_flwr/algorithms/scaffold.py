"""SCAFFOLD: local steps corrected by control variates, against client drift.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: "SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning", ICML 2020, Algorithm 1, option II for the control variates: the mean of the
uncorrected local gradients.
Deviations: c_i⁺ − c_i does not travel. As Δ = −ηK_i(c_i⁺ − c_i + c), both sides compute it from the
transmitted Δ and d = c, so that c stays Σ p_i c_i. Where ηK is below 1e-2, or a schedule may bring
it there, that division would lose digits, and the change is uploaded instead.
Defaults: η = 0.05, η_g = 1; gradient start as in Cheng et al. (ICLR 2024), "zero" in the original.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import Field

from ..algorithm import (
    Arrays,
    ClientState,
    Objective,
    Plan,
    Reply,
    ServerState,
    divided,
    weighted_sum,
)
from ..errors import ConfigError
from ._control_variates import GradientVariateRule

if TYPE_CHECKING:
    from torch import Tensor

_SMALLEST_LEAN_DIVISOR = 1e-2  # of βηK; float32 leaves about 1e-5/(βηK) of relative error


class Scaffold(GradientVariateRule):
    """y ← y − η(∇F(y;ξ) − c_i + c), K times; x ← x + η_g Δ̄; c ← c + Σ p_i (c_i⁺ − c_i)."""

    name: ClassVar[str] = "scaffold"
    broadcast_names: ClassVar[tuple[str, ...]] = ("model", "direction")

    client_learning_rate: float = Field(0.05, gt=0, title="η", description="client step size")
    server_learning_rate: float = Field(
        1.0, gt=0, title="η_g", description="server step size, relative to the mean movement"
    )
    lean_uplink: bool | None = Field(
        None, description="derive c_i⁺ − c_i from Δ on both sides; by default where that is exact"
    )

    @property
    def beta(self) -> float:
        """β: weight of the corrected gradient in a local step."""
        return 1.0

    @property
    def upload_names(self) -> tuple[str, ...]:
        return ("delta", "control_variate_change") if self.lean_uplink is False else ("delta",)

    def resolve(self, plan: Plan) -> Self:
        if self.lean_uplink and self.beta == 0:
            raise ConfigError(
                "algorithm.lean_uplink: got true with algorithm.momentum = 0; deriving c_i⁺ − c_i "
                "divides by that momentum; leave lean_uplink out or raise momentum"
            )
        if self.lean_uplink is not None:
            return self
        fewest = 1 if plan.steps_may_change else min(plan.local_steps.values())
        divisor = self.beta * self.client_learning_rate * fewest
        exact = plan.constant_rates and divisor >= _SMALLEST_LEAN_DIVISOR
        return self.model_copy(update={"lean_uplink": exact})

    def broadcast(self, state: ServerState) -> Arrays:
        return {"model": state["model"], "direction": state["control_variate"]}

    def client_update(
        self, received: Arrays, client_state: ClientState, objective: Objective
    ) -> tuple[Arrays, ClientState]:
        eta, beta = self.client_learning_rate, self.beta
        x, d, c_i = received["model"], received["direction"], client_state["control_variate"]
        y = objective.working_copy(x)
        correction = d.sub(c_i, alpha=beta).mul_(eta)  # η(d − βc_i), the same at every step
        gradient_sum = y.new_zeros(y.shape) if self.lean_uplink is False else None
        for batch in objective.batches():
            gradient = objective.gradient(y, batch)
            if gradient_sum is not None:
                gradient_sum.add_(gradient)
            y.sub_(gradient, alpha=eta * beta).sub_(correction)
        upload = {"delta": y - x}
        if gradient_sum is None:
            change = self._change(upload["delta"], d, objective.num_steps)
        else:
            change = gradient_sum.div_(objective.num_steps).sub_(c_i)
            upload["control_variate_change"] = change
        return upload, {"control_variate": c_i + change}

    def client_changes(self, state: ServerState, reply: Reply) -> Arrays:
        if self.lean_uplink is False:
            return super().client_changes(state, reply)
        d = self.broadcast(state)["direction"]
        return {"control_variate": self._change(reply.upload["delta"], d, reply.num_steps)}

    def server_update(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        delta = weighted_sum([(r.weight, r.upload["delta"]) for r in replies])
        c = state["control_variate"].clone()
        for r in replies:
            c.add_(self.client_changes(state, r)["control_variate"], alpha=r.importance)
        model = state["model"].add(delta, alpha=self.server_learning_rate)
        return state.replace(model=model, control_variate=c)

    def _change(self, delta: Tensor, d: Tensor, num_steps: int) -> Tensor:
        """c_i⁺ − c_i = (−Δ/(ηK_i) − d)/β; client and server must round it alike."""
        mean_direction = divided(delta, -self.client_learning_rate * num_steps)
        return divided(mean_direction.sub_(d), self.beta)

"""What every rule with control variates shares: the c_i, how they start, and c = Σ p_i c_i."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ..algorithm import (
    Algorithm,
    Arrays,
    ClientState,
    Objective,
    Plan,
    Reply,
    ServerState,
    weighted_sum,
)
from ._gradient_start import mean_gradient

if TYPE_CHECKING:
    from torch import Tensor


class ControlVariateRule(Algorithm):
    """A rule whose clients keep c_i ("control_variate") and whose server keeps c, their mean.

    "gradient": in round 0 all N clients take the mean of K minibatch gradients at x⁰ as c_i.
    "zero": c_i = c = 0 and there is no round 0.
    """

    server_state: ClassVar[tuple[str, ...]] = ("model", "control_variate")
    client_state: ClassVar[tuple[str, ...]] = ("control_variate",)

    control_variate_start: Literal["gradient", "zero"] = Field(
        "gradient", title="c_i⁰", description="how the control variates start"
    )

    @property
    def start_names(self) -> tuple[str, ...]:
        return ("control_variate",) if self.control_variate_start == "gradient" else ()

    def init_server(self, x: Tensor, plan: Plan) -> ServerState:
        return ServerState(plan, {"model": x, "control_variate": x.new_zeros(x.shape)})

    def init_client(self, size: int) -> ClientState:
        import torch

        return {"control_variate": torch.zeros(size)}

    def client_start(
        self, received: Arrays, client_state: ClientState, objective: Objective
    ) -> tuple[Arrays, ClientState]:
        c_i = mean_gradient(received["model"], objective)
        return {"control_variate": c_i}, {**client_state, "control_variate": c_i}

    def server_start(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        c = weighted_sum([(r.importance, r.upload["control_variate"]) for r in replies])
        return state.replace(control_variate=c)

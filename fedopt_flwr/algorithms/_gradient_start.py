"""A start pass in which every client sends its mean gradient at x⁰; the server keeps the mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ..algorithm import (
    Algorithm,
    Arrays,
    ClientState,
    Objective,
    Reply,
    ServerState,
    mean_gradient,
    weighted_sum,
)


class GradientStartRule(Algorithm):
    """A rule whose server begins with g ("server_momentum") = Σ p_i ∇F_i(x⁰)."""

    server_state: ClassVar[tuple[str, ...]] = ("model", "server_momentum")
    start_names: ClassVar[tuple[str, ...]] = ("gradient",)

    def client_start(
        self, received: Arrays, client_state: ClientState, objective: Objective
    ) -> tuple[Arrays, ClientState]:
        return {"gradient": mean_gradient(received["model"], objective)}, client_state

    def server_start(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        g = weighted_sum([(r.importance, r.upload["gradient"]) for r in replies])
        return state.replace(server_momentum=g)

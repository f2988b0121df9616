"""What rules with control variates share: the c_i, how they start, and c = Σ p_i c_i.

`ControlVariateRule` is the base of all of them. `GradientVariateRule` is for rules whose c_i are
gradients (scaffold, padamfed, ...), `TrackedAdamRule` for FA-NT and FAdamGC.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, Self

from pydantic import Field

from ..algorithm import (
    Algorithm,
    Arrays,
    ClientState,
    Objective,
    Plan,
    Reply,
    ServerState,
    mean_gradient,
    weighted_sum,
)
from ..errors import ConfigError


class ControlVariateRule(Algorithm):
    """A rule whose clients keep c_i ("control_variate") and whose server keeps c, their mean.

    c_i = c = 0 at first; a rule with a start pass (`start_names`) sets c_i there to the mean of K
    minibatch gradients at x⁰, on all N clients.
    """

    server_state: ClassVar[tuple[str, ...]] = ("model", "control_variate")
    client_state: ClassVar[tuple[str, ...]] = ("control_variate",)
    client_means: ClassVar[Mapping[str, str]] = {"control_variate": "control_variate"}

    def client_start(
        self, received: Arrays, client_state: ClientState, objective: Objective
    ) -> tuple[Arrays, ClientState]:
        c_i = mean_gradient(received["model"], objective)
        return {"control_variate": c_i}, {**client_state, "control_variate": c_i}

    def server_start(self, state: ServerState, replies: Sequence[Reply]) -> ServerState:
        c = weighted_sum([(r.importance, r.upload["control_variate"]) for r in replies])
        return state.replace(control_variate=c)


class GradientVariateRule(ControlVariateRule):
    """c_i are gradients: "gradient" starts them in round 0, "zero" has no round 0."""

    control_variate_start: Literal["gradient", "zero"] = Field(
        "gradient", title="c_i⁰", description="how the control variates start"
    )

    @property
    def start_names(self) -> tuple[str, ...]:
        return ("control_variate",) if self.control_variate_start == "gradient" else ()


class TrackedAdamRule(ControlVariateRule):
    """Clients take Adam steps and keep their v ("second_moment"). Only the first S̃ of a round's S
    clients, in random order, renew c_i."""

    client_state: ClassVar[tuple[str, ...]] = ("control_variate", "second_moment")
    broadcast_names: ClassVar[tuple[str, ...]] = ("model", "control_variate")

    client_learning_rate: float = Field(0.001, gt=0, title="η", description="client step size")
    server_learning_rate: float = Field(
        1.0, gt=0, title="η_g", description="server step size, relative to the mean movement"
    )
    first_decay: float = Field(0.9, ge=0, lt=1, title="β₁", description="decay of the first moment")
    second_decay: float = Field(
        0.99, ge=0, lt=1, title="β₂", description="decay of the second moment"
    )
    adaptivity: float = Field(1e-8, gt=0, title="ε", description="floor of the divisor")
    control_variate_start: Literal["gradient", "zero", "full_gradient"] = Field(
        "gradient", title="c_i⁰", description="how the control variates start"
    )
    tracked_clients: int | None = Field(
        None, ge=0, title="S̃", description="clients a round that renew c_i; all S if not given"
    )

    @property
    def start_names(self) -> tuple[str, ...]:
        return () if self.control_variate_start == "zero" else ("control_variate",)

    @property
    def tracks(self) -> bool:
        """Whether a client that runs this rule renews its c_i."""
        return self.tracked_clients != 0

    def resolve(self, plan: Plan) -> Self:
        wanted = self.tracked_clients
        if wanted is not None and wanted > plan.clients_per_round:
            raise ConfigError(
                f"algorithm.tracked_clients: got {wanted}; must be between 0 and "
                f"federation.clients_per_round ({plan.clients_per_round}); lower it"
            )
        return self

    def for_client(self, rank: int) -> Self:
        if self.tracked_clients is None or rank < self.tracked_clients:
            return self
        return self.model_copy(update={"tracked_clients": 0})

"""What FA-NT and FAdamGC share: local Adam, control variates, and a subset that updates them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import Field

from ..algorithm import ClientState, Plan, ServerState
from ..errors import ConfigError
from ._control_variates import ControlVariateRule
from .local_adam import LocalAdam

if TYPE_CHECKING:
    from torch import Tensor


class TrackedAdamRule(ControlVariateRule, LocalAdam):
    """Only the first S̃ of a round's S clients, in random order, renew c_i; all keep their v."""

    client_state: ClassVar[tuple[str, ...]] = ("control_variate", "second_moment")

    tracked_clients: int | None = Field(
        None, ge=0, title="S̃", description="clients a round that renew c_i; all S if not given"
    )

    @property
    def broadcast_names(self) -> tuple[str, ...]:
        return ("model", "control_variate")

    @property
    def tracks(self) -> bool:
        """Whether a client that is told this rule renews its c_i."""
        return self.tracked_clients != 0

    def resolve(self, plan: Plan) -> Self:
        wanted, sampled = self.tracked_clients, plan.clients_per_round
        if wanted is not None and wanted > sampled:
            raise ConfigError(
                f"algorithm.tracked_clients: got {wanted}; must be between 0 and "
                f"federation.clients_per_round ({sampled}); lower it"
            )
        return self

    def for_client(self, rank: int) -> Self:
        if self.tracked_clients is None or rank < self.tracked_clients:
            return self
        return self.model_copy(update={"tracked_clients": 0})

    def init_client(self, size: int) -> ClientState:
        return {**ControlVariateRule.init_client(self, size), **LocalAdam.init_client(self, size)}

    def moved(self, state: ServerState, delta: Tensor, change: Tensor) -> ServerState:
        """Return the state after Δ̄ and Σ_tracked p_i(c_i⁺ − c_i)."""
        return state.replace(
            model=state["model"].add(delta, alpha=self.server_learning_rate),
            control_variate=state["control_variate"] + change,
        )

"""What a run gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from ..rounds.record import RoundRecord

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn


@dataclass(kw_only=True)
class Outcome:
    """What a run leaves behind but for its model: the records and what was computed of them."""

    rounds: list[RoundRecord]
    summary: dict[str, Any]
    rounds_before: int = 0  # of the checkpoint that this call resumed

    @property
    def idle_from(self) -> int | None:
        """The round from which no reply counted, if that is more than half of the rounds that were
        run and no divergence says why."""
        run = [record for record in self.rounds if record.round > self.rounds_before]
        idle = list(takewhile(lambda record: not record.clients, reversed(run)))
        is_most = 2 * len(idle) > len(run)
        return idle[-1].round if is_most and self.summary["diverged_at"] is None else None

    @property
    def last_error(self) -> str | None:
        """What the last client failed with in a run that ended without replies."""
        if self.idle_from is None:
            return None
        idle = [record for record in self.rounds if record.round >= self.idle_from]
        errors = [error for record in idle for error in record.errors] or [{}]
        return f"client {errors[-1].get('client')}: {errors[-1].get('error')}"


@dataclass(kw_only=True)
class Result(Outcome):
    """What a run gives back: the final vector (NumPy, float32), the module with it, the records.

    With `stop.metric`, `best` is the state_dict of the best model, that of `summary["best_round"]`.
    """

    parameters: np.ndarray
    model: nn.Module
    best: Mapping[str, Tensor] | None = None

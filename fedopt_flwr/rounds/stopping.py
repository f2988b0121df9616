"""The best round so far, and whether a run should end before its last."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from typing import Any

from ..config.sections import StopSection
from ..errors import RunError
from .record import MEASURES, RoundRecord


class Stopping:
    """Hears every round in turn; `reason` says why the run should end, once it should."""

    def __init__(self, section: StopSection, measured_names: Collection[str] = ()) -> None:
        self._section = section
        self._names = measured_names  # those that may have no value; others must be in records
        self._started = time.monotonic()
        self._seconds_before = 0.0
        self._gigabytes = 0.0
        self._is_evaluated = False
        self._idle = 0  # evaluations since the best one
        self.best_round: int | None = None
        self.best_value: float | None = None
        self.reason: str | None = None

    def catch_up(self, records: Sequence[RoundRecord]) -> None:
        """Start the clock; hear the rounds before, of a run that is resumed."""
        self._started = time.monotonic()
        for record in records:
            self.hear(record)
        self._seconds_before = sum(r.seconds + (r.evaluation_seconds or 0.0) for r in records)
        if records:
            self._look_at_budgets(records[-1].round)

    def hear(self, record: RoundRecord) -> bool:
        """Hear a round; return whether its model is the best one so far."""
        name = self._section.metric
        self._gigabytes += (record.uplink_bytes + record.downlink_bytes) / 1e9
        self._look_at_budgets(record.round)
        value = None if name is None or record.taken_back else record.measured(name)
        self._require_metric(record)
        if value is None or not math.isfinite(value):
            return False
        is_higher = self._section.direction == "higher"
        best = self.best_value
        is_best = best is None or (value > best if is_higher else value < best)
        if is_best:
            self.best_round, self.best_value, self._idle = record.round, value, 0
        else:
            self._idle += 1
        target, patience = self._section.target, self._section.patience
        if target is not None and (value >= target if is_higher else value <= target):
            self._stop(record.round, f"{name} is {value:.6g}, and the target {target:g}")
        if patience is not None and self._idle >= patience:
            text = f"{name} was not {self._section.direction} in {patience} evaluations in a row"
            self._stop(record.round, text)
        return is_best

    def summary(self) -> dict[str, Any]:
        """Return what summary.json says of it; the value is of `stop.metric`."""
        return {
            "stopped": self.reason,
            "best_round": self.best_round,
            "best_value": self.best_value,
        }

    def _look_at_budgets(self, number: int) -> None:
        limit = self._section.max_gigabytes
        if limit is not None and self._gigabytes >= limit:
            self._stop(number, f"{self._gigabytes:.4g} GB were sent, stop.max_gigabytes = {limit}")
        limit = self._section.max_seconds
        seconds = self._seconds_before + time.monotonic() - self._started
        if limit is not None and seconds >= limit:
            self._stop(number, f"{seconds:.0f} s are over, stop.max_seconds = {limit:g}")

    def _stop(self, number: int, why: str) -> None:
        self.reason = self.reason or f"after round {number}: {why}"

    def _require_metric(self, record: RoundRecord) -> None:
        """Raise RunError where the first evaluation has no such metric: nobody measures it."""
        name = self._section.metric
        if self._is_evaluated or not record.test_metrics:
            return
        self._is_evaluated = True
        if name is None or name in MEASURES or name in self._names or name in record.test_metrics:
            return
        raise RunError(
            f"stop.metric: got {name!r}; this run measures {', '.join(record.test_metrics)}; "
            "name one of them, or add it to evaluation.metrics"
        )

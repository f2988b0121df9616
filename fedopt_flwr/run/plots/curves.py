"""What is drawn of runs, as numbers: a measure over rounds, bytes or seconds, and its cost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np

from ...config.sections import KNOWN_BETTER
from ...rounds.record import RoundRecord
from ..summary import Target, rounds_to_target

Unit = Literal["rounds", "bytes", "seconds"]
_NICE = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0)


class Trace(NamedTuple):
    """One run."""

    rounds: Sequence[RoundRecord]
    diverged_at: int | None = None
    is_finished: bool = True


class Curve(NamedTuple):
    """The runs that differ in nothing but their seed."""

    name: str
    traces: Sequence[Trace]


class Measure(NamedTuple):
    """What a record is judged by; accuracy is drawn as the error, so that the best are apart."""

    name: str  # as RoundRecord.measured takes it, or of a metric of the user's own
    title: str
    axis: str

    @property
    def is_known(self) -> bool:
        """Whether it is known which values are better."""
        return self.name in KNOWN_BETTER

    @property
    def is_error(self) -> bool:
        return self.name == "test_accuracy"

    @property
    def is_lower_better(self) -> bool:
        """Whether lower is better of what is drawn."""
        return self.is_error or KNOWN_BETTER.get(self.name) == "lower"

    def drawn(self, record: RoundRecord) -> float | None:
        """Return its value; the training loss of a start pass, before any step, is none."""
        if self.name == "train_loss" and not record.round:
            return None
        value = record.measured(self.name)
        return 1 - value if self.is_error and value is not None else value

    def shown(self, value: float) -> str:
        """Write a value that is drawn."""
        if not math.isfinite(value):
            return "not finite"
        if self.is_error:
            return f"{100 * value:.1f} %" if value >= 0.01 else f"{100 * value:.2g} %"
        return f"{value:.3g}"


TEST_ERROR = Measure("test_accuracy", "Test error", "test error = 1 − accuracy")
TEST_LOSS = Measure("test_loss", "Test loss", "test loss")
TRAIN_LOSS = Measure("train_loss", "Train loss", "mean loss of the clients' minibatches")


def measure_of(rounds: Iterable[RoundRecord], metric: str) -> Measure:
    """Return what these records can be judged by: the metric, else the test loss, else the
    training loss."""
    records = list(rounds)
    if metric == "accuracy" and any(r.test_accuracy is not None for r in records):
        return TEST_ERROR
    if any(metric in record.test_metrics for record in records):
        return Measure(metric, f"Test {metric}", f"{metric} on the test data")
    return TEST_LOSS if any(r.test_loss is not None for r in records) else TRAIN_LOSS


class Points(NamedTuple):
    """A curve with its spread, at rounds that all its runs have; arrays of one length."""

    x: np.ndarray
    mean: np.ndarray
    lowest: np.ndarray
    highest: np.ndarray


def points_of(curve: Curve, measure: Measure, unit: Unit) -> Points:
    """Return the means over the seeds, and the least and greatest values of any of them."""
    found = [_measured(trace.rounds, measure) for trace in curve.traces]
    shared = reduce(np.intersect1d, [numbers for numbers, _, _ in found])
    rows = [np.searchsorted(numbers, shared) for numbers, _, _ in found]
    values = np.array([own[row] for (_, own, _), row in zip(found, rows, strict=True)])
    places = np.array([costs[unit][row] for (_, _, costs), row in zip(found, rows, strict=True)])
    return Points(places.mean(axis=0), values.mean(axis=0), values.min(axis=0), values.max(axis=0))


def tails_of(curve: Curve, measure: Measure, unit: Unit) -> list[Points]:
    """Return, of each run that is further than another one, what lies beyond their shared end."""
    ends = [_measured(trace.rounds, measure)[0][-1] for trace in curve.traces]
    further = [t for t, end in zip(curve.traces, ends, strict=True) if end > min(ends)]
    tails = []
    for trace in further:
        numbers = _measured(trace.rounds, measure)[0]
        own = points_of(Curve(curve.name, [trace]), measure, unit)
        tails.append(Points(*(column[numbers >= min(ends)] for column in own)))
    return tails


def _measured(
    rounds: Sequence[RoundRecord], measure: Measure
) -> tuple[np.ndarray, np.ndarray, dict[Unit, np.ndarray]]:
    """Return number, value and costs so far of the records that have a value."""
    values = [measure.drawn(record) for record in rounds]
    has_value = np.array([value is not None for value in values], dtype=bool)
    numbers = np.array([record.round for record in rounds], dtype=int)[has_value]
    costs = {unit: so_far(rounds, unit)[has_value] for unit in ("rounds", "bytes", "seconds")}
    known = np.array([value for value in values if value is not None], dtype=float)
    return numbers, known, costs  # type: ignore[return-value]


def so_far(rounds: Sequence[RoundRecord], unit: Unit) -> np.ndarray:
    """Return what a run has cost after each of these records: rounds, bytes of all clients both
    ways, or seconds of rounds."""
    if unit == "rounds":
        return np.array([record.round for record in rounds], dtype=float)
    if unit == "bytes":
        return np.array(list(accumulate(r.uplink_bytes + r.downlink_bytes for r in rounds)), float)
    return np.array(list(accumulate(r.seconds for r in rounds)), float)


def with_values(curves: Iterable[Curve], measure: Measure) -> list[Curve]:
    """Return the curves without runs that have no value yet; of runs that have none in the same
    round the longest."""
    found = []
    for name, traces in curves:
        own = [t for t in traces if any(measure.drawn(r) is not None for r in t.rounds)]
        numbers = [_measured(trace.rounds, measure)[0] for trace in own]
        if own and not reduce(np.intersect1d, numbers).size:
            own = [max(own, key=lambda trace: trace.rounds[-1].round)]
        found += [Curve(name, own)] if own else []
    return found


def result_of(curve: Curve, measure: Measure) -> float:
    """Return the mean over the seeds of the last value, of runs at work of the last that all have;
    NaN where one has none."""
    if not all(trace.is_finished for trace in curve.traces):
        shared = points_of(curve, measure, "rounds").mean
        return float(shared[-1]) if shared.size else math.nan
    last = [
        next((v for r in reversed(t.rounds) if (v := measure.drawn(r)) is not None), math.nan)
        for t in curve.traces
    ]
    return statistics.fmean(last)


def best_first(curves: Iterable[Curve], measure: Measure) -> list[Curve]:
    """Return curves by their result; those with a run that diverged come last."""
    judge = measure if measure.is_known else TEST_LOSS

    def place(curve: Curve) -> tuple[bool, float]:
        result = result_of(curve, judge)
        has_diverged = any(trace.diverged_at is not None for trace in curve.traces)
        merit = result if judge.is_lower_better else -result
        return has_diverged, merit if math.isfinite(merit) else math.inf

    return sorted(curves, key=place)


class Cost(NamedTuple):
    """What a run had cost when it reached a target."""

    rounds: float
    bytes: float
    seconds: float


def cost_of(trace: Trace, target: Target) -> Cost | None:
    """Return what it cost to reach a target, None if it never did."""
    number = rounds_to_target(trace.rounds, target.value, target.measure)
    if number is None:
        return None
    until = [record for record in trace.rounds if record.round <= number]
    return Cost(number, so_far(until, "bytes")[-1], so_far(until, "seconds")[-1])


def telling_target(
    curves: Sequence[Curve], measure: Measure, asked: Sequence[Target]
) -> Target | None:
    """Return the hardest target asked for that any run reaches; else a round number that about
    half of the curves end at or beyond, if that is not an accuracy of zero."""
    judge = measure if measure.is_known else TEST_LOSS
    reached = [t for t in asked if any(cost_of(s, t) for c in curves for s in c.traces)]
    of_judge = [target for target in reached if target.measure == judge.name] or reached
    if of_judge:
        name = of_judge[0].measure
        harder = min if KNOWN_BETTER[name] == "lower" else max
        return harder([t for t in of_judge if t.measure == name], key=lambda t: t.value)
    results = [value for curve in curves if math.isfinite(value := result_of(curve, judge))]
    if not results:
        return None
    middle = sorted(results, reverse=not judge.is_lower_better)[(len(results) - 1) // 2]
    level = _round_number(middle, up=judge.is_lower_better)
    if judge.is_error and level >= 1:
        return None
    return Target(judge.name, round(1 - level, 9) if judge.is_error else level)


def _round_number(value: float, *, up: bool) -> float:
    """Return the nearest number with few digits that is not below (above) a value."""
    if value <= 0:
        return value
    size = math.floor(math.log10(value))
    nice = [float(f"{number}e{size}") for number in _NICE]
    up_to = [n for n in nice if n >= value] if up else [n for n in nice if n <= value]
    return (min if up else max)(up_to, default=value)

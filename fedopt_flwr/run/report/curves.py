"""Curves as numbers for the page: every measure over rounds, bytes and seconds, thinned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...rounds.record import RoundRecord
from ..plots import look
from ..plots.curves import (
    TEST_LOSS,
    Curve,
    Measure,
    Points,
    Unit,
    best_first,
    measure_of,
    points_of,
    so_far,
    tails_of,
    with_values,
)
from ..reading import RecordedRun

MOST_POINTS = 1000  # of a curve: no screen shows more
_FEWEST_POINTS = 100
_ALL_POINTS = 12_000  # of all curves of a measure
_UNITS: tuple[Unit, ...] = ("rounds", "bytes", "seconds")


class Recorded(Measure):
    """A field of a round's record; round 0, the start pass, has none."""

    def drawn(self, record: RoundRecord) -> float | None:
        value = getattr(record, self.name, None)
        return float(value) if record.round and value is not None else None


_FIELDS = (
    Recorded("train_loss", "Train loss", "mean loss of the clients' minibatches"),
    Measure("global_train_loss", "Loss over all training data", "Σ p_i f_i(x)"),
    Measure("gradient_norm", "Norm of the whole gradient", "‖∇f(x)‖"),
    Recorded("drift", "Drift of the clients", "mean ‖Δ_i − Δ̄‖"),
    Measure("control_norm", "Norm of the server's control variate", "‖c‖"),
    Recorded("gradient_cosine", "Cosine of step and gradient", "cos(x⁻ − x, ∇f(x⁻))"),
    Measure("worst_test_accuracy", "Accuracy of the worst clients", "mean of the worst tenth"),
    Measure("worst_test_loss", "Loss of the worst clients", "mean of the worst tenth"),
    Measure("client_accuracy_std", "Spread of accuracy over clients", "standard deviation"),
    Measure("client_loss_std", "Spread of loss over clients", "standard deviation"),
    Recorded("seconds", "Seconds of a round", "seconds"),
    Recorded("client_seconds", "Seconds of a client's local work, mean", "seconds"),
)


class Ranked(NamedTuple):
    """Curves in the order of the page, and what they are judged by."""

    curves: list[Curve]
    main: Measure


def ranked(curves: Sequence[Curve], runs: Sequence[RecordedRun]) -> Ranked:
    """Return the best first; who has no value yet comes last."""
    records = [record for run in runs for record in run.rounds]
    metrics = {run.config.model.metric for run in runs}
    main = measure_of(records, metrics.pop() if len(metrics) == 1 else "")
    places = {curve.name: place for place, curve in enumerate(curves)}
    first = [places[curve.name] for curve in best_first(with_values(curves, main), main)]
    rest = [place for place in range(len(curves)) if place not in first]
    return Ranked([curves[place] for place in first + rest], main)


def measures_of(found: Ranked) -> list[Measure]:
    """Return what any of these curves has values of, the main one first."""
    records = [r for curve in found.curves for trace in curve.traces for r in trace.rounds]
    named = dict.fromkeys(name for record in records for name in record.test_metrics)
    own = [measure_of(records, name) for name in named]
    measures = dict.fromkeys([found.main, TEST_LOSS, *own, *_FIELDS])
    by_name = {measure.name: measure for measure in reversed(measures)}  # the first of each name
    kept = [m for m in measures if by_name[m.name] is m]
    return [m for m in kept if any(m.drawn(record) is not None for record in records)]


def panel(found: Ranked, measure: Measure) -> dict[str, Any]:
    """Return a measure and the points of the curves that have values, by their place."""
    values = {curve.name: curve for curve in with_values(found.curves, measure)}
    most = max(_FEWEST_POINTS, min(MOST_POINTS, _ALL_POINTS // max(len(values), 1)))
    drawn = {
        place: _points(values[curve.name], measure, most)
        for place, curve in enumerate(found.curves)
        if curve.name in values
    }
    sound = [value for own in values.values() for value in _sound(own, measure)]
    positive = [value for value in sound if value > 0]
    has_diverged = any(t.diverged_at is not None for own in values.values() for t in own.traces)
    return {
        "name": measure.name,
        "title": measure.title,
        "axis": measure.axis,
        "percent": measure.is_error,
        "log": measure.is_lower_better and bool(positive) and min(sound) >= 0,
        "range": _ends(sound) if has_diverged else None,
        "log_range": _ends(positive) if has_diverged or min(sound, default=1.0) <= 0 else None,
        "thinned": [most, max((own.pop("rounds") for own in drawn.values()), default=0)],
        "curves": drawn,
    }


def _ends(values: Sequence[float]) -> list[float] | None:
    return [min(values), max(values)] if values else None


def _sound(curve: Curve, measure: Measure) -> list[float]:
    """Return the finite values before a run diverged: others must not stretch the axis."""
    found = []
    for trace in curve.traces:
        end = math.inf if trace.diverged_at is None else trace.diverged_at
        before = [record for record in trace.rounds if record.round < end]
        found += [value for r in before if (value := measure.drawn(r)) is not None]
    return [value for value in found if np.isfinite(value)]


def _points(curve: Curve, measure: Measure, most: int) -> dict[str, Any]:
    over = {unit: points_of(curve, measure, unit) for unit in _UNITS}
    first = over["rounds"]
    places = kept_places(first.mean, most)
    tails = zip(*(tails_of(curve, measure, unit) for unit in _UNITS), strict=True)
    has_band = len(curve.traces) > 1
    return {
        "x": {unit: _numbers(points.x[places]) for unit, points in over.items()},
        "mean": _numbers(first.mean[places]),
        "low": _numbers(first.lowest[places]) if has_band else None,
        "high": _numbers(first.highest[places]) if has_band else None,
        "tails": [_tail(tail, most) for tail in tails],
        "diverged": _divergences(curve, measure),
        "rounds": len(first.mean),
    }


def _tail(tail: Sequence[Points], most: int) -> dict[str, Any]:
    places = kept_places(tail[0].mean, most)
    x = {unit: _numbers(p.x[places]) for unit, p in zip(_UNITS, tail, strict=True)}
    return {"x": x, "mean": _numbers(tail[0].mean[places])}


def _divergences(curve: Curve, measure: Measure) -> list[dict[str, Any]]:
    """Return where runs diverged, at their last finite value before."""
    found = []
    for trace in curve.traces:
        numbers = [record.round for record in trace.rounds]
        if trace.diverged_at not in numbers:
            continue
        end = numbers.index(trace.diverged_at)
        values = [measure.drawn(record) for record in trace.rounds[: end + 1]]
        finite = [value if value is not None and np.isfinite(value) else None for value in values]
        before = [value for value in finite[:-1] if value is not None]
        if before or finite[-1] is not None:
            x = {unit: float(so_far(trace.rounds, unit)[end]) for unit in _UNITS}
            found.append({"x": x, "y": before[-1] if before else finite[-1]})
    return found


def kept_places(values: np.ndarray, most: int) -> np.ndarray:
    """Return at most `most` places: of each stretch of a curve the least and greatest value, and
    both ends, so that no spike is lost."""
    if len(values) <= most:
        return np.arange(len(values))
    kept = {0, len(values) - 1}
    for stretch in np.array_split(np.arange(len(values)), (most - 2) // 2):
        own = values[stretch]
        is_finite = np.isfinite(own)
        kept.add(int(stretch[np.where(is_finite, own, np.inf).argmin()]))
        kept.add(int(stretch[np.where(is_finite, own, -np.inf).argmax()]))
    return np.array(sorted(kept))


def _numbers(values: np.ndarray) -> list[float | None]:
    """Return numbers with as many digits as can be seen; None where they are not finite."""
    return [float(f"{v:.6g}") if np.isfinite(v) else None for v in values.tolist()]


def colours_of(count: int) -> list[str]:
    """Return a colour for each place; after the first few all are grey."""
    return [look.COLOURS[n] if n < len(look.COLOURS) else look.GREY for n in range(count)]

"""The table of results: a row for each configuration, means over its seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...rounds.record import NOT_COUNTED
from ..plots.curves import (
    TEST_LOSS,
    Cost,
    Curve,
    Measure,
    Trace,
    cost_of,
    result_of,
    telling_target,
    with_values,
)
from ..summary import Target
from .curves import Ranked


class Cell(NamedTuple):
    """What stands in a table, and the number by which it is sorted (None: last)."""

    text: str
    value: float | None = None


def results_of(found: Ranked) -> dict[str, Any]:
    """Return headings and rows; the order is that of the curves."""
    drawn = with_values(found.curves, found.main)
    target = telling_target(drawn, found.main, ())
    columns: dict[str, Callable[[Curve], Cell]] = {
        f"{found.main.title.lower()}, last": lambda c: _last(c, found.main),
        "best": lambda c: _best(c, found.main),
        "test loss, last": lambda c: _last(c, TEST_LOSS),
    }
    if not found.main.is_known:
        del columns["best"]
    if found.main == TEST_LOSS or not with_values(found.curves, TEST_LOSS):
        del columns["test loss, last"]
    if target is not None:
        columns[target.heading] = lambda c: _cost(c, target)
    columns |= {
        "rounds": lambda c: _mean(c, lambda t: t.rounds[-1].round, "{:,.4g}"),
        "MB": lambda c: _mean(c, _megabytes, "{:,.4g}"),
        "seconds": lambda c: _mean(c, lambda t: sum(r.seconds for r in t.rounds), "{:,.1f}"),
        "failures": lambda c: _mean(c, _failures, "{:,.4g}"),
    }
    rows = [[Cell(_state(c)), *(column(c) for column in columns.values())] for c in found.curves]
    return {"headings": ["state", *columns], "rows": rows}


def _state(curve: Curve) -> str:
    """Say in a word or two how the runs of a curve ended."""
    traces = curve.traces
    diverged = sum(trace.diverged_at is not None for trace in traces)
    unfinished = sum(not trace.is_finished for trace in traces)
    num = len(traces)
    texts = [(diverged, "diverged"), (unfinished, "not finished")]
    told = [text if num == 1 else f"{count} of {num} {text}" for count, text in texts if count]
    end = ", ".join(told) or "finished"
    return end if num == 1 else f"{num} seeds, {end}"


def _last(curve: Curve, measure: Measure) -> Cell:
    found = with_values([curve], measure)
    value = result_of(found[0], measure) if found else math.nan
    return Cell(measure.shown(value), value) if math.isfinite(value) else Cell("–")


def _best(curve: Curve, measure: Measure) -> Cell:
    better = min if measure.is_lower_better else max
    values = []
    for trace in curve.traces:
        own = [v for r in trace.rounds if (v := measure.drawn(r)) is not None and math.isfinite(v)]
        values += [better(own)] if own else []
    if len(values) < len(curve.traces):
        return Cell("–")
    mean = statistics.fmean(values)
    return Cell(measure.shown(mean), mean)


def _cost(curve: Curve, target: Target) -> Cell:
    costs: Sequence[Cost | None] = [cost_of(trace, target) for trace in curve.traces]
    reached = [cost.rounds for cost in costs if cost]
    if len(reached) == len(costs):
        mean = statistics.fmean(reached)
        return Cell(f"{mean:.4g}", mean)
    if reached:
        return Cell(f"{len(reached)} of {len(costs)} runs")
    return Cell("never" if all(trace.is_finished for trace in curve.traces) else "not yet")


def _mean(curve: Curve, of: Callable[[Trace], float], form: str) -> Cell:
    values = [of(trace) for trace in curve.traces if trace.rounds]
    if not values:
        return Cell("–")
    mean = statistics.fmean(values)
    return Cell(form.format(mean), mean)


def _megabytes(trace: Trace) -> float:
    return sum(r.uplink_bytes + r.downlink_bytes for r in trace.rounds) / 1e6


def _failures(trace: Trace) -> float:
    errors = [str(error["error"]) for record in trace.rounds for error in record.errors]
    not_theirs = sum(error.startswith(NOT_COUNTED) for error in errors)
    return sum(record.failures for record in trace.rounds) - not_theirs

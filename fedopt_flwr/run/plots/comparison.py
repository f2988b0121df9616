"""The picture of several curves: who is ahead, and what it costs each to reach a target."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..summary import Target
from . import look
from .axes import End, label_ends, label_inches, scale_of, seen_on, set_scale
from .costs import cost_panel_inches, draw_costs
from .curves import (
    Curve,
    Measure,
    Points,
    Unit,
    best_first,
    points_of,
    result_of,
    so_far,
    tails_of,
    telling_target,
    with_values,
)
from .subject import Subject

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_NAMED = 45  # labels that a picture has room for
_WIDEST_LABEL = 44  # characters in a line
_GAP = 0.8  # inches between panels, for what is written at an axis
_DIAGNOSES = {
    "gradient_norm": "Norm of the whole gradient",
    "global_train_loss": "Loss over all training data",
}


class Line(NamedTuple):
    """A curve, and how it is drawn."""

    curve: Curve
    points: Points
    colour: str
    rank: int | None  # None for the only one

    @property
    def is_named(self) -> bool:
        return self.colour != look.GREY

    @property
    def has_diverged(self) -> bool:
        return any(trace.diverged_at is not None for trace in self.curve.traces)

    @property
    def name(self) -> str:
        return self.curve.name if self.rank is None else f"{self.rank} {self.curve.name}"

    def label(self, measure: Measure) -> str:
        """Return name, result, and what kept the runs from their end."""
        traces = self.curve.traces
        diverged = [t.diverged_at for t in traces if t.diverged_at is not None]
        texts = [measure.shown(result_of(self.curve, measure))]
        if diverged and len(traces) == 1:
            texts = [f"diverged in round {diverged[0]}"]
        elif diverged:
            texts.append(f"{len(diverged)} of {len(traces)} diverged")
        if not all(trace.is_finished for trace in traces):
            texts.append(f"so far, round {min(t.rounds[-1].round for t in traces)}")
        whole = f"{self.name}  {', '.join(texts)}"
        return textwrap.fill(whole, _WIDEST_LABEL, break_on_hyphens=False)


def draw_comparison(
    curves: Sequence[Curve],
    measure: Measure,
    subject: Subject,
    path: Path,
    *,
    targets: Sequence[Target] = (),
    unit: Unit = "rounds",
) -> None:
    """Draw the measure of each curve, best first, and what each cost until a target was reached.

    The target is the hardest of `targets` that any run reached, else one that about half reach.
    """
    with look.drawing():
        look.save(comparison_figure(curves, measure, subject, targets, unit), path)


def comparison_figure(
    curves: Sequence[Curve],
    measure: Measure,
    subject: Subject,
    targets: Sequence[Target],
    unit: Unit,
) -> Figure:
    """Return the picture; at least one curve must have a value of the measure."""
    from matplotlib.figure import Figure

    lines = lines_of(curves, measure, unit)
    shown = lines[:MOST_NAMED]
    target = telling_target([line.curve for line in lines], measure, targets)
    diagnoses = [name for name in _DIAGNOSES if any(_diagnosed(line, name) for line in lines)]
    subtitle = textwrap.fill(f"{subject.setting}. {_how_to_read(lines)}".strip(), 120)
    rows = sum(len(line.label(measure).splitlines()) for line in shown)
    heights = [max(3.4, 0.15 * rows), 1.8 if diagnoses else 0.0]
    tops = [look.heading_inches(subtitle) + 0.1]
    tops += [tops[0] + heights[0] + _GAP]
    tops += [tops[1] + heights[1] + (_GAP if diagnoses else 0)]
    whole = tops[2] + (cost_panel_inches(len(shown)) + 0.1 if target else 0)
    figure = Figure(figsize=(look.WIDTH, whole))
    look.write_heading(figure, f"{measure.title} on {subject.data}", subtitle)
    _draw_curves(figure, lines, measure, unit, tops[0], heights[0])
    for place, name in enumerate(diagnoses):
        width = look.WIDTH / 2 - 0.9
        axes = look.place_axes(figure, 0.75 + place * (width + 0.8), tops[1], width, heights[1])
        _draw_diagnosis(axes, lines, name, unit)
    if target:
        draw_costs(
            figure, [(line.name, line.curve, line.colour) for line in shown], target, tops[2]
        )
    return figure


def lines_of(curves: Sequence[Curve], measure: Measure, unit: Unit) -> list[Line]:
    """Return the curves that have a value, best first; after the first few all are grey."""
    ranked = best_first(with_values(curves, measure), measure)
    colours = [*look.COLOURS, *[look.GREY] * len(ranked)]
    ranks = range(1, len(ranked) + 1) if len(ranked) > 1 else [None]
    return [
        Line(curve, points_of(curve, measure, unit), colour, rank)
        for curve, colour, rank in zip(ranked, colours, ranks, strict=False)
    ]


def _how_to_read(lines: Sequence[Line]) -> str:
    texts = ["Best first" if len(lines) > 1 else ""]
    if len(lines) > len(look.COLOURS):
        texts[0] += f", the first {len(look.COLOURS)} of {len(lines)} in colour"
    if len(lines) > MOST_NAMED:
        texts[0] += f", the first {MOST_NAMED} with their names"
    if any(len(line.curve.traces) > 1 for line in lines):
        texts.append("lines are means over the runs, bands reach from the least to the greatest")
    if any(line.has_diverged for line in lines):
        texts.append("dotted: diverged at the ×")
    text = "; ".join(filter(None, texts))
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _draw_curves(
    figure: Figure, lines: Sequence[Line], measure: Measure, unit: Unit, top: float, height: float
) -> None:
    labels = [line.label(measure) for line in lines[:MOST_NAMED]]
    width = look.WIDTH - 0.75 - label_inches(labels) - 0.05
    axes = look.place_axes(figure, 0.75, top, width, height)
    size, heading = scale_of(unit, max(line.points.x[-1] for line in lines))
    for line in reversed(lines):
        _draw_line(axes, line, measure, unit, size)
    set_scale(axes, *_where_curves_are(lines, measure), measure)
    axes.set(xlabel=heading, ylabel=measure.axis)
    axes.margins(x=0.01)
    for line in lines:
        _mark_divergence(axes, line, unit, size)
    highest = axes.get_ylim()[1]
    ends = [
        End(line.points.x[-1] / size, _last_finite(line.points.mean, highest), label, line.colour)
        for line, label in zip(lines, labels, strict=False)
    ]
    label_ends(axes, ends, height)


def _draw_line(axes: Axes, line: Line, measure: Measure, unit: Unit, size: float) -> None:
    style: dict[str, Any] = {"color": line.colour, "lw": 1.5 if line.is_named else 0.8}
    style |= {"zorder": 3 if line.is_named else 2, "alpha": 1.0 if line.is_named else 0.6}
    x, mean, lowest, highest = line.points
    dashes = ":" if line.has_diverged else "-"
    axes.plot(x / size, mean, ls=dashes, label=line.curve.name, **style)
    axes.plot(x[-1:] / size, mean[-1:], "o", ms=3 if line.is_named else 2, **style)
    if line.is_named and len(line.curve.traces) > 1 and not line.has_diverged:
        axes.fill_between(x / size, lowest, highest, color=line.colour, alpha=0.15, lw=0)
    for tail in tails_of(line.curve, measure, unit):
        axes.plot(tail.x / size, tail.mean, **{**style, "lw": 0.6})


def _where_curves_are(lines: Sequence[Line], measure: Measure) -> tuple[float, float]:
    """Return the least and the greatest value to be seen: those after the first tenth, without
    the rarest ones, and every line's best and last."""
    sound = [line.points for line in lines if not line.has_diverged]
    sound = sound or [line.points for line in lines]
    start = max(points.x[-1] for points in sound) / 10
    late = np.concatenate([points.mean[points.x >= start] for points in sound])
    late = seen_on(late, measure)
    kept = [points.mean[-1:] for points in sound]
    kept += [np.percentile(late, (1, 97)), late.min(keepdims=True)] if late.size else []
    values = seen_on(np.concatenate(kept), measure)
    return (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)


def _mark_divergence(axes: Axes, line: Line, unit: Unit, size: float) -> None:
    lowest, highest = axes.get_ylim()
    for trace in line.curve.traces:
        numbers = [record.round for record in trace.rounds]
        if trace.diverged_at not in numbers:
            continue
        x = so_far(trace.rounds, unit)[numbers.index(trace.diverged_at)]
        y = np.clip(_last_finite(line.points.mean[line.points.x <= x], highest), lowest, highest)
        axes.plot([x / size], [y], "x", color=look.ALARM, ms=7, mew=2, clip_on=False, zorder=5)


def _last_finite(values: np.ndarray, otherwise: float) -> float:
    found = values[np.isfinite(values)]
    return float(found[-1]) if found.size else otherwise


def _diagnosed(line: Line, name: str) -> bool:
    return any(r.measured(name) is not None for t in line.curve.traces for r in t.rounds)


def _draw_diagnosis(axes: Axes, lines: Sequence[Line], name: str, unit: Unit) -> None:
    measure = Measure(name, _DIAGNOSES[name], _DIAGNOSES[name])
    found = with_values([line.curve for line in lines], measure)
    by_name = {line.curve.name: line for line in lines}
    own = [by_name[c.name]._replace(points=points_of(c, measure, unit), curve=c) for c in found]
    size, heading = scale_of(unit, max(line.points.x[-1] for line in own))
    for line in reversed(own):
        _draw_line(axes, line, measure, unit, size)
    set_scale(axes, *_where_curves_are(own, measure), measure)
    axes.set(xlabel=heading, title=measure.title)

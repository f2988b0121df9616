"""What it costs to reach a target: a row for each curve, dots for rounds, bytes and seconds."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..summary import Target
from . import look
from .curves import Cost, Curve, cost_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROW_INCHES = 0.165
_HEADING_INCHES = 0.55
_WIDEST_NAME = 42  # characters; the curves have whole names
Row = tuple[str, Curve, str]  # name, curve, colour


def cost_panel_inches(num_rows: int) -> float:
    return _HEADING_INCHES + _ROW_INCHES * (num_rows + 0.6)


def draw_costs(figure: Figure, rows: Sequence[Row], target: Target, top: float) -> None:
    """Draw the rows from top to bottom; who never reached the target is told so."""
    found = [[cost_of(trace, target) for trace in curve.traces] for _, curve, _ in rows]
    names = [textwrap.shorten(name, _WIDEST_NAME, placeholder=" …") for name, _, _ in rows]
    left = look.text_inches(names, size=8, weight="bold") + 0.2
    width = (look.WIDTH - left - 0.2 - 2 * 0.25) / 3
    height = cost_panel_inches(len(rows)) - _HEADING_INCHES
    text_top = 1 - top / figure.get_size_inches()[1]
    what = " accuracy" if target.measure == "test_accuracy" else ""
    title = f"What it costs to reach {target.text}{what}"
    figure.text(0.1 / look.WIDTH, text_top, title, size=10, weight="bold", va="top")
    for number, (key, heading) in enumerate(_headings(found).items()):
        place = left + number * (width + 0.25)
        axes = look.place_axes(figure, place, top + _HEADING_INCHES, width, height)
        _draw_column(axes, rows, found, key, heading)
        axes.set_yticks(range(len(rows)), names if number == 0 else [""] * len(rows), size=8)
        for label, (_, _, colour) in zip(axes.get_yticklabels(), rows, strict=True):
            label.set_color(look.text_colour(colour))
            label.set_fontweight("normal" if colour == look.GREY else "bold")
        if number == 0:
            _tell_who_did_not(axes, rows, found)


def _headings(found: Sequence[Sequence[Cost | None]]) -> dict[str, tuple[float, str]]:
    """Return for each field of Cost what to divide it by, and its name."""
    most = max((cost.bytes for costs in found for cost in costs if cost), default=0.0)
    size, name = (1e9, "GB") if most >= 1e9 else (1e6, "MB")
    return {"rounds": (1.0, "rounds"), "bytes": (size, name), "seconds": (1.0, "seconds")}


def _draw_column(
    axes: Axes,
    rows: Sequence[Row],
    found: Sequence[Sequence[Cost | None]],
    key: str,
    heading: tuple[float, str],
) -> None:
    size, name = heading
    for place, ((_, _, colour), costs) in enumerate(zip(rows, found, strict=True)):
        values = [getattr(cost, key) / size for cost in costs if cost]
        if values:
            axes.plot(values, [place] * len(values), "o", ms=2.5, color=colour, alpha=0.55, mew=0)
        if values and len(values) == len(costs):
            mean = statistics.fmean(values)
            axes.plot([0, mean], [place, place], color=colour, lw=0.7, alpha=0.5)
            axes.plot([mean], [place], "o", ms=5.5, color=colour)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_title(name, weight="normal", size=9)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelsize=8)
    axes.grid(visible=False, axis="y")
    axes.spines[["left", "bottom"]].set_visible(False)
    highest = axes.dataLim.x1 or 1.0  # none sent, or no time taken
    if not np.isfinite(highest):
        axes.set_xlim(left=0)
        axes.set_xticks([])
        return
    ticks = axes.xaxis.get_major_locator().tick_values(0, highest)
    ticks = ticks[: int(np.searchsorted(ticks, highest)) + 1]  # the last is not below any dot
    axes.set_xticks(ticks)
    axes.set_xlim(0, 1.03 * ticks[-1])


def _tell_who_did_not(
    axes: Axes, rows: Sequence[Row], found: Sequence[Sequence[Cost | None]]
) -> None:
    """Write into a row that no run, or not every one, reached the target."""
    middle = sum(axes.get_xlim()) / 2
    for place, ((_, curve, _), costs) in enumerate(zip(rows, found, strict=True)):
        reached = [cost.rounds for cost in costs if cost]
        if len(reached) == len(costs):
            continue
        never = "never" if all(trace.is_finished for trace in curve.traces) else "not yet"
        stands_left = not reached or min(reached) > middle  # where no dot is
        axes.annotate(
            f"only {len(reached)} of {len(costs)} runs" if reached else never,
            (0.02 if stands_left else 0.99, place),
            xycoords=("axes fraction", "data"),
            ha="left" if stands_left else "right",
            va="center",
            size=7.5,
            style="italic",
            color="#666666",
        )

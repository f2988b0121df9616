"""Axes of curves: their units, where they are cut, and names at the ends of lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from . import look
from .curves import Measure, Unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SMALLEST_SHARE = 1e-12  # of the highest value that an axis reaches down to
LABEL_POINTS = 8.0
_LINE_INCHES = LABEL_POINTS * 1.3 / 72


class End(NamedTuple):
    """The end of a line, and what is written there."""

    x: float
    y: float
    text: str
    colour: str


def scale_of(unit: Unit, largest: float) -> tuple[float, str]:
    """Return what to divide by, and the axis in words."""
    if unit == "bytes":
        size, name = (1e9, "GB") if largest >= 1e9 else (1e6, "MB")
        return size, f"{name} down and up, all clients"
    return 1.0, "round" if unit == "rounds" else "seconds of rounds"


def seen_on(values: Sequence[float] | np.ndarray, measure: Measure) -> np.ndarray:
    """Return those of the values that decide where the y axis is cut: the finite ones, on a log
    axis without zeros, if there are others."""
    given = np.asarray(values, dtype=float)
    finite: np.ndarray = given[np.isfinite(given)]
    positive: np.ndarray = finite[finite > 0]
    has_log_axis = measure.is_lower_better and (finite >= 0).all() and positive.size
    return positive if has_log_axis else finite


def set_scale(axes: Axes, lowest: float, highest: float, measure: Measure) -> None:
    """Cut the y axis to these values; what is better when lower gets a log axis."""
    if measure.is_lower_better and lowest > 0:
        set_log_scale(axes, lowest, highest, is_percent=measure.is_error)
        return
    margin = 0.04 * (highest - lowest) or 0.04 * abs(highest) or 0.04
    axes.set_ylim(lowest - margin, highest + margin)


def set_log_scale(axes: Axes, lowest: float, highest: float, *, is_percent: bool = False) -> None:
    """Make the y axis logarithmic, with few ticks in plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    lowest = max(lowest, highest * _SMALLEST_SHARE)
    axes.set_yscale("log", nonpositive="clip")
    margin = max(highest / lowest, 1.05) ** 0.04
    axes.set_ylim(lowest / margin, highest * margin)
    ratio = highest / lowest
    subs = [1.0, 2.0, 5.0] if ratio > 10 else [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0]
    subs = [1.0] if ratio > 1e3 else subs
    locator = LogLocator(subs=subs, numticks=12) if ratio > 2 else MaxNLocator(5)
    axes.yaxis.set_major_locator(locator)
    axes.yaxis.set_minor_locator(NullLocator())
    shown = FuncFormatter(lambda v, _: f"{100 * v:.3g} %" if is_percent else f"{v:.3g}")
    axes.yaxis.set_major_formatter(shown)


def label_inches(texts: Sequence[str]) -> float:
    """Return how much room labels at the ends of lines take, side by side with the axes."""
    return look.text_inches(texts, size=LABEL_POINTS, weight="bold") + 0.3


def label_ends(axes: Axes, ends: Sequence[End], height: float) -> None:
    """Write names right of the axes, each near the end of its line and none over another;
    these are `height` inches high."""
    if not ends:
        return
    lowest, highest = axes.get_ylim()
    places = axes.transData.transform([(end.x, np.clip(end.y, lowest, highest)) for end in ends])
    wanted = axes.transAxes.inverted().transform(places)[:, 1]
    heights = np.array([_LINE_INCHES * len(end.text.splitlines()) for end in ends])
    middles = look.spread(wanted * height, heights, -0.1, height + 0.1) / height
    for end, middle in zip(ends, middles, strict=True):
        is_named = end.colour != look.GREY
        axes.annotate(
            end.text,
            (end.x, float(np.clip(end.y, lowest, highest))),
            (1.035, middle),
            textcoords="axes fraction",
            va="center",
            size=LABEL_POINTS,
            weight="bold" if is_named else "normal",
            color=look.text_colour(end.colour),
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": end.colour,
                "lw": 0.6,
                "ls": (0, (1, 2)),
                "shrinkA": 1,
                "shrinkB": 0,
                "relpos": (0, 0.5),
            },
        )

"""The picture of results over the values of a hyperparameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import look

Row = Mapping[str, Any]  # of a comparison


def draw_sweeps(
    curves: Mapping[str, tuple[Sequence[float], Sequence[Row]]],
    levels: Mapping[str, Row],
    panels: Mapping[str, Callable[[Row], float | None]],
    path: Path,
    title: str,
) -> None:
    """Draw what `panels` find in rows over the values of a hyperparameter.

    `curves` holds for each name the values and their rows; the rows of `levels` belong to no
    value and are level lines.
    """
    from matplotlib.figure import Figure

    with look.drawing():
        figure = Figure(figsize=(4.5 * len(panels) + 1.5, 4.8), layout="constrained")
        figure.suptitle(title)
        ticks = sorted({value for values, _ in curves.values() for value in values})
        all_axes = figure.subplots(1, len(panels), squeeze=False, sharex=True)[0]
        for axes, (heading, value_of) in zip(all_axes, panels.items(), strict=True):
            for number, (name, (values, rows)) in enumerate(curves.items()):
                heights = [math.nan if (y := value_of(row)) is None else y for row in rows]
                axes.plot(values, heights, ls="-", label=name, **_style(number))
            for number, (name, row) in enumerate(levels.items(), len(curves)):
                if (height := value_of(row)) is not None:
                    axes.axhline(height, ls="--", label=name, **_style(number))
            if ticks[0] > 0:
                axes.set_xscale("log")
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], rotation=45)
            axes.minorticks_off()
            axes.set(xlabel="value of the hyperparameter", ylabel=heading)
        figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        look.save(figure, path)


def _style(number: int) -> dict[str, Any]:
    times, place = divmod(number, len(look.COLOURS))
    return {"color": look.COLOURS[place], "marker": look.MARKERS[times % len(look.MARKERS)]}

"""The curves of one or several runs, and the labels that each client holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..files import replacing
from ..rounds.record import RoundRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]  # of a comparison
_LINES = ("-", "--", ":")  # after ten colours the next style


def draw_curves(
    runs: Mapping[str, Sequence[Sequence[RoundRecord]]], path: Path, title: str
) -> None:
    """Draw losses by round, and the metric by round, by megabytes and by seconds.

    `runs` holds for each name one or several runs (seeds), which share a colour.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    every = [record for seeds in runs.values() for records in seeds for record in records]
    diagnosed = any(record.gradient_norm is not None for record in every)
    figure = Figure(figsize=(13.0, 11.2 if diagnosed else 7.5), layout="constrained")
    axes = figure.subplots(3 if diagnosed else 2, 3)
    figure.suptitle(title)
    for number, (name, seeds) in enumerate(runs.items()):
        style = {"color": colormaps["tab10"](number % 10), "ls": _LINES[number // 10 % len(_LINES)]}
        for records in seeds:
            _draw_run(axes, records, style, name if records is seeds[0] else None)
    _label(axes[0, 0], "round", "train loss (local, mean)")
    _label(axes[0, 1], "round", "test loss")
    for loss_axes in axes[0, :2]:
        loss_axes.set_yscale("log")  # a rule that diverges must not flatten the others
    _label(axes[1, 0], "round", "test metric")
    _label(axes[1, 1], "megabytes down and up, all clients", "test metric")
    _label(axes[1, 2], "seconds of rounds", "test metric")
    axes[0, 2].axis("off")
    if diagnosed:
        _label(axes[2, 0], "round", "loss over all training data")
        _label(axes[2, 1], "round", "norm of the whole gradient")
        for diagnosis_axes in axes[2, :2]:
            diagnosis_axes.set_yscale("log")
        axes[2, 2].axis("off")
    lines, names = axes[0, 0].get_legend_handles_labels()
    if lines:
        axes[0, 2].legend(lines, names, loc="center", ncols=2 if len(names) > 10 else 1)
    _save(figure, path)


def _draw_run(
    axes: Any, records: Sequence[RoundRecord], style: Mapping[str, Any], name: str | None
) -> None:
    sent = accumulate((r.uplink_bytes + r.downlink_bytes) / 1e6 for r in records)
    spent = accumulate(r.seconds for r in records)
    costs = {r.round: cost for r, cost in zip(records, zip(sent, spent, strict=True), strict=True)}
    trained = [r for r in records if r.train_loss is not None and r.round > 0]
    tested = [r for r in records if r.test_loss is not None]
    measured = [r for r in tested if r.test_metric is not None]
    metric = [r.test_metric for r in measured]
    axes[0, 0].plot(
        [r.round for r in trained], [r.train_loss for r in trained], label=name, **style
    )
    axes[0, 1].plot([r.round for r in tested], [r.test_loss for r in tested], **style)
    axes[1, 0].plot([r.round for r in measured], metric, **style)
    if len(axes) > 2:
        diagnosed = [r for r in records if r.gradient_norm is not None]
        numbers = [r.round for r in diagnosed]
        axes[2, 0].plot(numbers, [r.global_train_loss for r in diagnosed], **style)
        axes[2, 1].plot(numbers, [r.gradient_norm for r in diagnosed], **style)
    for place in (0, 1):
        axes[1, 1 + place].plot([costs[r.round][place] for r in measured], metric, **style)


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
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(panels) + 1.5, 4.8), layout="constrained")
    figure.suptitle(title)
    colours = colormaps["tab10"]
    ticks = sorted({value for values, _ in curves.values() for value in values})
    all_axes = figure.subplots(1, len(panels), squeeze=False, sharex=True)[0]
    for axes, (heading, value_of) in zip(all_axes, panels.items(), strict=True):
        for number, (name, (values, rows)) in enumerate(curves.items()):
            heights = [math.nan if (y := value_of(row)) is None else y for row in rows]
            axes.plot(values, heights, "o-", color=colours(number % 10), label=name)
        for number, (name, row) in enumerate(levels.items(), len(curves)):
            if (height := value_of(row)) is not None:
                axes.axhline(height, ls="--", color=colours(number % 10), label=name)
        if ticks[0] > 0:
            axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], rotation=45)
        axes.minorticks_off()
        _label(axes, "value of the hyperparameter", heading)
    figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    _save(figure, path)


def draw_partition(counts: np.ndarray, path: Path, title: str) -> None:
    """Draw how many examples of each class each client holds; counts are [clients, classes]."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    num_clients, num_classes = counts.shape
    figure = Figure(figsize=(max(7.0, 0.16 * num_clients + 3), 4.5), layout="constrained")
    axes = figure.subplots()
    bottom = np.zeros(num_clients)
    colours = colormaps["tab20"](np.linspace(0, 1, max(num_classes, 2)))
    for label in range(num_classes):
        axes.bar(
            range(num_clients), counts[:, label], bottom=bottom, color=colours[label], label=label
        )
        bottom += counts[:, label]
    axes.set(xlabel="client", ylabel="examples", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if num_classes <= 20:
        figure.legend(title="class", loc="outside right center")
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    """Write a picture whole or not at all; its kind is the ending of its name, else PNG."""
    picture = BytesIO()
    figure.savefig(picture, format=path.suffix.removeprefix(".") or "png", dpi=110)
    if path.is_dir():
        raise IsADirectoryError("it is a folder; name a file")
    place = path.resolve()  # a link stays one
    if place.exists() and not place.is_file():  # /dev/null or a pipe must not become a file
        place.write_bytes(picture.getvalue())
        return
    with replacing(place) as file:
        file.write(picture.getvalue())


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)

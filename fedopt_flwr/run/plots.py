"""The curves of one or several runs, and the labels that each client holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

_LINES = ("-", "--", ":")  # after ten colours the next style


def draw_curves(
    runs: Mapping[str, Sequence[Sequence[RoundRecord]]], path: Path, title: str
) -> None:
    """Draw losses by round, and the metric by round, by megabytes and by seconds.

    `runs` holds for each name one or several runs (seeds), which share a colour.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.0, 7.5), layout="constrained")
    axes = figure.subplots(2, 3)
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
    for place in (0, 1):
        axes[1, 1 + place].plot([costs[r.round][place] for r in measured], metric, **style)


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

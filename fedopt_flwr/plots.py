"""The curves of one or several runs, and the labels that each client holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .metrics import RoundRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE_INCHES = (11.0, 7.0)


def draw_curves(runs: Mapping[str, Sequence[RoundRecord]], path: Path, title: str) -> None:
    """Draw train loss, test loss and metric by round, and the metric by megabytes sent."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.subplots(2, 2)
    figure.suptitle(title)
    for name, records in runs.items():
        sent = list(accumulate(r.uplink_bytes + r.downlink_bytes for r in records))
        megabytes = {r.round: total / 1e6 for r, total in zip(records, sent, strict=True)}
        tested = [r for r in records if r.test_loss is not None]
        measured = [r for r in tested if r.test_metric is not None]
        trained = [r for r in records if r.train_loss is not None and r.round > 0]
        axes[0, 0].plot([r.round for r in trained], [r.train_loss for r in trained], label=name)
        axes[0, 1].plot([r.round for r in tested], [r.test_loss for r in tested], label=name)
        metric = [r.test_metric for r in measured]
        axes[1, 0].plot([r.round for r in measured], metric, label=name)
        axes[1, 1].plot([megabytes[r.round] for r in measured], metric, label=name)
    _label(axes[0, 0], "round", "train loss (local, mean)")
    _label(axes[0, 1], "round", "test loss")
    for loss_axes in axes[0]:
        loss_axes.set_yscale("log")  # a rule that diverges must not flatten the others
    _label(axes[1, 0], "round", "test metric")
    _label(axes[1, 1], "megabytes down and up, all clients", "test metric")
    figure.savefig(path, dpi=110)


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
    figure.savefig(path, dpi=110)


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    if axes.get_lines():
        axes.legend(fontsize="small")

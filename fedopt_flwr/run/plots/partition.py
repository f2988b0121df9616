"""The picture of a partition: the labels that each client holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from . import look


def draw_partition(counts: np.ndarray, path: Path, title: str) -> None:
    """Draw how many examples of each class each client holds; counts are [clients, classes]."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    num_clients, num_classes = counts.shape
    clients = range(num_clients)
    with look.drawing():
        figure = Figure(figsize=(max(7.0, 0.16 * num_clients + 3), 4.5), layout="constrained")
        axes = figure.subplots()
        bottom = np.zeros(num_clients)
        colours = colormaps["tab20"](np.linspace(0, 1, max(num_classes, 2)))
        for label in range(num_classes):
            own = counts[:, label]
            axes.bar(clients, own, bottom=bottom, color=colours[label], label=label)
            bottom += counts[:, label]
        axes.set(xlabel="client", ylabel="examples", title=title)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if num_classes <= 20:
            figure.legend(title="class", loc="outside right center")
        look.save(figure, path)

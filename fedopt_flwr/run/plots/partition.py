"""The picture of a partition: the labels that each client holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from . import look

_HATCHES = (None, "////", "...")  # one each time that the colours begin again


def draw_partition(counts: np.ndarray, path: Path, title: str) -> None:
    """Draw how many examples of each class each client holds; counts are [clients, classes]."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    num_clients, num_classes = counts.shape
    clients = range(num_clients)
    with look.drawing():
        figure = Figure(figsize=(max(7.0, 0.16 * num_clients + 3), 4.5), layout="constrained")
        axes = figure.subplots()
        bottom = np.zeros(num_clients)
        for label in range(num_classes):
            times, place = divmod(label, len(look.COLOURS))
            axes.bar(
                clients,
                counts[:, label],
                bottom=bottom,
                color=look.COLOURS[place],
                hatch=_HATCHES[times % len(_HATCHES)],
                edgecolor="white",  # of the hatches, too
                linewidth=0.4,
                label=label,
            )
            bottom += counts[:, label]
        axes.set(xlabel="client", ylabel="examples", title=title)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if num_classes <= 20:
            figure.legend(title="class", loc="outside right center")
        look.save(figure, path)

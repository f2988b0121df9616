"""`fedopt partition`: who holds which labels."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..config.run_config import RunConfig
from ..errors import ConfigError
from .console import Debug
from .options import ConfigFile, Settings


def partition(
    config: ConfigFile = None,
    settings: Settings = None,
    plot: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("partition.png"),
    debug: Debug = False,
) -> None:
    """Print and draw how many examples of each class each client holds."""
    run_config = RunConfig.from_file(config, settings or [])
    from ..data import load_federated_data
    from ..run.plots.partition import draw_partition

    data = load_federated_data(run_config)
    if data.num_classes == 0 or any((c.targets() < 0).any() for c in data.clients):
        raise ConfigError(f"data.name: {run_config.data.name!r} has no classes to count")
    counts = data.label_counts()
    classes = [str(label) for label in range(counts.shape[1])]
    table = Table("client", "examples", *classes, box=None, pad_edge=False)
    for client, row in enumerate(counts):
        table.add_row(str(client), str(row.sum()), *(str(n) if n else "·" for n in row))
    table.add_row("all", str(counts.sum()), *map(str, counts.sum(axis=0)))
    Console(width=None if sys.stdout.isatty() else 24 + 7 * len(classes)).print(table)
    kind = run_config.data.partition.kind or "default"
    try:
        draw_partition(counts, plot, f"{run_config.data.name}, {kind} partition")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot: cannot write {str(plot)!r}: {error}") from error
    print(f"drawn in {plot}")

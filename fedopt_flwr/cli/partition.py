"""`fedopt partition`: who holds which labels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError
from .console import Debug
from .options import (
    ConfigFile,
    Settings,
    read_config,
)


def partition(
    config: ConfigFile = None,
    settings: Settings = None,
    plot: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("partition.png"),
    debug: Debug = False,
) -> None:
    """Print and draw how many examples of each class each client holds."""
    run_config = read_config(config, None, settings)
    from ..data import load_federated_data
    from ..run.plots import draw_partition
    from .show import print_label_counts

    data = load_federated_data(run_config)
    if data.num_classes == 0 or any((c.targets() < 0).any() for c in data.clients):
        raise ConfigError(f"data.name: {run_config.data.name!r} has no classes to count")
    counts = data.label_counts()
    print_label_counts(counts)
    kind = run_config.data.partition.kind or "default"
    try:
        draw_partition(counts, plot, f"{run_config.data.name}, {kind} partition")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot: cannot write {str(plot)!r}: {error}") from error
    print(f"drawn in {plot}")

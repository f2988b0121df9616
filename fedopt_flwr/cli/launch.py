"""`fedopt launch`: a server and client processes on this machine."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from ..config.text import as_setting
from ..run.summary import Target
from .console import Debug
from .options import (
    AlgorithmName,
    ConfigFile,
    Resume,
    Settings,
    config_of_run,
    require_alone,
    require_one_name,
    usable_cores,
)

_TARGETS = [Target("test_accuracy", value) for value in (0.8, 0.9)]


def launch(
    config: ConfigFile = None,
    clients: Annotated[int | None, typer.Option(min=1, help="Sets federation.num_clients.")] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Client processes; as many as cores, at least 4.")
    ] = None,
    algorithm: AlgorithmName = None,
    settings: Settings = None,
    resume: Resume = None,
    debug: Debug = False,
) -> None:
    """Start a server and client processes on this machine, and end them all."""
    changed = [*(settings or [])]
    changed += [] if clients is None else [f"federation.num_clients={clients}"]
    require_one_name(algorithm, changed)
    changed += [as_setting("algorithm.name", algorithm)] if algorithm else []
    if resume is None:
        run_config = config_of_run(config, None, changed)
        checkpoint = None
    else:
        require_alone(config, changed)
        from ..run.resuming import read_run

        run_config, checkpoint = read_run(resume)
        config = (resume / "config.toml").absolute()
        changed = [as_setting("output.directory", str(resume))]
    from ..deployment.launcher import launch as launch_run
    from .show_federation import FederationDisplay
    from .tables import print_results, result_row

    total = run_config.federation.fixed_number("`fedopt launch`")
    num_processes = min(total, processes or max(4, usable_cores()))
    folder = run_config.output.directory or Path("runs")
    with FederationDisplay(run_config) as display:
        display.say(f"{total} clients in {num_processes} processes; logs in {folder}/logs")
        result = launch_run(
            run_config,
            [*([str(config)] if config else []), *(f"--set={setting}" for setting in changed)],
            num_processes=num_processes,
            folder=folder,
            listener=display,
            roster=display.roster,
            checkpoint=checkpoint,
        )
    with contextlib.suppress(OSError):  # a full disk; the run is done
        print_results([result_row(result.summary["algorithm"], [result], _TARGETS)], _TARGETS)
    display.finish(result)

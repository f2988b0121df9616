"""`fedopt launch`: a server and client processes on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..config.run_config import RunConfig
from ..config.text import as_setting
from ..errors import ConfigError
from .console import Debug
from .options import (
    AlgorithmName,
    ConfigFile,
    Resume,
    Settings,
    read_config,
    usable_cores,
    with_directory,
)

if TYPE_CHECKING:
    from ..run.checkpoints import Checkpoint


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
    if resume is None:
        run_config = with_directory(read_config(config, algorithm, changed))
        checkpoint = None
        changed += [f"algorithm.name={algorithm}"] if algorithm else []
    else:
        if config or changed or algorithm:
            raise ConfigError(
                "--resume: takes the configuration from its directory; give no other beside it"
            )
        from ..run.resuming import read_run

        run_config, checkpoint = read_run(resume)
        config = (resume / "config.toml").absolute()
        changed = [as_setting("output.directory", str(resume))]
    total = run_config.federation.num_clients
    _launch(
        run_config,
        checkpoint,
        client_arguments=[
            *([str(config)] if config else []),
            *(word for setting in changed for word in ("--set", setting)),
        ],
        num_processes=min(total, processes or max(4, usable_cores())),
    )


def _launch(
    config: RunConfig,
    checkpoint: Checkpoint | None,
    *,
    client_arguments: list[str],
    num_processes: int,
) -> None:
    from ..deployment.launcher import launch as launch_run
    from ..engines.stream import Roster
    from .show_federation import FederationDisplay

    folder = config.output.directory
    total = config.federation.num_clients
    with FederationDisplay(directory=folder) as display:
        display.watch(Roster(display.say), total)
        display.say(f"{total} clients in {num_processes} processes; logs in {folder}/logs")
        result = launch_run(
            config,
            client_arguments,
            num_processes=num_processes,
            folder=folder or Path("runs"),
            listener=display,
            roster=display.roster,
            checkpoint=checkpoint,
        )
    display.print_result(result, folder)

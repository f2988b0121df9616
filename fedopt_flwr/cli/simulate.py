"""`fedopt simulate`: train on this machine."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ..config.run_config import RunConfig
from ..errors import ConfigError
from .console import Debug
from .options import (
    AlgorithmName,
    ConfigFile,
    Settings,
    Workers,
    read_config,
    with_directory,
)


class Engine(StrEnum):
    """What runs the clients of a simulation."""

    IN_PROCESS = "in-process"
    RAY = "ray"


def simulate(
    config: ConfigFile = None,
    algorithm: AlgorithmName = None,
    settings: Settings = None,
    workers: Workers = 1,
    engine: Annotated[
        Engine, typer.Option(help="in-process, or Flower's own simulation on Ray.")
    ] = Engine.IN_PROCESS,
    cpus_per_client: Annotated[float, typer.Option(min=0, help="Only with --engine ray.")] = 1,
    gpus_per_client: Annotated[float, typer.Option(min=0, help="Only with --engine ray.")] = 0,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIRECTORY", help="Continue from this run's checkpoint.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Train on this machine, in this process or with Ray."""
    if engine is Engine.RAY:
        if workers > 1 or resume is not None:
            raise ConfigError("--engine ray: knows neither --workers nor --resume; leave them out")
        _simulate_on_ray(read_config(config, algorithm, settings), cpus_per_client, gpus_per_client)
        return
    if resume is not None:
        if config or algorithm or settings:
            raise ConfigError(
                "--resume: takes the configuration from its directory; give no other beside it"
            )
        from ..run.simulate import resume as resume_run
        from .show import RunDisplay

        with RunDisplay(directory=resume) as display:
            result = resume_run(resume, workers=workers, listener=display)
        display.finish(result, resume)
        return
    run_config = with_directory(read_config(config, algorithm, settings))
    from ..run.simulate import simulate as simulate_run
    from .show import RunDisplay

    with RunDisplay(directory=run_config.output.directory) as display:
        result = simulate_run(run_config, workers=workers, listener=display)
    display.finish(result, run_config.output.directory)


def _simulate_on_ray(config: RunConfig, cpus: float, gpus: float) -> None:
    run_config = with_directory(config)
    from ..run.flower_apps import simulate_on_ray
    from .show import RunDisplay

    with RunDisplay(directory=run_config.output.directory) as display:
        result = simulate_on_ray(run_config, display, cpus_per_client=cpus, gpus_per_client=gpus)
    display.finish(result, run_config.output.directory)

"""`fedopt simulate`: train clients that are not real ones, on this machine or a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..errors import ConfigError
from .console import Debug
from .options import (
    AlgorithmName,
    ConfigFile,
    Resume,
    Settings,
    Workers,
    config_of_run,
    require_address,
    require_alone,
)


def simulate(
    config: ConfigFile = None,
    algorithm: AlgorithmName = None,
    settings: Settings = None,
    workers: Workers = 1,
    engine: Annotated[
        Literal["in-process", "ray"],
        typer.Option(help="in-process, or Flower's own simulation on Ray."),
    ] = "in-process",
    cpus_per_client: Annotated[float, typer.Option(min=0, help="Only with --engine ray.")] = 1,
    gpus_per_client: Annotated[float, typer.Option(min=0, help="Only with --engine ray.")] = 0,
    ray_address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="A Ray cluster to use, with --engine ray; else one starts."
        ),
    ] = None,
    resume: Resume = None,
    debug: Debug = False,
) -> None:
    """Train in this process, or with Ray on this machine or a cluster."""
    if engine == "ray" and (workers > 1 or resume is not None):
        raise ConfigError("--engine ray: knows neither --workers nor --resume; leave them out")
    if engine != "ray":
        _require_no_ray(cpus_per_client, gpus_per_client)
    if ray_address is not None:
        _require_cluster(engine, ray_address)
    train: Callable[..., Any]
    if resume is not None:
        require_alone(config, algorithm, settings)
        from ..run.simulate import resume as resume_run

        directory: Path | None = resume
        train = partial(resume_run, resume, workers=workers)
    else:
        run_config = config_of_run(config, algorithm, settings)
        directory = run_config.output.directory
        if engine == "ray":
            from ..run.flower_apps import simulate_on_ray

            train = partial(
                simulate_on_ray,
                run_config,
                cpus_per_client=cpus_per_client,
                gpus_per_client=gpus_per_client,
                ray_address=ray_address,
            )
        else:
            from ..run.simulate import simulate as simulate_run

            train = partial(simulate_run, run_config, workers=workers)
    from .show import RunDisplay

    with RunDisplay(directory) as display:
        result = train(listener=display)
    display.finish(result)


def _require_no_ray(cpus: float, gpus: float) -> None:
    if (cpus, gpus) != (1, 0):
        raise ConfigError(
            "--cpus-per-client, --gpus-per-client: only with --engine ray; give that, or leave "
            "them out"
        )


def _require_cluster(engine: str, address: str) -> None:
    if engine != "ray":
        raise ConfigError(
            f"--ray-address: got {address!r} beside --engine {engine}, which trains in this "
            "process; add --engine ray, or leave the address out"
        )
    require_address("--ray-address", address, lowest_port=1)

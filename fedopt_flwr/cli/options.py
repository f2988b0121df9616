"""Options that several verbs share."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Annotated

import typer

from ..config.run_config import RunConfig
from ..errors import ConfigError, FedoptWarning


def usable_cores() -> int:
    """Return how many cores this process may use, as far as the system says."""
    if hasattr(os, "sched_getaffinity"):  # not on Windows and macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


ConfigFile = Annotated[Path | None, typer.Argument(help="TOML file; all defaults without it.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one key; repeatable."),
]
Workers = Annotated[int, typer.Option(min=1, help="Clients that train at the same time.")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Plain text: anyone on the way can read the model.")
]
Certificate = Annotated[Path | None, typer.Option(help="This end's certificate (PEM).")]
Key = Annotated[Path | None, typer.Option(help="The key of --certificate.")]
Resume = Annotated[
    Path | None, typer.Option(metavar="DIRECTORY", help="Continue from this run's checkpoint.")
]
AlgorithmName = Annotated[
    str | None, typer.Option("--algorithm", help="Short for --set algorithm.name=NAME.")
]


def read_config(
    config: Path | None, algorithm: str | None, settings: list[str] | None
) -> RunConfig:
    own = {"algorithm.name": algorithm} if algorithm else {}
    return RunConfig.from_file(config, settings or [], own)


def with_directory(config: RunConfig) -> RunConfig:
    """Give a run without a directory a new one under runs/."""
    if config.output.directory is not None:
        return config
    name = f"{config.algorithm.name}-{config.data.name}".replace(":", "-")
    return config.with_values({"output.directory": str(new_folder(name))})


def new_folder(name: str) -> Path:
    """Return a folder in runs/ named by the microsecond, so that no two runs share one."""
    from datetime import datetime

    return Path(f"runs/{datetime.now():%Y%m%d-%H%M%S-%f}-{name}")


def require_state_directory(path: Path) -> None:
    nearest = next((p for p in (path, *path.absolute().parents) if p.exists()), path)
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        what = "is no folder" if not nearest.is_dir() else "cannot be written to"
        raise ConfigError(
            f"--state-dir: got {str(path)!r}; {str(nearest)!r} {what}; name a folder on a disk "
            "that stays"
        )


def require_no_files(*files: Path | None) -> None:
    if any(files):
        raise ConfigError("--insecure: uses no certificates; leave it out or leave them out")


def warn_insecure(consequence: str) -> None:
    text = f"--insecure: nothing is encrypted; {consequence}"
    warnings.warn(text, FedoptWarning, stacklevel=2)

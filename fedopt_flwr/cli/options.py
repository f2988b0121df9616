"""Options that several verbs share."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from datetime import datetime
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
HealthAddress = Annotated[
    str | None,
    typer.Option("--health", metavar="HOST:PORT", help="Answer gRPC health checks, in plain text."),
]
MetricsAddress = Annotated[
    str | None,
    typer.Option("--metrics", metavar="HOST:PORT", help="Serve Prometheus metrics over HTTP."),
]
Resume = Annotated[
    Path | None, typer.Option(metavar="DIRECTORY", help="Continue from this run's checkpoint.")
]
AlgorithmName = Annotated[
    str | None, typer.Option("--algorithm", help="Short for --set algorithm.name=NAME.")
]


def require_one_name(algorithm: str | None, settings: Sequence[str]) -> None:
    """Raise ConfigError if the rule is named twice."""
    keys = [setting.partition("=")[0].strip() for setting in settings]
    if algorithm and "algorithm.name" in keys:
        raise ConfigError("--algorithm and --set algorithm.name: give one of the two")


def configured(path: Path | None, algorithm: str | None, settings: list[str] | None) -> RunConfig:
    """Read a run's configuration."""
    require_one_name(algorithm, settings or [])
    named = {"algorithm.name": algorithm} if algorithm else {}
    return RunConfig.from_file(path, settings or [], named)


def config_of_run(
    path: Path | None, algorithm: str | None, settings: list[str] | None
) -> RunConfig:
    """Read a run's configuration; without a directory it gets a new one under runs/."""
    config = configured(path, algorithm, settings)
    if config.output.directory is not None:
        return config
    name = f"{config.algorithm.name}-{config.data.name}".replace(":", "-")
    return config.with_values({"output.directory": str(new_folder(name))})


def new_folder(name: str) -> Path:
    """Return a folder in runs/ named by the microsecond, so that no two runs share one."""
    return Path(f"runs/{datetime.now():%Y%m%d-%H%M%S-%f}-{name}")


def require_address(option: str, address: str, *, lowest_port: int) -> None:
    """Raise ConfigError with the remedy unless this is HOST:PORT or [IPv6]:PORT."""
    host, _, port = address.rpartition(":")
    is_host = re.fullmatch(r"[^\s:/@\[\]]+|\[[0-9A-Fa-f:.%\w]+\]", host)
    if is_host and re.fullmatch("[0-9]{1,5}", port) and lowest_port <= int(port) <= 65535:
        return
    remedy = "name the host and the port alone, as in fl.example.org:8080 or [2001:db8::1]:8080"
    found = re.fullmatch(r"(?:\w[\w+.-]*://)?([^\s:/@]+:[0-9]{1,5})(?:/.*)?", address)
    if found and found[1] != address:
        remedy = f"write {found[1]}"
    elif address.startswith("unix:"):
        remedy = "sockets of the file system are not supported"
    elif re.fullmatch(r"[0-9A-Fa-f]*:[0-9A-Fa-f:]*:[0-9A-Fa-f:]*", address):
        remedy = "put an IPv6 address into brackets, as in [2001:db8::1]:8080"
    elif re.fullmatch(r"(?:\w[\w+.-]*://)?[^\s:/@]+/?", address):
        remedy = "add the port, as in fl.example.org:8080"
    raise ConfigError(
        f"{option}: got {address!r}; must be HOST:PORT, with a port from "
        f"{lowest_port} to 65535; {remedy}"
    )


def require_observers(health: str | None, metrics: str | None) -> None:
    """Raise ConfigError unless the addresses of --health and --metrics are such."""
    for option, address in (("--health", health), ("--metrics", metrics)):
        if address is not None:
            require_address(option, address, lowest_port=0)


def require_alone(*others: object) -> None:
    """Raise ConfigError if something else is given beside --resume."""
    if any(others):
        raise ConfigError(
            "--resume: takes the configuration from its directory; give no other beside it"
        )


def require_writable(field: str, folder: Path, remedy: str) -> None:
    """Raise ConfigError unless a folder, or where it would be made, can be written to."""
    nearest = next((p for p in (folder, *folder.absolute().parents) if p.exists()), folder)
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        what = "is no folder" if not nearest.is_dir() else "cannot be written to"
        raise ConfigError(f"{field}: got {str(folder)!r}; {str(nearest)!r} {what}; {remedy}")


def require_place(output: Path, kinds: Sequence[str]) -> None:
    """Raise ConfigError unless a file whose name ends with one of `kinds` can be written there."""
    if output.suffix not in kinds:
        *others, last = kinds
        allowed = f"{', '.join(others)} or {last}" if others else last
        raise ConfigError(f"--output: got {str(output)!r}; must end with {allowed}")
    if not output.parent.is_dir():
        raise ConfigError(
            f"--output: got {str(output)!r}; there is no folder {str(output.parent)!r}; make it or "
            "name another"
        )
    if not os.access(output.parent, os.W_OK | os.X_OK):
        raise ConfigError(
            f"--output: got {str(output)!r}; {str(output.parent)!r} cannot be written to; name "
            "another folder"
        )


def warn_insecure(consequence: str, *files: Path | None) -> None:
    """Warn of what --insecure means; ConfigError if it comes with certificates."""
    if any(files):
        raise ConfigError("--insecure: uses no certificates; leave it out or leave them out")
    text = f"--insecure: nothing is encrypted; {consequence}"
    warnings.warn(text, FedoptWarning, stacklevel=2)

"""`fedopt server`: a federation over gRPC, its server."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..config.text import as_setting
from ..errors import ConfigError, FedoptWarning
from .console import Debug
from .options import (
    AlgorithmName,
    Certificate,
    ConfigFile,
    HealthAddress,
    Insecure,
    Key,
    MetricsAddress,
    Resume,
    Settings,
    config_of_run,
    configured,
    require_address,
    require_observers,
    warn_insecure,
)

if TYPE_CHECKING:
    from ..config.run_config import RunConfig
    from ..engines.stream import ServerTls
    from ..run.checkpoints import Checkpoint
    from ..run.run import Listener
    from .show_federation import FederationDisplay


def server(
    config: ConfigFile = None,
    address: Annotated[str, typer.Option(metavar="HOST:PORT")] = "0.0.0.0:8080",
    algorithm: AlgorithmName = None,
    settings: Settings = None,
    certificate: Certificate = None,
    key: Key = None,
    client_ca: Annotated[
        Path | None, typer.Option(help="Clients must show a certificate of this CA.")
    ] = None,
    revoked: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Certificates that count no more (`fedopt certs revoke`)."
        ),
    ] = None,
    insecure: Insecure = False,
    resume: Resume = None,
    continues: Annotated[
        bool,
        typer.Option("--continue", help="Continue the run in output.directory, or start it there."),
    ] = False,
    health: HealthAddress = None,
    metrics: MetricsAddress = None,
    debug: Debug = False,
) -> None:
    """Wait for the clients, run the federation over gRPC, write the results."""
    require_address("--address", address, lowest_port=0)
    require_observers(health, metrics)
    run_config, checkpoint = _run(config, algorithm, settings or [], resume, continues)
    tls = _server_tls(certificate, key, client_ca, revoked, insecure)
    from ..run.serve import serve
    from .show_federation import FederationDisplay

    host = address.rpartition(":")[0]
    with (
        FederationDisplay(run_config) as display,
        _observed(display, run_config, tls, health, metrics, checkpoint) as listener,
    ):
        result = serve(
            run_config,
            address,
            tls=tls,
            listener=listener,
            roster=display.roster,
            checkpoint=checkpoint,
            on_listening=lambda port: display.say(f"listening at {host}:{port}"),
        )
    display.finish(result)


def _run(
    config: Path | None,
    algorithm: str | None,
    settings: list[str],
    resume: Path | None,
    continues: bool,
) -> tuple[RunConfig, Checkpoint | None]:
    """Return a run's configuration and, if it has begun, where to continue."""
    if resume is not None and (algorithm or continues):
        other = "--continue" if continues else "--algorithm"
        raise ConfigError(f"--resume: takes the run from its directory; leave out {other}")
    if continues:
        resume = _begun(configured(config, algorithm, settings))
        settings = [*settings, as_setting("algorithm.name", algorithm)] if algorithm else settings
    if resume is None:
        return config_of_run(config, None if continues else algorithm, settings), None
    from ..run.resuming import read_run

    return read_run(resume, config, settings)


def _begun(config: RunConfig) -> Path | None:
    """Return the folder of a run to continue, None if it is to start there; exit if it is over."""
    directory = config.output.directory
    if directory is None or not config.output.checkpoint_every:
        raise ConfigError(
            "--continue: set output.directory, where the run is looked for, and "
            "output.checkpoint_every, without which none can be continued"
        )
    from ..run.checkpoints import has_checkpoint
    from ..run.directory import MODEL, RunDirectory
    from ..run.reading import SUMMARY

    if all((directory / name).exists() for name in (SUMMARY, MODEL)):
        print(f"the run in {str(directory)!r} is over")
        raise typer.Exit
    RunDirectory(directory).forget_unbegun()
    return directory if has_checkpoint(directory) else None


@contextlib.contextmanager
def _observed(
    display: FederationDisplay,
    config: RunConfig,
    tls: ServerTls | None,
    health: str | None,
    metrics: str | None,
    checkpoint: Checkpoint | None,
) -> Iterator[Listener]:
    """Answer those who watch a server meanwhile; yields who must hear of its run."""
    from ..engines.stream import answering_health
    from ..run.run import Several

    roster = display.roster
    with contextlib.ExitStack() as open_ports:
        if health is not None:
            port = open_ports.enter_context(answering_health(health, lambda: roster.is_open))
            display.say(f"health checks at {health.rpartition(':')[0]}:{port}")
        if metrics is None:
            yield display
            return
        from ..deployment.metrics import ServerMetrics, serving_metrics

        done = checkpoint.server.round if checkpoint else 0
        kept = ServerMetrics(config, roster, tls.ends if tls else dict, done)
        port = open_ports.enter_context(serving_metrics(metrics, kept.registry))
        display.say(f"metrics at http://{metrics.rpartition(':')[0]}:{port}/metrics")
        yield Several(display, kept)


def _server_tls(
    certificate: Path | None,
    key: Path | None,
    client_ca: Path | None,
    revoked: Path | None,
    insecure: bool,
) -> ServerTls | None:
    if insecure:
        what = "anyone who reaches this port can join, and read and change the model"
        warn_insecure(what, certificate, key, client_ca, revoked)
        return None
    if certificate is None or key is None:
        raise ConfigError(
            "--certificate and --key: give both (`fedopt certs init` makes them), or --insecure "
            "for plain text"
        )
    if client_ca is None and revoked is not None:
        raise ConfigError("--revoked: its certificates are clients'; give --client-ca beside it")
    if client_ca is None:
        text = "without --client-ca any client that reaches this port can join"
        warnings.warn(text, FedoptWarning, stacklevel=2)
    from ..engines.stream import ServerTls

    return ServerTls(certificate, key, client_ca, revoked)

"""`fedopt client`: the clients of one process."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..config.client_ids import parse_ids
from ..config.run_config import RunConfig
from ..errors import ConfigError
from .console import Debug, SteadyOutput, mute
from .options import (
    Certificate,
    ConfigFile,
    HealthAddress,
    Insecure,
    Key,
    MetricsAddress,
    Settings,
    require_address,
    require_observers,
    require_writable,
    warn_insecure,
)

if TYPE_CHECKING:
    from ..engines.stream import ClientTls, Connections


def client(
    config: ConfigFile = None,
    server: Annotated[str, typer.Option(metavar="HOST:PORT")] = "127.0.0.1:8080",
    client_id: Annotated[
        str | None, typer.Option(help="Who this is: a number from 0 to N-1, or a name.")
    ] = None,
    client_ids: Annotated[
        str | None, typer.Option(help="Several clients in this process, as in 0-24 or 1,5.")
    ] = None,
    state_dir: Annotated[
        Path, typer.Option(help="Where clients keep state between rounds and restarts.")
    ] = Path("fedopt-state"),
    settings: Settings = None,
    ca: Annotated[Path | None, typer.Option(help="CA of the server's certificate (PEM).")] = None,
    certificate: Certificate = None,
    key: Key = None,
    insecure: Insecure = False,
    health: HealthAddress = None,
    metrics: MetricsAddress = None,
    debug: Debug = False,
) -> None:
    """Train on this machine's data for a server; CONFIG says which data, device and own code."""
    require_address("--server", server, lowest_port=1)
    require_observers(health, metrics)
    run_config = RunConfig.from_file(config, settings or [])
    ids = _ids(client_id, client_ids)
    tls = _client_tls(ca, certificate, key, insecure)
    require_writable("--state-dir", state_dir, "name a folder on a disk that stays")
    from ..deployment.leash import follow_parent
    from ..engines.stream import JOIN_TOKEN, Connections, ServerAddress
    from ..run.hosts import serve_clients

    follow_parent()
    if tls is not None:
        tls.credentials()  # so that wrong files are an error now, not at the first connection
    transport = run_config.transport
    where = ServerAddress(
        server,
        tls,
        transport.keep_alive_seconds,
        transport.proxy,
        transport.max_message_mb,
        # processes that this one starts need not know it
        token=os.environ.pop(JOIN_TOKEN, ""),
    )
    say = partial(_say, SteadyOutput(sys.stdout))
    connections = Connections(ids)
    with _observed(connections, tls, health, metrics, say):
        errors = serve_clients(run_config, ids, state_dir, where, say, connections)
    if errors:
        raise errors[0]


@contextlib.contextmanager
def _observed(
    connections: Connections,
    tls: ClientTls | None,
    health: str | None,
    metrics: str | None,
    say: Callable[[str], None],
) -> Iterator[None]:
    """Answer those who watch a process of clients meanwhile."""
    from ..engines.stream import answering_health

    with contextlib.ExitStack() as open_ports:
        if health is not None:
            port = open_ports.enter_context(answering_health(health, connections.are_open))
            say(f"health checks at {health.rpartition(':')[0]}:{port}")
        if metrics is not None:
            from ..deployment.metrics import ClientMetrics, serving_metrics

            kept = ClientMetrics(connections, tls.ends if tls else dict)
            port = open_ports.enter_context(serving_metrics(metrics, kept.registry))
            say(f"metrics at http://{metrics.rpartition(':')[0]}:{port}/metrics")
        yield


def _client_tls(
    ca: Path | None, certificate: Path | None, key: Path | None, insecure: bool
) -> ClientTls | None:
    if insecure:
        warn_insecure("anyone on the way can read and change the model", ca, certificate, key)
        return None
    if ca is None:
        raise ConfigError(
            "--ca: give the CA that the server's certificate is of (ca.pem of `fedopt certs "
            "init`), or --insecure for plain text"
        )
    if (certificate is None) != (key is None):
        raise ConfigError("--certificate and --key: give both or neither")
    from ..engines.stream import ClientTls

    return ClientTls(ca, certificate, key)


def _ids(client_id: str | None, client_ids: str | None) -> list[int | str]:
    if (client_id is None) == (client_ids is None):
        raise ConfigError(
            "--client-id or --client-ids: give one of the two, here or as FEDOPT_CLIENT_ID or "
            "FEDOPT_CLIENT_IDS"
        )
    option = "--client-id" if client_id is not None else "--client-ids"
    try:
        ids = parse_ids(client_id or client_ids or "")
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    if client_id is not None and len(ids) > 1:
        raise ConfigError(f"--client-id: got {client_id!r}; several clients go with --client-ids")
    return ids


def _say(output: SteadyOutput, text: str) -> None:
    try:
        output.write(f"{text}\n")
    except BrokenPipeError:  # the clients stay
        mute()

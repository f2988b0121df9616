"""`fedopt client`: the clients of one process."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..algorithm import ClientId
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
    one_of: Annotated[
        str | None, typer.Option(help="The first of these ids that no other --one-of has there.")
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
    no_evaluation: Annotated[
        bool,
        typer.Option(
            "--no-evaluation",
            help="Tell a server that asks nothing of any evaluation, nor of the whole gradient.",
        ),
    ] = False,
    state_lost: Annotated[
        Literal["fail", "restart"],
        typer.Option(
            help="What it does without its state: fail, or begin anew (open federations)."
        ),
    ] = "fail",
    debug: Debug = False,
) -> None:
    """Train on this machine's data for a server; CONFIG says which data, device and own code."""
    require_address("--server", server, lowest_port=1)
    require_observers(health, metrics)
    run_config = RunConfig.from_file(config, settings or [])
    ids = _ids(client_id, client_ids, one_of)
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
    with _first_free(ids, state_dir) if one_of else contextlib.nullcontext(ids) as own:
        connections = Connections(own)
        with _observed(connections, tls, health, metrics, say):
            errors = serve_clients(
                *(run_config, own, state_dir, where, say, connections),
                evaluate=not no_evaluation,
                restart=state_lost == "restart",
            )
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


def _ids(client_id: str | None, client_ids: str | None, one_of: str | None) -> list[ClientId]:
    options = {"--client-id": client_id, "--client-ids": client_ids, "--one-of": one_of}
    given = [(option, text) for option, text in options.items() if text is not None]
    if len(given) != 1:
        raise ConfigError(
            "--client-id, --client-ids or --one-of: give one of them, here or as FEDOPT_CLIENT_ID, "
            "FEDOPT_CLIENT_IDS or FEDOPT_ONE_OF"
        )
    ((option, text),) = given
    try:
        ids = parse_ids(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    if client_id is not None and len(ids) > 1:
        raise ConfigError(f"--client-id: got {client_id!r}; several clients go with --client-ids")
    return ids


@contextlib.contextmanager
def _first_free(ids: list[ClientId], state_dir: Path) -> Iterator[list[ClientId]]:
    """Hold the first id whose lock no other process has; its state lies beside the lock, so who
    has the id has its state. The system unlocks it however this process ends."""
    from filelock import FileLock, Timeout

    if not all(isinstance(client_id, int) for client_id in ids):
        raise ConfigError(f"--one-of: got {ids[0]!r}; must be numbers, as in 0-7 or 1,5")
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    for client_id in ids:
        path = state_dir / f"client-{client_id}.lock"
        lock = FileLock(path, blocking=False, fallback_to_soft=False)
        try:
            held = lock.acquire()
        except Timeout:
            continue
        with held:
            yield [client_id]
        return
    raise ConfigError(
        f"--one-of: all of its {len(ids)} ids are taken by processes with the same --state-dir; "
        "name more ids or start fewer processes"
    )


def _say(output: SteadyOutput, text: str) -> None:
    try:
        output.write(f"{text}\n")
    except BrokenPipeError:  # the clients stay
        mute()

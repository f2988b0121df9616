"""The verbs for federations of processes: server, client, launch, certs."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..config.text import as_setting
from ..errors import ConfigError, FedoptWarning
from .addresses import require_address, with_port
from .console import Debug
from .options import (
    AlgorithmName,
    ConfigFile,
    Settings,
    read_config,
    require_state_directory,
    usable_cores,
    with_directory,
)
from .show import mute

if TYPE_CHECKING:
    from ..config.run_config import RunConfig
    from ..engines.stream import ClientTls, ServerTls
    from ..run.checkpoints import Checkpoint

certs = typer.Typer(help="Make certificates for a federation.", no_args_is_help=True)

Insecure = Annotated[
    bool, typer.Option("--insecure", help="Plain text: anyone on the way can read the model.")
]
Certificate = Annotated[Path | None, typer.Option(help="This end's certificate (PEM).")]
Key = Annotated[Path | None, typer.Option(help="The key of --certificate.")]
Days = Annotated[int, typer.Option(min=1, help="For how long certificates are valid.")]
Directory = Annotated[Path, typer.Option(help="Where ca.pem and ca.key lie.")]
Resume = Annotated[
    Path | None, typer.Option(metavar="DIRECTORY", help="Continue from this run's checkpoint.")
]


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
    insecure: Insecure = False,
    resume: Resume = None,
    debug: Debug = False,
) -> None:
    """Wait for the clients, run the federation over gRPC, write the results."""
    require_address("--address", address, lowest_port=0)
    if resume is not None and algorithm:
        raise ConfigError("--resume: takes the rule from its directory; leave out --algorithm")
    if resume is None:
        run_config, checkpoint = with_directory(read_config(config, algorithm, settings)), None
    else:
        from ..run.resuming import read_run

        run_config, checkpoint = read_run(resume, config, settings or [])
    if not insecure:
        os.environ["GRPC_VERBOSITY"] = "info"  # HandshakeLog lives on it; before flwr is imported
    tls = _server_tls(certificate, key, client_ca, insecure)
    from ..engines.stream import Roster
    from ..run.serve import serve
    from .federation_show import FederationDisplay

    with FederationDisplay(directory=run_config.output.directory) as display:
        display.watch(Roster(display.say), run_config.federation.num_clients)
        result = serve(
            run_config,
            address,
            tls=tls,
            listener=display,
            roster=display.roster,
            checkpoint=checkpoint,
            on_listening=lambda port: display.say(f"listening at {with_port(address, port)}"),
        )
    display.finish(result, run_config.output.directory)


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
    debug: Debug = False,
) -> None:
    """Train on this machine's data for a server; CONFIG says which data, device and own code."""
    require_address("--server", server, lowest_port=1)
    run_config = read_config(config, None, settings)
    ids = _ids(client_id, client_ids)
    tls = _client_tls(ca, certificate, key, insecure)
    require_state_directory(state_dir)
    from ..deployment.leash import follow_parent
    from ..engines.stream import ServerAddress
    from ..run.hosts import serve_clients

    follow_parent()
    if tls is not None:
        tls.credentials()  # so that wrong files are an error now, not at the first connection
    transport = run_config.transport
    where = ServerAddress(server, tls, transport.keep_alive_seconds, transport.proxy)
    errors = serve_clients(run_config, ids, state_dir, where, _say)
    if errors:
        raise errors[0]


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
    from .federation_show import FederationDisplay

    folder, total = config.output.directory, config.federation.num_clients
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


@certs.command("init")
def certs_init(
    host: Annotated[
        list[str] | None, typer.Option(help="A name or IP address of the server; repeatable.")
    ] = None,
    directory: Directory = Path("certs"),
    days: Days = 365,
) -> None:
    """Make a CA, and the server's certificate for the given hosts."""
    from ..deployment.certificates import create_authority

    for path in create_authority(directory, host or ["localhost", "127.0.0.1"], days):
        print(path)


@certs.command("client")
def certs_client(
    name: Annotated[str, typer.Argument(help="The client's id, or several as in 0-24.")],
    directory: Directory = Path("certs"),
    days: Days = 365,
) -> None:
    """Make a client's key and certificate; its common name is the client's identity."""
    from ..deployment.certificates import create_client

    for path in create_client(directory, name, days):
        print(path)


def _server_tls(
    certificate: Path | None, key: Path | None, client_ca: Path | None, insecure: bool
) -> ServerTls | None:
    if insecure:
        _require_no_files(certificate, key, client_ca)
        _warn_insecure("anyone who reaches this port can join, and read and change the model")
        return None
    if certificate is None or key is None:
        raise ConfigError(
            "--certificate and --key: give both (`fedopt certs init` makes them), or --insecure "
            "for plain text"
        )
    if client_ca is None:
        text = "without --client-ca any client that reaches this port can join"
        warnings.warn(text, FedoptWarning, stacklevel=2)
    from ..engines.stream import ServerTls

    return ServerTls(certificate, key, client_ca)


def _client_tls(
    ca: Path | None, certificate: Path | None, key: Path | None, insecure: bool
) -> ClientTls | None:
    if insecure:
        _require_no_files(ca, certificate, key)
        _warn_insecure("anyone on the way can read and change the model")
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


def _require_no_files(*files: Path | None) -> None:
    if any(files):
        raise ConfigError("--insecure: uses no certificates; leave it out or leave them out")


def _warn_insecure(consequence: str) -> None:
    text = f"--insecure: nothing is encrypted; {consequence}"
    warnings.warn(text, FedoptWarning, stacklevel=2)


def _ids(client_id: str | None, client_ids: str | None) -> list[int | str]:
    text = client_id if client_id is not None else client_ids
    if text is None or (client_id is not None and client_ids is not None):
        raise ConfigError("--client-id or --client-ids: give one of the two")
    from ..config.client_ids import parse_ids

    option = "--client-id" if client_id is not None else "--client-ids"
    try:
        ids = parse_ids(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    if client_id is not None and len(ids) > 1:
        raise ConfigError(f"--client-id: got {client_id!r}; several clients go with --client-ids")
    return ids


def _say(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the clients stay
        mute()

"""`fedopt certs`: certificates for a federation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

certs = typer.Typer(help="Make certificates for a federation.", no_args_is_help=True)

Days = Annotated[int, typer.Option(min=1, help="For how long certificates are valid.")]
Directory = Annotated[Path, typer.Option(help="Where ca.pem and ca.key lie.")]


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

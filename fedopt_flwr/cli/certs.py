"""`fedopt certs`: certificates for a federation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

certs = typer.Typer(help="Make certificates for a federation.", no_args_is_help=True)

Days = Annotated[
    int, typer.Option(min=1, max=3650, help="For how long certificates, but the CA's, are valid.")
]
Hosts = Annotated[
    list[str] | None, typer.Option(help="A name or IP address of the server; repeatable.")
]
_THIS_MACHINE = ["localhost", "127.0.0.1"]
Directory = Annotated[Path, typer.Option(help="Where ca.pem and ca.key lie.")]


@certs.command("init")
def certs_init(
    host: Hosts = None,
    directory: Directory = Path("certs"),
    days: Days = 365,
) -> None:
    """Make a CA, and the server's certificate for the given hosts."""
    from ..deployment.certificates import create_authority

    for path in create_authority(directory, host or _THIS_MACHINE, days):
        print(path)


@certs.command("server")
def certs_server(
    host: Hosts = None, directory: Directory = Path("certs"), days: Days = 365
) -> None:
    """Make one more pair for the server, under the same CA: for other hosts, or a later end."""
    from ..deployment.certificates import create_server

    for path in create_server(directory, host or _THIS_MACHINE, days):
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


@certs.command("revoke")
def certs_revoke(
    name: Annotated[
        list[str] | None,
        typer.Argument(help="Of clients with a certificate in the directory, or paths of .pem."),
    ] = None,
    directory: Directory = Path("certs"),
) -> None:
    """End client certificates before their time: `fedopt server --revoked` reads the list.

    Without a name, writes the list as it is, which is empty at first.
    """
    from ..deployment.revocations import revoke

    print(revoke(directory, name or []))


@certs.command("show")
def certs_show(
    path: Annotated[Path, typer.Argument(help="A certificate, or a folder of some.")] = Path(
        "certs"
    ),
) -> None:
    """Show file, kind, names, dates, state and serial number of certificates."""
    from ..deployment.revocations import certificates_at

    rows = certificates_at(path)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )

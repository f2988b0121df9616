"""`fedopt watch`: the page of a run at work, in a browser, renewed round by round."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..errors import FedoptWarning
from .console import Debug
from .options import require_address
from .report import needing_extra


def watch(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run or comparison, also at work.")
    ],
    address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to serve it; port 0: any free one.")
    ] = "127.0.0.1:8050",
    debug: Debug = False,
) -> None:
    """Serve the page of `fedopt report` for a run at work; it follows the run until Ctrl-C.

    Whoever reaches the address can read the run, and nobody can change it.
    """
    require_address("--address", address, lowest_port=0)
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    with needing_extra("fedopt watch"):
        from ..run.report.watching import is_loopback, serve

    if not is_loopback(host):
        warnings.warn(
            f"--address: anyone who reaches {address} can read this run, in plain text; for a "
            "reader of your own leave it out and use a tunnel",
            FedoptWarning,
            stacklevel=2,
        )
    serve([run], host, int(port), partial(_tell, run, host, is_local=is_loopback(host)))


def _tell(run: Path, host: str, port: int, *, is_local: bool) -> None:
    shown = f"[{host}]" if ":" in host else host
    print(f"{run} at http://{shown}:{port}/ until Ctrl-C", flush=True)
    if is_local:
        tunnel = f"ssh -L {port}:{shown}:{port} THIS_MACHINE"
        print(f"from another machine: {tunnel}, then http://localhost:{port}/ there", flush=True)

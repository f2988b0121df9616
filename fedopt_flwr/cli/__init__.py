"""The `fedopt` command: a file for each verb, of the same name.

Heavy packages are imported by the command that needs them.
"""

from __future__ import annotations

import logging
import os
import sys

import typer
from rich.markup import escape

from ..errors import FedoptError
from .algorithms import algorithms
from .certs import certs
from .client import client
from .compare import compare
from .console import (
    LOG,
    errors_console,
    mute,
    spell_what_cannot_be_shown,
    warnings_as_lines,
)
from .doctor import doctor
from .environment import EnvironmentCommand
from .launch import launch
from .partition import partition
from .plot import plot
from .report import report
from .reproduce import reproduce
from .server import server
from .simulate import simulate
from .status import status
from .verify import verify
from .watch import watch

app = typer.Typer(
    help="Federated optimisation on Flower.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(cls=EnvironmentCommand)(server)
app.command(cls=EnvironmentCommand)(client)
for verb in (
    launch,
    status,
    simulate,
    compare,
    plot,
    report,
    watch,
    reproduce,
    algorithms,
    verify,
    partition,
    doctor,
):
    app.command()(verb)
app.add_typer(certs, name="certs")


def main() -> None:
    """Run the command: code 2 for bad input, 1 for a failed run, a traceback only for --debug."""
    spell_what_cannot_be_shown()
    LOG.addHandler(logging.NullHandler())  # else Python shows warnings of the log
    LOG.propagate = False
    # gRPC would write a line for each stranger's failed handshake; clients hear why theirs failed
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        with warnings_as_lines():
            app()
    except BrokenPipeError:
        mute()
        sys.exit(1)
    except (FedoptError, OSError) as error:
        LOG.debug("the command failed", exc_info=error)
        for line in str(error).splitlines():
            errors_console().print(f"[bold red]error:[/] {escape(line)}", soft_wrap=True)
        sys.exit(getattr(error, "exit_code", 1))

"""The verbs of `fedopt`: a file for each, of the same name."""

from __future__ import annotations

import typer

from .algorithms import list_algorithms
from .certs import certs
from .client import client
from .compare import compare
from .doctor import doctor
from .launch import launch
from .partition import partition
from .server import server
from .simulate import simulate
from .verify import verify

app = typer.Typer(
    help="Federated optimisation on Flower.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(server)
app.command()(client)
app.command()(launch)
app.add_typer(certs, name="certs")
app.command()(simulate)
app.command()(compare)
app.command("algorithms")(list_algorithms)
app.command()(verify)
app.command()(partition)
app.command()(doctor)

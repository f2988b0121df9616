"""Flower's own runtimes: a ServerApp's loop over a grid, and a ClientApp."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from ..errors import EndOfRun
from ..flower import FederatedClient, FederatedStrategy
from ..flower.message_client import answer
from ..flower.message_strategy import OverMessages
from ..flower.threads import intra_op_threads


def make_client_app(client_for: Callable[[Context], FederatedClient]) -> ClientApp:
    """Return a ClientApp; `client_for` is called for every message, with that node's context."""
    app = ClientApp()
    for kind in (app.query, app.train, app.evaluate):
        kind()(lambda message, context: answer(message, client_for(context)))
    return app


def run_on_grid(
    strategy: FederatedStrategy,
    grid: Grid,
    *,
    num_rounds: int,
    round_timeout: float | None,
    threads: int,
) -> None:
    """Run Flower's loop over the nodes of a grid, all of them asked at the same time."""
    with intra_op_threads(threads), contextlib.suppress(EndOfRun):
        OverMessages(strategy).run(grid, num_rounds, round_timeout)

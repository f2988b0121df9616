"""Flower's own runtimes: a ServerApp's loop over a grid, and a ClientApp."""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import Context
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.server import ServerConfig, SimpleClientManager
from flwr.server.compat import start_grid
from flwr.serverapp import Grid

from ..flower import FederatedStrategy
from .common import LeanServer, intra_op_threads


def make_client_app(client_for: Callable[[Context], NumPyClient]) -> ClientApp:
    """Return a ClientApp; `client_for` is called for every message, with that node's context."""
    return ClientApp(client_fn=lambda context: client_for(context).to_client())


def run_on_grid(
    strategy: FederatedStrategy,
    grid: Grid,
    *,
    num_clients: int,
    num_rounds: int,
    round_timeout: float | None,
    threads: int,
) -> None:
    """Run Flower's loop over the nodes of a grid, all of them asked at the same time."""
    server = LeanServer(client_manager=SimpleClientManager(), strategy=strategy)
    server.set_max_workers(num_clients)
    with intra_op_threads(threads):
        start_grid(grid=grid, server=server, config=ServerConfig(num_rounds, round_timeout))

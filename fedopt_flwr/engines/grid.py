"""Flower's own runtimes: ServerApp and ClientApp, on Ray in this process or on a SuperLink."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from flwr.app import Context
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.server import ServerConfig, SimpleClientManager
from flwr.server.compat import start_grid
from flwr.serverapp import Grid, ServerApp

from ..errors import RunError
from ..flower import FederatedStrategy
from .common import LeanServer, intra_op_threads, quiet

_QUIET_RAY: dict[str, Any] = {
    "include_dashboard": False,
    "log_to_driver": False,
    "logging_level": logging.ERROR,
}


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


def run_on_ray(
    main: Callable[[Grid, Context], None],
    client_for: Callable[[Context], NumPyClient],
    *,
    num_clients: int,
    cpus_per_client: float,
    gpus_per_client: float,
    on_crash: Callable[[], None] = lambda: None,
) -> None:
    """Run a ServerApp with `main` and a ClientApp with `client_for` on Flower's simulation.

    What `main` raises is raised here: Flower would only log it. `client_for` is pickled for Ray's
    processes. Where the simulation itself fails, `on_crash` has to end `main`, which Flower leaves
    waiting in a thread; then RunError says why.
    """
    from flwr.simulation import run_simulation

    errors: list[BaseException] = []
    server_app = ServerApp()

    @server_app.main()
    def guarded(grid: Grid, context: Context) -> None:
        try:
            main(grid, context)
        except BaseException as error:
            errors.append(error)

    try:
        with quiet(logging.CRITICAL):
            run_simulation(
                server_app=server_app,
                client_app=make_client_app(client_for),
                num_supernodes=num_clients,
                backend_config={
                    "client_resources": {"num_cpus": cpus_per_client, "num_gpus": gpus_per_client},
                    "init_args": _QUIET_RAY,
                },
            )
    except RuntimeError as error:
        on_crash()
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        text = f"{type(first).__name__}: {first}"
        raise RunError(f"--engine ray: Flower's simulation ended: {text}") from error
    if errors:
        raise errors[0]

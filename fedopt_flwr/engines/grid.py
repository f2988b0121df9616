"""Flower's own runtimes: ServerApp and ClientApp, on Ray in this process or on a SuperLink."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from ..errors import EndOfRun, RunError
from ..flower import FederatedClient, FederatedStrategy
from ..flower.message_client import answer
from ..flower.message_strategy import OverMessages
from .common import intra_op_threads, quiet

_QUIET_RAY: dict[str, Any] = {
    "include_dashboard": False,
    "log_to_driver": False,
    "logging_level": logging.ERROR,
}


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


def run_on_ray(
    main: Callable[[Grid, Context], None],
    client_for: Callable[[Context], FederatedClient],
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

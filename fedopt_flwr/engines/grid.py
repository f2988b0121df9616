"""Flower's own runtimes: ServerApp and ClientApp, on Ray in this process or on a SuperLink."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from flwr.app import Context
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.server import ServerConfig, SimpleClientManager
from flwr.server.compat import start_grid
from flwr.serverapp import Grid, ServerApp

from ..errors import RunError
from ..flower import FederatedStrategy
from ..flower.messages import Scalar
from .answering import Answering
from .lean import LeanServer


class _Adapter(NumPyClient):
    """Makes Flower's client from what answers."""

    def __init__(self, inner: Answering) -> None:
        self._inner = inner

    def get_properties(self, config: dict[str, Scalar]) -> dict[str, Scalar]:
        return self._inner.get_properties(config)

    def fit(
        self, parameters: list[np.ndarray], config: dict[str, Scalar]
    ) -> tuple[list[np.ndarray], int, dict[str, Scalar]]:
        return self._inner.fit(parameters, config)


def make_client_app(client_for: Callable[[Context], Answering]) -> ClientApp:
    """Return a ClientApp; `client_for` is called for every message, with that node's context."""
    return ClientApp(client_fn=lambda context: _Adapter(client_for(context)).to_client())


def make_server_app(main: Callable[[Grid, Context], None]) -> ServerApp:
    """Return a ServerApp that runs `main`."""
    app = ServerApp()
    app.main()(main)
    return app


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
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        start_grid(grid=grid, server=server, config=ServerConfig(num_rounds, round_timeout))
    finally:
        torch.set_num_threads(threads_before)


def run_on_ray(
    main: Callable[[Grid, Context], None],
    client_for: Callable[[Context], Answering],
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

    def guarded(grid: Grid, context: Context) -> None:
        try:
            main(grid, context)
        except BaseException as error:
            errors.append(error)

    backend: Any = {
        "client_resources": {"num_cpus": cpus_per_client, "num_gpus": gpus_per_client},
        "init_args": {
            "include_dashboard": False,
            "log_to_driver": False,
            "logging_level": logging.ERROR,
        },
    }
    flower_log, level = logging.getLogger("flwr"), logging.getLogger("flwr").level
    flower_log.setLevel(logging.CRITICAL)
    try:
        run_simulation(
            server_app=make_server_app(guarded),
            client_app=make_client_app(client_for),
            num_supernodes=num_clients,
            backend_config=backend,
        )
    except RuntimeError as error:
        on_crash()
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        text = f"{type(first).__name__}: {first}"
        raise RunError(f"--engine ray: Flower's simulation ended: {text}") from error
    finally:
        flower_log.setLevel(level)
    if errors:
        raise errors[0]

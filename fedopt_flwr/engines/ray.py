"""Flower's simulation on Ray, whose processes are those of this machine or of a whole cluster."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from ..errors import ConfigError, RunError
from ..flower import FederatedClient
from .common import quiet
from .grid import make_client_app
from .ray_cluster import Cluster, connected

_QUIET_RAY: dict[str, Any] = {
    # a cluster counts only where it is named: by itself Ray takes one that runs on this machine
    "address": "local",
    "include_dashboard": False,
    "log_to_driver": False,
    "logging_level": logging.ERROR,
}


def run_on_ray(
    main: Callable[[Grid, Context], None],
    client_for: Callable[[Context], FederatedClient],
    *,
    num_clients: int,
    cpus_per_client: float,
    gpus_per_client: float,
    cluster: Cluster | None = None,
) -> None:
    """Run a ServerApp with `main` and a ClientApp with `client_for` on Flower's simulation.

    What `main` raises is raised here: Flower would only log it. `client_for` is pickled for Ray's
    processes. Where the simulation itself fails, RunError says why. Without `cluster` Ray starts on
    this machine and ends with the run; a cluster stays as it was.
    """
    if cpus_per_client <= 0:
        raise ConfigError(
            f"--cpus-per-client: got {cpus_per_client}; must be > 0, as that says how many clients "
            "train at the same time; give parts of a CPU, as 0.5, for more"
        )
    resources = {"num_cpus": cpus_per_client, "num_gpus": gpus_per_client}
    errors: list[BaseException] = []
    is_over = threading.Event()  # or stopped: Flower leaves `main` waiting in a thread for ever
    server_app = ServerApp()

    @server_app.main()
    def guarded(grid: Grid, context: Context) -> None:
        for name in ("pull_messages", "get_node_ids"):  # one of them is called all the time
            setattr(grid, name, _until(is_over, getattr(grid, name)))
        try:
            main(grid, context)
        except BaseException as error:
            errors.append(error)

    with connected(cluster, resources) if cluster else contextlib.nullcontext():
        try:
            _simulate(server_app, client_for, num_clients, resources)
        except RuntimeError as error:
            first: BaseException = error
            while first.__cause__ is not None:
                first = first.__cause__
            text = f"{type(first).__name__}: {first}"
            raise RunError(f"--engine ray: Flower's simulation ended: {text}") from error
        finally:
            is_over.set()
    if errors:
        raise errors[0]


def _until(is_over: threading.Event, call: Callable[..., Any]) -> Callable[..., Any]:
    def call_or_stop(*arguments: Any) -> Any:
        if is_over.is_set():
            raise KeyboardInterrupt  # which no failure of a client is taken for
        return call(*arguments)

    return call_or_stop


def _simulate(
    server_app: ServerApp,
    client_for: Callable[[Context], FederatedClient],
    num_clients: int,
    resources: dict[str, Any],
) -> None:
    from flwr.simulation import run_simulation

    try:
        from .ray_actors import replacing_lost_actors
    except ImportError as error:
        raise RuntimeError from error
    with quiet(logging.CRITICAL), replacing_lost_actors():
        run_simulation(
            server_app=server_app,
            client_app=make_client_app(client_for),
            num_supernodes=num_clients,
            # Flower takes Ray as it is where this process is connected already
            backend_config={"client_resources": resources, "init_args": _QUIET_RAY},
        )

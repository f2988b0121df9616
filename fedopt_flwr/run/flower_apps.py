"""Runs under Flower's own runtimes: what a ServerApp and a ClientApp of this package do."""

from __future__ import annotations

import json
import tomllib
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from ..algorithm import ClientId
from ..config.client_ids import parse_ids
from ..config.run_config import RunConfig
from ..data import load_test_data
from ..engines.grid import run_on_grid
from ..engines.ray import run_on_ray
from ..engines.ray_cluster import Cluster
from ..errors import ConfigError, FedoptError, FedoptWarning
from ..flower import ClientStates, ContextStates
from ..models import find_model
from ..models.weights import weights_digest
from ..problems import collected, raise_together
from ..training.evaluation import named_loss, named_metric
from .experiment import Experiment
from .hosts import ClientHost, HostedClient, states_in
from .result import Result
from .run import Listener, Run

# Keys of Flower's run config, beside `algorithm-options` and `config-file`. pyproject.toml declares
# all of them, with the defaults of these places
_PLACES = {
    "algorithm": "algorithm.name",
    "num-clients": "federation.num_clients",
    "clients-per-round": "federation.clients_per_round",
    "num-rounds": "federation.num_rounds",
    "seed": "federation.seed",
    "local-steps": "training.local_steps",
    "batch-size": "training.batch_size",
    "data": "data.name",
    "model": "model.name",
    "output-directory": "output.directory",
}


def read_run_config(run_config: Mapping[str, Any]) -> RunConfig:
    """Return the configuration that Flower's run config asks for.

    With `config-file`, that file counts; a key beside it counts where it differs from its default.
    `algorithm-options` is a TOML fragment: `momentum = 0.5, normalize = false`.
    """
    path = str(run_config.get("config-file", "")) or None
    defaults = RunConfig().to_dict()
    values = {}
    for key, place in _PLACES.items():
        section, _, name = place.partition(".")
        if run_config.get(key, "") not in ("", defaults[section].get(name)):
            values[place] = run_config[key]
    options = _read_options(str(run_config.get("algorithm-options", "")))
    values |= {f"algorithm.{name}": value for name, value in options.items()}
    return RunConfig.from_file(path, values=values)


def _read_options(fragment: str) -> dict[str, Any]:
    try:
        if "\n" in fragment:
            return tomllib.loads(fragment)
        options: dict[str, Any] = tomllib.loads(f"options = {{{fragment}}}")["options"]
        return options
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"algorithm-options: got {fragment!r}, which is not TOML: {error}; write it as "
            "'momentum = 0.5, normalize = false'"
        ) from None


def serve_on_grid(config: RunConfig, listener: Listener, grid: Any) -> Result:
    """Run a federation over the nodes of Flower's grid and write its files."""
    experiment = Experiment(config, data=load_test_data(config))
    run = Run(experiment, listener, None)
    with run.recording():
        run_on_grid(
            run.strategy,
            grid,
            num_rounds=run.num_rounds,
            round_timeout=config.federation.timeout_seconds,
            threads=config.training.threads,
        )
        return run.finish()


def client_of_node(config: RunConfig, context: Any) -> HostedClient:
    """Return the client that a node is.

    Its id is `client-id` of the node config, else `partition-id`, which simulations give. Its state
    lies in `context.state`, or with `state-dir` in the node config on disk; where that is lost it
    fails, or with `state-lost = "restart"` begins anew in open federations.
    """
    node = context.node_config
    named = node.get("client-id", node.get("partition-id"))
    if named is None:
        raise ConfigError(
            "node config: has no client-id; start the SuperNode with "
            '--node-config "client-id=0" (0 to N-1, each its own)'
        )
    client_id = named if isinstance(named, int) else parse_ids(str(named))[0]
    directory = node.get("state-dir")
    states: Callable[[str], ClientStates] = (
        partial(ContextStates, context.state) if directory is None else states_in(Path(directory))
    )
    simulated = "client-id" not in node
    number = config.federation.fixed_number("a simulation") if simulated else 0
    ids = tuple(range(number)) if simulated else (client_id,)
    host = _host(json.dumps(config.to_dict()), config.import_folders[0], ids)
    state_lost = node.get("state-lost", "fail")
    if state_lost not in ("fail", "restart"):
        raise ConfigError(
            f"node config: state-lost: got {state_lost!r}; must be 'fail' or 'restart'"
        )
    return HostedClient(client_id, host, states, restarts=state_lost == "restart")


@lru_cache(maxsize=1)
def _host(config: str, folder: Path, client_ids: tuple[ClientId, ...]) -> ClientHost:
    """One host for all messages of a process: data and model are made once."""
    return ClientHost(RunConfig(**json.loads(config)).looking_in(folder), client_ids)


def simulate_on_ray(
    config: RunConfig,
    listener: Listener,
    *,
    cpus_per_client: float,
    gpus_per_client: float,
    ray_address: str | None = None,
) -> Result:
    """Run a federation on Flower's simulation with Ray, one virtual node a client.

    `ray_address` is HOST:PORT of a cluster of which this machine is one; None starts Ray here. Own
    code travels there with its folder; data does not, each machine reads its own.
    """
    results: list[Result] = []
    if config.output.checkpoint_every and config.make_rule().client_state:
        warnings.warn(
            "output.checkpoint_every: a run with this rule and --engine ray cannot be resumed, as "
            "what clients keep ends with Ray's processes; leave it out, or run without Ray",
            FedoptWarning,
            stacklevel=2,
        )
    # pickled for processes that may run in another folder: in that of a cluster's copy
    folder = None if ray_address else config.import_folders[0]
    own = RunConfig(**config.to_dict()).looking_in(folder)
    number = config.federation.fixed_number("a simulation")
    cluster = None
    if ray_address is not None:
        cluster = Cluster(
            ray_address,
            folder=config.import_folders[0] if config.names_own_code else None,
            check=partial(_require_what_a_client_needs, own),
            patience_seconds=config.federation.start_timeout,
        )

    def main(grid: Any, context: Any) -> None:
        results.append(serve_on_grid(config, listener, grid))

    run_on_ray(
        main,
        partial(client_of_node, own),
        num_clients=number,
        cpus_per_client=cpus_per_client,
        gpus_per_client=gpus_per_client,
        cluster=cluster,
    )
    return results[0]


def _require_what_a_client_needs(config: RunConfig) -> None:
    """Load what a client has of its machine: own code, device, weights and data."""
    errors: list[FedoptError] = []
    folders = config.import_folders
    with collected(errors):
        ClientHost(config, [0]).data(0, {})
    with collected(errors):
        find_model(config.model.name, folders)
    with collected(errors):
        named_loss(config.model.loss, folders)
    with collected(errors):
        for name in config.evaluation.metrics:
            named_metric(name, folders, "evaluation.metrics")
    with collected(errors):
        if config.model.weights is not None:
            weights_digest(config.model.weights)
    raise_together(errors)

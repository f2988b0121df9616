"""Flower's own FedAvg and a plain NumPyClient on Ray, written as its tutorials write them."""

from __future__ import annotations

import json
import logging
import time
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation
from torch.nn import functional

from fedopt_flwr import RunConfig
from fedopt_flwr.experiment import Experiment

RESOURCES = {"num_cpus": 1, "num_gpus": 0.0}


@lru_cache(maxsize=1)
def experiment_of(config: str) -> Experiment:
    """Data and model of a configuration, made once in each of Ray's processes."""
    return Experiment(RunConfig(**json.loads(config)))


class PlainClient(NumPyClient):
    """Local SGD on one client's data."""

    def __init__(self, config: str, client: int) -> None:
        self._experiment = experiment_of(config)
        self._data = self._experiment.data.clients[client]
        self._module = self._experiment.model.module

    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        torch.set_num_threads(1)
        training, count = self._experiment.config.training, self._data.num_examples
        with torch.no_grad():
            for parameter, value in zip(self._module.parameters(), parameters, strict=True):
                parameter.copy_(torch.from_numpy(value))
        optimizer = torch.optim.SGD(self._module.parameters(), lr=0.05)
        wanted = training.local_steps * training.batch_size
        order = torch.cat([torch.randperm(count) for _ in range(-(-wanted // count))])[:wanted]
        batches = list(order.split(training.batch_size))
        for inputs, targets in self._data.batches(batches, torch.device("cpu")):
            optimizer.zero_grad()
            functional.cross_entropy(self._module(inputs), targets).backward()
            optimizer.step()
        return [p.detach().numpy() for p in self._module.parameters()], count, {}


def run_stock(config: RunConfig) -> tuple[float, list[float]]:
    """Return the seconds until the end of round 1, and those of every later round."""
    text, federation = json.dumps(config.to_dict()), config.federation
    ends: list[float] = []

    def note(server_round: int, arrays: Any, settings: Any) -> None:
        ends.append(time.perf_counter())  # round 0 is before the first

    def server_fn(context: Any) -> ServerAppComponents:
        share = federation.clients_per_round / federation.num_clients
        initial = [p.detach().numpy() for p in experiment_of(text).model.module.parameters()]
        strategy = FedAvg(
            fraction_fit=share,
            fraction_evaluate=0.0,
            min_fit_clients=federation.clients_per_round,
            min_available_clients=federation.num_clients,
            initial_parameters=ndarrays_to_parameters(initial),
            evaluate_fn=note,
        )
        rounds = ServerConfig(num_rounds=federation.num_rounds)
        return ServerAppComponents(strategy=strategy, config=rounds)

    def client_fn(context: Any) -> Any:
        return PlainClient(text, int(context.node_config["partition-id"])).to_client()

    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    started = time.perf_counter()
    run_simulation(
        server_app=ServerApp(server_fn=server_fn),
        client_app=ClientApp(client_fn=client_fn),
        num_supernodes=federation.num_clients,
        backend_config={
            "client_resources": RESOURCES,
            "init_args": {"log_to_driver": False, "logging_level": logging.ERROR},
        },
    )
    seconds = [b - a for a, b in pairwise(ends)]
    return ends[1] - started, seconds[1:]

"""Flower's own FedAvg and a plain NumPyClient on Ray, written as its tutorials write them."""

from __future__ import annotations

import json
import logging
import time
from functools import lru_cache
from itertools import cycle, islice, pairwise
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
from torch.utils.data import DataLoader, TensorDataset

from fedopt_flwr import RunConfig
from fedopt_flwr.models import networks
from fedopt_flwr.run.experiment import Experiment


@lru_cache(maxsize=1)
def experiment_of(config: str) -> Experiment:
    """Data and model of a configuration, made once in each of Ray's processes."""
    return Experiment(RunConfig(**json.loads(config)))


class PlainClient(NumPyClient):
    """Local SGD on one client's data: a module, a loader and an optimizer of its own."""

    def __init__(self, config: str, client: int) -> None:
        experiment = experiment_of(config)
        data, self._training = experiment.data, experiment.config.training
        everything = torch.arange(data.clients[client].num_examples)
        tensors = next(iter(data.clients[client].batches([everything], torch.device("cpu"))))
        self._loader = DataLoader(
            TensorDataset(*tensors), batch_size=self._training.batch_size, shuffle=True
        )
        make = getattr(networks, experiment.config.model.name)
        self._net = make(data.input_shape, data.num_classes)

    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        names = self._net.state_dict()
        self._net.load_state_dict(
            {name: torch.from_numpy(value) for name, value in zip(names, parameters, strict=True)}
        )
        optimizer = torch.optim.SGD(self._net.parameters(), lr=0.05)
        for inputs, targets in islice(cycle(self._loader), self._training.local_steps):
            optimizer.zero_grad()
            functional.cross_entropy(self._net(inputs), targets).backward()
            optimizer.step()
        arrays = [value.numpy() for value in self._net.state_dict().values()]
        return arrays, len(self._loader.dataset), {}


def run_stock(config: RunConfig, cpus_per_client: int) -> tuple[float, list[float]]:
    """Return the seconds until the end of round 1, and those of every later round.

    Ray gives torch as many threads as a client has CPUs.
    """
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
            "client_resources": {"num_cpus": cpus_per_client, "num_gpus": 0.0},
            "init_args": {"log_to_driver": False, "logging_level": logging.ERROR},
        },
    )
    seconds = [b - a for a, b in pairwise(ends)]
    return ends[1] - started, seconds[1:]

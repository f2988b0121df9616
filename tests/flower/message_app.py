"""An app of Flower's Message API that runs rules one after another and keeps what they end with.

Its run config, or the variables RULES and RESULTS where a script simulates it, says which rules and
where to.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from torch import nn
from torch.utils.data import TensorDataset

from fedopt_flwr import clientapp, serverapp

SIZES = {"num_clients": 3, "clients_per_round": 2, "local_steps": 3, "batch_size": 8}
ROUNDS = 2
server_app = ServerApp()
client_app = ClientApp()
generator = torch.Generator().manual_seed(0)
x, y = torch.randn(60, 4, generator=generator), torch.arange(60) % 3


def make_model() -> nn.Module:
    model = nn.Linear(4, 3)
    values = torch.linspace(-0.5, 0.5, 15)
    nn.utils.vector_to_parameters(values, model.parameters())
    return model


def data(i: int) -> TensorDataset:
    return TensorDataset(x[i::3], y[i::3])


def own_data(context: Any) -> TensorDataset:
    node = context.node_config
    return data(int(node.get("client-id", node.get("partition-id", -1))))


@client_app.query()
def query(message: Message, context: Any) -> Message:
    return clientapp.query(message, context, dataset=own_data(context))


@client_app.train()
def train(message: Message, context: Any) -> Message:
    own: dict[str, Any] = {"model": make_model(), "dataset": own_data(context), "device": "cpu"}
    return clientapp.train(message, context, **own)


@server_app.main()
def main(grid: Any, context: Any) -> None:
    rules = str(context.run_config.get("rules") or os.environ["RULES"])
    results = str(context.run_config.get("results") or os.environ["RESULTS"])
    found = {}
    for name in rules.split(","):
        strategy = getattr(serverapp, name)(make_model(), **SIZES)
        start = ArrayRecord(make_model().state_dict())
        result = strategy.start(grid, start, num_rounds=ROUNDS)
        found[name] = [array.tobytes().hex() for array in result.arrays.to_numpy_ndarrays()]
    Path(results).write_text(json.dumps(found))

"""AutoFed in an app of Flower's Message API: your module, your data, your evaluation."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from fedopt_flwr.clientapp import query as fedopt_query
from fedopt_flwr.clientapp import train as fedopt_train
from fedopt_flwr.serverapp import AutoFed

CLIENTS, ROUNDS = 5, 20
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
server_app = ServerApp()
client_app = ClientApp()


def data(context):
    own = slice(context.node_config["partition-id"], 1500, CLIENTS)
    return TensorDataset(x[own], y[own])


def evaluate(server_round, arrays):
    model.load_state_dict(arrays.to_torch_state_dict())
    accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
    loss = nn.functional.cross_entropy(model(x[1500:]), y[1500:]).item()
    return MetricRecord({"loss": loss, "accuracy": accuracy})


@server_app.main()
def main(grid, context):
    strategy = AutoFed(model, num_clients=CLIENTS, clients_per_round=3)
    arrays = ArrayRecord(model.state_dict())
    strategy.start(grid, arrays, num_rounds=ROUNDS, evaluate_fn=evaluate)


@client_app.query()
def query(message, context):
    return fedopt_query(message, context, dataset=data(context))


@client_app.train()
def train(message, context):
    return fedopt_train(message, context, model=model, dataset=data(context))

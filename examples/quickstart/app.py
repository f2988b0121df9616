"""AutoFed in a Flower app of your own: your module, your data, your evaluation."""

from __future__ import annotations

import torch
from flwr.clientapp import ClientApp
from flwr.server import ServerAppComponents, ServerConfig
from flwr.serverapp import ServerApp
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from fedopt_flwr.clients import AutoFedClient
from fedopt_flwr.strategies import AutoFed

CLIENTS, ROUNDS = 5, 20
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def evaluate(server_round, arrays, config):
    state = zip(model.state_dict(), map(torch.tensor, arrays), strict=True)
    model.load_state_dict(dict(state))
    accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
    return nn.functional.cross_entropy(model(x[1500:]), y[1500:]).item(), {"accuracy": accuracy}


def server_fn(context):
    strategy = AutoFed(
        model, num_clients=CLIENTS, clients_per_round=3, num_rounds=ROUNDS, evaluate_fn=evaluate
    )
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=ROUNDS))


def client_fn(context):
    own = slice(context.node_config["partition-id"], 1500, CLIENTS)
    return AutoFedClient(model, TensorDataset(x[own], y[own]), context=context).to_client()


server_app, client_app = ServerApp(server_fn=server_fn), ClientApp(client_fn=client_fn)

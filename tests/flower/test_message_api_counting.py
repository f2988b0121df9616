"""Which replies count in Flower's Message API, how many are needed and with which weight."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message
from flwr.clientapp import ClientApp
from helpers import as_datasets, linear_model, softmax_clients, softmax_gradient
from rooms import Room

from fedopt_flwr import clientapp, serverapp

CLIENTS = softmax_clients([9, 14, 6])
DATA = as_datasets(CLIENTS)
SIZES: dict[str, Any] = {"num_clients": 3, "clients_per_round": 3, "local_steps": 1}
app = ClientApp()


@app.query()
def query(message: Message, context: Any) -> Message:
    return clientapp.query(message, context, dataset=DATA[context.node_config["partition-id"]])


@app.train()
def train(message: Message, context: Any) -> Message:
    own = DATA[context.node_config["partition-id"]]
    model = linear_model()
    return clientapp.train(message, context, model=model, dataset=own, device="cpu")


def vector(arrays: ArrayRecord) -> np.ndarray:
    return np.concatenate([array.ravel() for array in arrays.to_numpy_ndarrays()])


def start(strategy: serverapp.Strategy, room: Room, rounds: int, **options: Any) -> np.ndarray:
    arrays = ArrayRecord(linear_model().state_dict())
    return vector(strategy.start(room, arrays, num_rounds=rounds, **options).arrays)


@pytest.mark.parametrize(
    ("weighting", "weights"), [("examples", [9 / 29, 14 / 29, 6 / 29]), ("uniform", [1 / 3] * 3)]
)
def test_replies_count_with_the_weight_that_is_configured(
    weighting: str, weights: list[float]
) -> None:
    """One step of each client on all its data: x - eta sum_i p_i grad f_i(x)."""
    strategy = serverapp.FedAvg(
        linear_model(), **SIZES, batch_size=0, weighting=weighting, client_learning_rate=0.5
    )
    found = start(strategy, Room(app), 1)
    x = vector(ArrayRecord(linear_model().state_dict()))
    gradients = [softmax_gradient(x, *own) for own in CLIENTS]
    mean = sum(p * gradient for p, gradient in zip(weights, gradients, strict=True))
    np.testing.assert_allclose(found, x - 0.5 * mean, atol=1e-6)


@pytest.mark.parametrize("min_replies", [2, 3])
def test_a_round_with_too_few_replies_changes_nothing(min_replies: int) -> None:
    room = Room(app)

    def on_round(record: Any) -> None:
        room.lost = {101} if record.round == 1 else set()

    seen: list[np.ndarray] = []
    strategy = serverapp.FedAvg(linear_model(), **SIZES, min_replies=min_replies, on_round=on_round)
    start(strategy, room, 3, evaluate_fn=lambda _, arrays: seen.append(vector(arrays)))
    assert [np.array_equal(a, b) for a, b in itertools.pairwise(seen)] == [
        False,
        min_replies == 3,
        False,
    ]
    second = strategy.rounds[1]
    assert second.clients == ([] if min_replies == 3 else [0, 2])
    assert second.failures == (3 if min_replies == 3 else 1)
    assert ("min_replies is 3" in str(second.errors)) == (min_replies == 3)

"""Batch norm and batches of one example: tried, trained and evaluated by running statistics."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import CLASSES, FEATURES, as_datasets, small_config, softmax_clients
from streams import ServerThread, hosted_clients
from torch import nn
from torch.nn import functional

from fedopt_flwr import simulate
from fedopt_flwr.data import as_client_data
from fedopt_flwr.training.dry_run import try_training
from fedopt_flwr.training.evaluation import evaluate
from fedopt_flwr.training.flat_model import FlatModel

SIZES = [5, 7, 1]


def flat() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES))


def pooled() -> nn.Module:
    """Batch norm of one value a channel behind a pooling, as image models have it."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)),
        nn.Conv2d(1, 4, 1),
        nn.BatchNorm2d(4),
        nn.AdaptiveAvgPool2d(1),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(4, CLASSES),
    )


@pytest.mark.parametrize("model", [flat, pooled])
@pytest.mark.parametrize("buffers", ["average", "local"])
@pytest.mark.parametrize(
    ("sizes", "training"),
    [
        ([1, 1, 1], {"local_steps": 2}),
        ([9, 9, 9], {"local_steps": 2, "batch_size": 1}),
        ([9, 4, 1], {"local_epochs": 1, "batch_size": 8}),
        ([3, 3, 3], {"local_epochs": 2, "batch_size": 2}),
    ],
)
def test_federations_train_though_batches_are_single_examples(
    model: Any, buffers: str, sizes: list[int], training: dict[str, int]
) -> None:
    config = small_config(training=training)
    config["federation"]["buffers"] = buffers
    data = as_datasets(softmax_clients(sizes))
    result = simulate(config, model=model, client_data=data, test_data=data[2])
    assert [record.clients for record in result.rounds] == [[0, 1, 2]] * 2
    assert np.isfinite(result.summary["final_test_loss"])


def test_batches_of_one_are_normalised_by_the_running_statistics_and_leave_them() -> None:
    """A model in evaluation mode, trained by hand, ends where the federation does."""
    (data,) = as_datasets(softmax_clients([1]))
    config = small_config(1, training={"local_steps": 3})
    config["algorithm"]["client_learning_rate"] = 0.1
    result = simulate(config, model=flat, client_data=[data])
    by_hand = flat().eval()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    for _ in range(6):
        optimizer.zero_grad()
        functional.cross_entropy(by_hand(data.tensors[0]), data.tensors[1]).backward()
        optimizer.step()
    expected = torch.cat([p.detach().reshape(-1) for p in by_hand.parameters()])
    np.testing.assert_allclose(result.parameters, expected.numpy(), rtol=1e-5, atol=1e-6)
    assert torch.equal(result.model[1].running_mean, torch.zeros(4))


def test_one_test_example_is_evaluated_where_batch_statistics_count() -> None:
    (data,) = as_datasets(softmax_clients([1]))
    model, loss = FlatModel(flat()), functional.cross_entropy
    value = evaluate(model, as_client_data(data), loss, {}, use_batch_statistics=True).loss
    expected = loss(flat().eval()(data.tensors[0]), data.tensors[1])
    assert value == pytest.approx(expected.item())


def test_the_trial_of_one_example_leaves_no_trace() -> None:
    model = FlatModel(flat())
    before = {name: array.clone() for name, array in model.read_buffers().items()}
    (data,) = as_datasets(softmax_clients([1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not try_training(model, functional.cross_entropy, {0: as_client_data(data)})
    assert all(torch.equal(array, before[name]) for name, array in model.read_buffers().items())


def load(num_clients: int, seed: int) -> Any:
    data = as_datasets(softmax_clients(SIZES))
    return data, as_datasets(softmax_clients([20], seed=5))[0]


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_a_client_process_counts_where_a_simulation_counts_it(tmp_path: Path, buffers: str) -> None:
    """Client 2 holds one example and has a host of its own."""
    config = small_config(
        data={"name": f"{__name__}:load"},
        model={"name": f"{__name__}:flat"},
        training={"local_epochs": 1, "batch_size": 4, "device": "cpu"},
    )
    config["federation"]["buffers"] = buffers
    with ServerThread(config) as server:
        hosted_clients(server, [0, 1], tmp_path)
        hosted_clients(server, [2], tmp_path)
        result = server.result()
    expected = simulate(config)
    assert [record.clients for record in result.rounds] == [[0, 1, 2]] * 2
    assert result.parameters.tobytes() == expected.parameters.tobytes()
    states = result.model.state_dict(), expected.model.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])

"""Same bits, resume, files, faults of the in-process engine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    CLASSES,
    FEATURES,
    SOME_FAST,
    as_datasets,
    digits_config,
    linear_model,
    model_bytes,
    open_run,
    softmax_clients,
    softmax_gradient,
)
from torch import nn
from torch.utils.data import TensorDataset

from fedopt_flwr import ConfigError, RunConfig, simulate
from fedopt_flwr.data import as_client_data
from fedopt_flwr.errors import FedoptWarning
from fedopt_flwr.flower import FederatedClient
from fedopt_flwr.rounds.record import RoundRecord
from fedopt_flwr.run.experiment import Experiment
from fedopt_flwr.run.summary import holds_from, rounds_to_target, summarize
from fedopt_flwr.training.evaluation import evaluate
from fedopt_flwr.training.flat_model import FlatModel
from fedopt_flwr.training.metrics import accuracy
from fedopt_flwr.training.objective import ModelObjective


@pytest.mark.parametrize("name", SOME_FAST)
def test_workers_and_repetition_change_no_bit_and_another_seed_does(
    name: str, tmp_path: Path
) -> None:
    for folder, workers in (("one", 1), ("two", 2), ("three", 3)):
        simulate(digits_config(name, tmp_path / folder), workers=workers)
    other = digits_config(name, tmp_path / "other")
    other["federation"]["seed"] = 4
    simulate(other)
    assert model_bytes(tmp_path / "one") == model_bytes(tmp_path / "two")
    assert model_bytes(tmp_path / "one") == model_bytes(tmp_path / "three")
    assert model_bytes(tmp_path / "one") != model_bytes(tmp_path / "other")


def test_a_run_uses_and_leaves_no_global_random_state() -> None:
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    before = torch.get_rng_state()
    first = simulate(digits_config("scaffold_m")).parameters
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    np.testing.assert_array_equal(simulate(digits_config("scaffold_m")).parameters, first)


def test_a_run_restores_threads_and_flowers_logger() -> None:
    torch.set_num_threads(2)
    level = logging.getLogger("flwr").level
    simulate(digits_config("fedavg"))
    assert torch.get_num_threads() == 2
    assert logging.getLogger("flwr").level == level


def test_a_last_round_without_a_reply_leaves_the_servers_model_in_the_result() -> None:
    """The worker trains on the server's module, so the result must not be what it left there."""

    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = linear_model(), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += self.training
            # the probe, three rounds of four steps, then the third step of round 4
            if self.training and self.calls > 1 + 3 * 4 + 2:
                raise RuntimeError("broken")
            return self.layer(x)

    datasets = as_datasets(softmax_clients([9]))
    settings = digits_config(
        "fedavg", federation={"num_clients": 1, "clients_per_round": 1, "num_rounds": 4}
    )
    failed = simulate(settings, model=Failing, client_data=datasets, test_data=datasets[0])
    assert [r.failures for r in failed.rounds] == [0, 0, 0, 1]
    settings["federation"]["num_rounds"] = 3
    whole = simulate(settings, model=linear_model, client_data=datasets, test_data=datasets[0])
    np.testing.assert_array_equal(failed.parameters, whole.parameters)
    assert failed.rounds[-1].test_loss == whole.rounds[-1].test_loss


def test_evaluation_happens_when_it_is_due_and_always_at_the_end() -> None:
    settings = digits_config("fedavg", output={"evaluate_every": 4})
    evaluated = [r.round for r in simulate(settings).rounds if r.test_loss is not None]
    assert evaluated == [4, 8, 9]


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 32), nn.Dropout(0.5), nn.Linear(32, 10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def test_dropout_is_seeded_by_client_and_round_and_uses_one_worker() -> None:
    first = simulate(digits_config("fedavg"), model=Dropping).parameters
    torch.manual_seed(123)
    with pytest.warns(FedoptWarning, match="one worker is used"):
        second = simulate(digits_config("fedavg"), model=Dropping, workers=2).parameters
    np.testing.assert_array_equal(first, second)
    assert Experiment(RunConfig(**digits_config("fedavg")), model=Dropping).stochastic
    assert not Experiment(RunConfig(**digits_config("fedavg"))).stochastic


@pytest.mark.filterwarnings("ignore:client .*failed in .* rounds in which")
def test_an_exception_in_the_users_model_is_a_failure_of_that_client() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear_model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if float(x.abs().max()) > 1e6:
                raise RuntimeError("sensor out of range")
            return self.layer(x)

    datasets = as_datasets(softmax_clients([9, 9, 9]))
    datasets[1] = TensorDataset(torch.full((5, 4), 1e7), torch.zeros(5).long())
    settings = digits_config(
        "fedavg", federation={"num_clients": 3, "clients_per_round": 3, "num_rounds": 2}
    )
    result = simulate(settings, model=Picky, client_data=datasets)
    for record in result.rounds:
        assert (record.clients, record.failures) == ([0, 2], 1)
        (error,) = record.errors
        assert (error["client"], error["phase"]) == (1, "train")
        assert error["error"].startswith("RuntimeError: sensor out of range (")


def test_own_loss_and_metric_are_used() -> None:
    datasets = as_datasets(softmax_clients([9, 9, 9]))
    settings = digits_config(
        "fedavg", federation={"num_clients": 3, "clients_per_round": 3, "num_rounds": 2}
    )
    result = simulate(
        settings,
        model=linear_model,
        client_data=datasets,
        test_data=datasets[0],
        loss=lambda outputs, targets: outputs.square().mean(),
        metric=lambda outputs, targets: 42.0,
    )
    last = result.rounds[-1]
    assert (last.test_metric, last.test_accuracy) == (42.0, None)
    with torch.no_grad():
        expected = float(result.model(datasets[0].tensors[0]).square().mean())
    assert last.test_loss == pytest.approx(expected, rel=1e-5)


def test_train_loss_is_the_minibatch_mean_weighted_by_examples() -> None:
    """One full-batch step: the loss at the initial model, weighted by n_i."""
    data = softmax_clients([4, 12])
    settings = digits_config(
        "fedavg", federation={"num_clients": 2, "clients_per_round": 2, "num_rounds": 1}
    )
    settings["training"] = {"local_steps": 1, "batch_size": 0}
    record = simulate(settings, model=linear_model, client_data=as_datasets(data)).rounds[0]
    x, y = (torch.from_numpy(np.concatenate([d[k] for d in data])) for k in (0, 1))
    expected = nn.functional.cross_entropy(linear_model()(x), y).item()
    assert record.train_loss == pytest.approx(expected, rel=1e-5)


def test_targets_and_simulated_time_are_computed_from_the_records() -> None:
    def record(number: int, accuracy: float | None) -> RoundRecord:
        return RoundRecord(
            number,
            clients=[0, 1],
            test_loss=None if accuracy is None else 1.0,
            test_accuracy=accuracy,
            uplink_vectors=2,
            downlink_vectors=4,
            uplink_bytes=20,
            downlink_bytes=40,
            client_seconds=0.5,
        )

    accuracies = [0.2, 0.91, None, 0.85, 0.93, 0.95]
    records = [record(i + 1, a) for i, a in enumerate(accuracies)]
    assert rounds_to_target(records, 0.9) == 2
    assert holds_from(records, 0.9) == 5
    assert rounds_to_target(records, 0.99) is None
    assert holds_from(records, 0.99) is None
    for item, loss in zip(records, [2.0, 0.5, None, 0.7, 0.4, 0.5], strict=True):
        item.test_loss = loss
    assert rounds_to_target(records, 0.5, "test_loss") == 2
    assert holds_from(records, 0.5, "test_loss") == 5
    assert rounds_to_target(records, 0.1, "test_loss") is None
    summary = summarize(records, vector_bytes=12_500_000)  # one second on 100 Mbit/s
    assert summary["simulated_seconds"] == pytest.approx(6 * (0.5 + 3 * 1.0))
    faster = summarize(records, vector_bytes=12_500_000, link_mbps=1000)
    assert faster["simulated_seconds"] == pytest.approx(6 * (0.5 + 3 * 0.1))
    assert faster["link_mbps"] == 1000
    assert summary["gigabytes"] == pytest.approx(360e-9)
    assert summary["vectors_per_client"] == [3.0] * 6


def test_a_chunk_of_one_example_is_never_left_over() -> None:
    """501 examples and batch norm: by the batch's statistics, and for a full gradient."""
    data = as_datasets(softmax_clients([501, 501]))

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 3), nn.BatchNorm1d(3), nn.Linear(3, CLASSES))

    settings = {
        "algorithm": {"name": "fedmos"},
        "federation": {
            "num_clients": 2,
            "clients_per_round": 2,
            "num_rounds": 1,
            "buffers": "local",
        },
        "training": {"local_steps": 2, "batch_size": 8},
    }
    result = simulate(settings, model=model, client_data=data, test_data=data[0])
    assert result.summary["failures"] == 0
    assert np.isfinite(result.summary["final_test_loss"])


def test_a_function_that_returns_one_module_twice_is_refused() -> None:
    data, module = as_datasets(softmax_clients([20, 20])), linear_model()
    settings = {"federation": {"num_clients": 2, "clients_per_round": 2, "num_rounds": 1}}
    with pytest.raises(ConfigError, match="model: the function returned the same module twice"):
        simulate(settings, model=lambda: module, client_data=data, workers=2)


def test_evaluation_and_full_gradients_weigh_their_chunks_by_examples() -> None:
    """1,201 examples are cut into chunks of 401 and 400, and the last one is unlike the others."""
    (x, y), scale = softmax_clients([1201])[0], np.ones((1201, 1), dtype=np.float32)
    scale[801:] = 30.0
    data = TensorDataset(torch.from_numpy(x * scale), torch.from_numpy(y))
    model, loss = FlatModel(linear_model()), nn.functional.cross_entropy
    found = evaluate(model, as_client_data(data), loss, {"accuracy": accuracy})
    value, share = found.loss, found.accuracy
    outputs = linear_model()(data.tensors[0]).double()
    assert value == pytest.approx(loss(outputs, data.tensors[1]).item(), rel=1e-6)
    assert share == pytest.approx(
        float((outputs.argmax(1) == data.tensors[1]).double().mean()), rel=1e-6
    )
    objective = ModelObjective(model, loss, as_client_data(data), [])
    expected = softmax_gradient(model.vector.double().numpy(), x * scale, y)
    gradient = objective.full_gradient(model.vector.clone())
    np.testing.assert_allclose(gradient.numpy(), expected, rtol=2e-5, atol=2e-5)


def test_train_loss_weighs_unequal_batches_by_their_examples() -> None:
    """Ten examples in batches of 4, 3 and 3, with steps too short to move the model."""
    data = softmax_clients([10])
    settings = digits_config(
        "fedavg", federation={"num_clients": 1, "clients_per_round": 1, "num_rounds": 1}
    )
    settings["algorithm"]["client_learning_rate"] = 1e-12
    settings["training"] = {"local_epochs": 1, "batch_size": 4}
    record = simulate(settings, model=linear_model, client_data=as_datasets(data)).rounds[0]
    x, y = (torch.from_numpy(part) for part in data[0])
    expected = nn.functional.cross_entropy(linear_model()(x).double(), y).item()
    assert record.train_loss == pytest.approx(expected, rel=1e-6)


def test_a_client_trains_with_the_threads_that_it_is_told() -> None:
    """Wherever it runs: here its process has been using one."""
    seen: set[int] = set()

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear_model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.add(torch.get_num_threads())
            return self.layer(x)

    class ElsewhereClient(FederatedClient):
        def fit(self, *arguments: Any) -> Any:
            seen.clear()
            torch.set_num_threads(1)
            return super().fit(*arguments)

    def elsewhere(client: FederatedClient) -> FederatedClient:
        return ElsewhereClient(client.client_id, client.data, client._models, client._states)

    settings = digits_config("fedavg", training={"threads": 3, "local_steps": 2})
    settings["federation"] = {"num_clients": 2, "clients_per_round": 2, "num_rounds": 1}
    open_run(settings, as_datasets(softmax_clients([9, 9])), Counting, wrap=elsewhere)
    assert seen == {3}


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_buffers_do_not_depend_on_the_workers(buffers: str) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES))

    data = as_datasets(softmax_clients([30, 20, 40, 25, 35, 50]))
    settings = digits_config("scaffold_m", federation={"num_clients": 6, "clients_per_round": 4})
    settings["federation"] |= {"num_rounds": 5, "buffers": buffers}
    one, two = (
        simulate(settings, model=model, client_data=data, test_data=data[0], workers=workers)
        for workers in (1, 2)
    )
    states = [run.model.state_dict() for run in (one, two)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert [r.test_loss for r in one.rounds] == [r.test_loss for r in two.rounds]


class FailsLater(nn.Module):
    """Trains a while, then raises in all training."""

    rounds = 0  # of training passes that work

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Any) -> Any:
        if self.training:
            FailsLater.rounds -= 1
            if FailsLater.rounds < 0:
                raise ValueError("sensor 7 is blind")
        return self.layer(inputs)


@pytest.mark.parametrize(("passes", "idle_from"), [(3, 3), (5, None)])
def test_a_run_that_ends_without_replies_says_from_which_round(
    monkeypatch: pytest.MonkeyPatch, passes: int, idle_from: int | None
) -> None:
    monkeypatch.setattr(FailsLater, "rounds", passes)  # one of them tries the model
    settings = {
        "algorithm": {"name": "fedavg"},
        "federation": {"num_clients": 3, "clients_per_round": 1, "num_rounds": 6},
        "training": {"local_steps": 1},
    }
    data = as_datasets(softmax_clients([9, 9, 9]))
    if idle_from is None:
        result = simulate(settings, model=FailsLater, client_data=data)
    else:
        with pytest.warns(
            FedoptWarning,
            match=r"reply was counted from round 3 on, so .* that of round 2; the last error: ",
        ):
            result = simulate(settings, model=FailsLater, client_data=data)
        assert "sensor 7 is blind" in str(result.last_error)
    assert result.idle_from == idle_from

"""f and ∇f of output.diagnostics against NumPy, what they leave alone, and targets of them."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from helpers import as_datasets, linear_model, small_config, softmax_clients, softmax_gradient
from torch import nn

from fedopt_flwr import simulate
from fedopt_flwr.algorithms.fedavg import FedAvg
from fedopt_flwr.rounds.record import RoundRecord
from fedopt_flwr.run.summary import rounds_to_target, summarize

SIZES = [5, 90, 700]  # the last in two parts


def config_of(name: str, output: dict[str, Any], **federation: Any) -> dict[str, Any]:
    config = small_config(algorithm={"name": name}, output=output)
    config["federation"] |= federation
    return config


def loss_of(theta: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
    weight, bias = theta[:12].reshape(3, 4), theta[12:]
    scores = x @ weight.T + bias
    return float(np.mean(np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(len(y)), y]))


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_f_and_its_gradient_equal_numpy_and_change_nothing(weighting: str) -> None:
    clients = softmax_clients(SIZES)
    config = config_of("fedavg", {}, clients_per_round=2, weighting=weighting)
    config["training"] |= {"weight_decay": 0.1, "clip_norm": 1e-3}  # no clipping of ∇f
    plain = simulate(config, linear_model, as_datasets(clients))
    config["output"] = {"diagnostics": True}
    found = simulate(config, linear_model, as_datasets(clients))
    assert found.parameters.tobytes() == plain.parameters.tobytes()
    assert plain.rounds[-1].gradient_norm is None
    assert plain.rounds[-1].global_train_loss is None
    shares = np.array(SIZES) / sum(SIZES) if weighting == "examples" else np.full(3, 1 / 3)
    theta = found.parameters.astype(np.float64)
    slopes = [softmax_gradient(theta, x, y) for x, y in clients]
    gradient = sum(p * g for p, g in zip(shares, slopes, strict=True)) + 0.1 * theta
    loss = sum(p * loss_of(theta, x, y) for p, (x, y) in zip(shares, clients, strict=True))
    last = found.rounds[-1]
    assert last.gradient_norm == pytest.approx(np.linalg.norm(gradient), rel=1e-5)
    assert last.global_train_loss == pytest.approx(loss, rel=1e-5)


def test_only_evaluations_are_diagnosed_also_without_test_data() -> None:
    output = {"diagnostics": True, "evaluate_every": 2}
    config = config_of("scaffold_m", output, clients_per_round=2, num_rounds=5)
    result = simulate(config, linear_model, as_datasets(softmax_clients(SIZES)))
    diagnosed = [r.round for r in result.rounds if r.gradient_norm is not None]
    assert diagnosed == [r.round for r in result.rounds if r.global_train_loss is not None]
    assert diagnosed == [0, 2, 4, 5]
    assert all(r.test_loss is None for r in result.rounds)


def test_a_model_with_dropout_and_batch_norm_is_measured_as_it_is_evaluated() -> None:
    """Twice the same figure: no mask is drawn, no statistic moves."""

    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))

    config = config_of("fedavg", {"diagnostics": True}, num_rounds=1)
    data = as_datasets(softmax_clients(SIZES))
    result = simulate(config, model, data)
    module = result.model.eval()
    losses = [
        float(nn.functional.cross_entropy(module(d.tensors[0]), d.tensors[1]).detach())
        for d in data
    ]
    assert result.rounds[-1].global_train_loss == pytest.approx(np.mean(losses), rel=1e-5)


def test_targets_may_be_of_the_gradient() -> None:
    norms = [3.0, 1.0, 2.0, 0.5]
    records = [RoundRecord(i, gradient_norm=n) for i, n in enumerate(norms)]
    assert rounds_to_target(records, 1.0, "gradient_norm") == 1
    assert rounds_to_target(records, 0.1, "gradient_norm") is None


def test_given_seconds_take_the_place_of_measured_ones() -> None:
    """SRT by hand: a vector of 125,000 bytes over 1 Mbit/s takes 1 s; two rounds, V = 2."""
    records = [
        RoundRecord(i, clients=[0], uplink_vectors=1, downlink_vectors=1, client_seconds=0.25)
        for i in (1, 2)
    ]
    measured = summarize(records, 125_000, link_mbps=1)
    given = summarize(records, 125_000, link_mbps=1, client_seconds=3.0)
    assert measured["simulated_seconds"] == pytest.approx(2 * (0.25 + 2))
    assert given["simulated_seconds"] == pytest.approx(2 * (3 + 2))
    assert summarize(records, 125_000, link_mbps=1, client_seconds=0.0)[
        "simulated_seconds"
    ] == pytest.approx(4)


def test_the_work_of_each_client_that_counted_is_recorded() -> None:
    config = config_of("padamfed", {}, clients_per_round=2)
    for record in simulate(config, linear_model, as_datasets(softmax_clients(SIZES))).rounds:
        assert set(record.seconds_by_client) == set(map(str, record.clients))
        assert record.examples_by_client == {str(i): SIZES[i] for i in record.clients}
        seconds = record.seconds_by_client.values()
        assert record.client_seconds == pytest.approx(sum(seconds) / len(seconds), abs=1e-4)


def test_the_servers_part_of_a_round_and_the_evaluation_after_it_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    update = FedAvg.server_update

    def slow_update(*arguments: Any) -> Any:
        time.sleep(0.2)
        return update(*arguments)

    def slow_metric(outputs: Any, targets: Any) -> float:
        time.sleep(0.1)
        return 1.0

    monkeypatch.setattr(FedAvg, "server_update", slow_update)
    data = as_datasets(softmax_clients(SIZES))
    config = config_of("fedavg", {"evaluate_every": 2})
    started = time.perf_counter()
    rounds = simulate(config, linear_model, data, data[0], metric=slow_metric).rounds
    whole = time.perf_counter() - started
    for record in rounds:
        assert 0.2 <= record.aggregation_seconds <= record.seconds
        assert record.test_loss is None or record.evaluation_seconds >= 0.1
    assert min(r.evaluation_seconds for r in rounds if r.test_loss is None) < 0.1
    assert sum(r.seconds + r.evaluation_seconds for r in rounds) < whole


def test_client_seconds_come_from_the_configuration() -> None:
    config = config_of("fedavg", {"client_seconds": 10.0})
    result = simulate(config, linear_model, as_datasets(softmax_clients(SIZES)))
    assert result.summary["client_seconds"] == 10
    assert 20 <= result.summary["simulated_seconds"] < 20.1

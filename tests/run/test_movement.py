"""What output.diagnostics says of a round: drift, norms, cosine, and what each client did."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from helpers import (
    as_datasets,
    linear_model,
    open_run,
    small_config,
    softmax_clients,
    softmax_gradient,
    without_times,
)
from streams import ClientThread, ServerThread, served
from torch import nn

from fedopt_flwr import ConfigError, RunConfig, resume, simulate
from fedopt_flwr.algorithm import ClientId, ServerState
from fedopt_flwr.algorithms import ALGORITHMS
from fedopt_flwr.errors import FedoptWarning
from fedopt_flwr.flower import FederatedClient, MemoryStates, ModelPool
from fedopt_flwr.flower.diagnostics import Diagnostics
from fedopt_flwr.flower.messages import PHASE
from fedopt_flwr.rounds.participation import make_plan
from fedopt_flwr.rounds.record import DIAGNOSTICS, RoundRecord, as_json
from fedopt_flwr.run.experiment import Experiment
from fedopt_flwr.run.hosts import ClientHost, HostedClient
from fedopt_flwr.run.needs import require_states
from fedopt_flwr.run.reading import record_of_line
from fedopt_flwr.run.run import Silent
from fedopt_flwr.run.simulate import run_experiment
from fedopt_flwr.run.summary import diverged_at, rounds_to_target
from fedopt_flwr.run.trackers import numbers_of
from fedopt_flwr.strategies import FedAvg

SIZES = [5, 20, 70]
PARTS = softmax_clients(SIZES)
RATE = 0.1
X0 = np.concatenate([np.linspace(-0.5, 0.5, 12), np.linspace(0.1, 0.3, 3)])  # of linear_model


def config_of(rule: str = "fedavg", **sections: Any) -> dict[str, Any]:
    """All clients in every round, two steps on all their data."""
    own = {
        "algorithm": {"name": rule, "client_learning_rate": RATE},
        "federation": {"num_clients": 3, "clients_per_round": 3, "num_rounds": 3},
        "training": {"local_steps": 2, "batch_size": 0, "device": "cpu"},
        "output": {"diagnostics": True},
    }
    return {**own, **{k: {**own.get(k, {}), **v} for k, v in sections.items()}}


def run(config: dict[str, Any]) -> list[RoundRecord]:
    return simulate(config, linear_model, as_datasets(PARTS)).rounds


def moved(theta: np.ndarray, part: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Two steps of gradient descent; what they add to theta."""
    y = theta - RATE * softmax_gradient(theta, *part)
    return y - RATE * softmax_gradient(y, *part) - theta


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_drift_and_cosine_equal_numpy(weighting: str) -> None:
    shares = np.array(SIZES) / sum(SIZES) if weighting == "examples" else np.full(3, 1 / 3)
    records = run(config_of(federation={"weighting": weighting}))
    theta, slope = X0, None
    for record in records:
        deltas = [moved(theta, part) for part in PARTS]
        mean = sum(p * d for p, d in zip(shares, deltas, strict=True))
        apart = [float(np.linalg.norm(d - mean)) for d in deltas]
        assert record.drift == pytest.approx(np.mean(apart), rel=1e-4)
        for i, delta in enumerate(deltas):
            own = record.each_client[str(i)]
            assert own["update_norm"] == pytest.approx(np.linalg.norm(delta), rel=1e-4)
            assert own["drift"] == pytest.approx(apart[i], rel=1e-4)
        if slope is None:  # nobody measures the gradient at the first model
            assert record.gradient_cosine is None
        else:
            assert record.gradient_cosine == pytest.approx(cosine(-mean, slope), rel=1e-4)
            assert 0.5 < record.gradient_cosine < 0.9999
        theta = theta + mean
        slopes = [softmax_gradient(theta, *part) for part in PARTS]
        slope = sum(p * g for p, g in zip(shares, slopes, strict=True))
        assert record.gradient_norm == pytest.approx(np.linalg.norm(slope), rel=1e-4)
        assert record.control_norm is None
        assert all("control_norm" not in own for own in record.each_client.values())


def test_two_clients_that_pull_apart_by_hand() -> None:
    """f_i(x) = ½(x − m_i)², m = 1 and −3, from 0: Δ = 0.1 and −0.3, mean −0.1, x = −0.1."""

    class Point(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.zeros(1))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.x.expand(len(inputs))

    def half_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 0.5 * ((outputs - targets) ** 2).mean()

    config = config_of(training={"local_steps": 1})
    config["federation"] |= {"num_clients": 2, "clients_per_round": 2, "num_rounds": 2}
    parts = as_datasets(
        [(np.zeros((2, 1), np.float32), np.full(2, m, np.float32)) for m in (1.0, -3.0)]
    )
    first, second = simulate(config, Point, parts, loss=half_square).rounds
    assert first.drift == pytest.approx(0.2)
    assert first.each_client["0"] == {
        "rounds_away": 0,
        "update_norm": pytest.approx(0.1),
        "drift": pytest.approx(0.2),
    }
    assert first.each_client["1"]["update_norm"] == pytest.approx(0.3)
    assert first.gradient_norm == pytest.approx(0.9)  # of ½(x − 1)² and ½(x + 3)² at −0.1
    assert first.global_train_loss == pytest.approx((1.1**2 + 2.9**2) / 4)
    assert second.gradient_cosine == pytest.approx(1)  # one dimension, downhill


def test_control_variates_at_the_start_are_the_gradients() -> None:
    """On all data, c_i = ∇f_i(x⁰) and c = ∇f(x⁰)."""
    start = run(config_of("scaffold"))[0]
    slopes = [softmax_gradient(X0, *part) for part in PARTS]
    assert start.control_norm == pytest.approx(np.linalg.norm(np.mean(slopes, axis=0)), rel=1e-4)
    assert start.control_norm == pytest.approx(start.gradient_norm, rel=1e-4)
    for i, slope in enumerate(slopes):
        own = start.each_client[str(i)]
        assert own == {
            "rounds_away": 0,
            "control_norm": pytest.approx(np.linalg.norm(slope), rel=1e-4),
        }
    assert start.drift is None


@pytest.mark.parametrize("rule", ["fedavg", "scaffold_m", "feddyn"])
def test_norms_are_those_of_the_states_that_count(rule: str) -> None:
    config = config_of(rule, federation={"clients_per_round": 2})
    found = open_run(config, as_datasets(PARTS))
    means = found.strategy.rule.client_means or {}
    last = found.records[-1]
    for vector, name in means.items():
        c = found.strategy.state[vector].double().norm()
        assert last.control_norm == pytest.approx(float(c), rel=1e-5)
        for i in range(3):
            own = found.client_vector(i, name).double().norm()
            assert last.each_client[str(i)]["control_norm"] == pytest.approx(float(own), rel=1e-5)
    assert (last.control_norm is None) == (not means)


def test_rounds_away_count_from_the_last_reply_that_counted() -> None:
    config = config_of(federation={"clients_per_round": 1, "num_rounds": 8})
    last: dict[str, int] = {}
    for record in run(config):
        last |= {str(i): record.round for i in record.clients}
        away = {i: own["rounds_away"] for i, own in record.each_client.items() if own}
        assert away == {i: record.round - number for i, number in last.items()}
        moved = [i for i, own in record.each_client.items() if "update_norm" in own]
        assert moved == [str(i) for i in record.clients]
    assert len(last) > 1


def test_a_rule_without_local_steps_has_no_drift() -> None:
    assert all(record.drift is None for record in run(config_of("mb_storm")))


@pytest.mark.parametrize("rule", ["fedavg", "scaffold_m", "padamfed"])
def test_nothing_of_training_changes(rule: str) -> None:
    """Neither the model nor the clients' states, with two workers or one; only bytes are more."""
    config = small_config(algorithm={"name": rule}, output={"diagnostics": True})
    config["federation"] |= {"clients_per_round": 2, "num_rounds": 4}
    silent = {**config, "output": {}}
    for workers in (1, 2):
        one = open_run(config, as_datasets(PARTS), workers=workers)
        other = open_run(silent, as_datasets(PARTS), workers=workers)
        assert torch.equal(one.strategy.model.vector, other.strategy.model.vector)
        assert one.strategy.versions == other.strategy.versions
        for name in one.strategy.rule.client_state:
            for i in range(3):
                assert torch.equal(one.client_vector(i, name), other.client_vector(i, name))
        for a, b in zip(one.records, other.records, strict=True):
            gradients = 3 * (15 * 4 + 128)
            assert a.uplink_bytes - b.uplink_bytes == gradients
            assert a.downlink_bytes - b.downlink_bytes == gradients
            assert a.vectors_per_client == b.vectors_per_client
            assert all(getattr(b, name) is None for name in (*DIAGNOSTICS, "each_client"))


class Failing(FederatedClient):
    """Cannot be diagnosed in round 2; trains all the same."""

    def fit(self, parameters: Any, config: Any) -> Any:
        if config[PHASE] == "diagnose" and config["fedopt.round"] == 2 and self.client_id == 1:
            return [], 0, {"error": "no memory for that"}
        return super().fit(parameters, config)


def test_the_server_holds_the_gradients_of_those_it_asks_together_and_no_others() -> None:
    held: weakref.WeakSet[FitRes] = weakref.WeakSet()
    before: list[tuple[int, int]] = []

    class Answer(FitRes):
        __hash__ = object.__hash__  # type: ignore[assignment]  # so that it may be watched

    def ask(ids: Sequence[ClientId]) -> dict[ClientId, FitRes | Exception]:
        before.append((len(ids), len(held)))
        report = {**asked_for, "arrays": "gradient", "loss": 1.0, "num_steps": 0}
        gradient = ndarrays_to_parameters([np.ones(4, np.float32)])
        ok = Status(Code.OK, "")
        answers = {i: Answer(ok, gradient, 1, {**report, "client_seconds": 0.1}) for i in ids}
        held.update(answers.values())
        return dict(answers)

    asked_for: dict[str, Any] = {"run": "r", "round": 1, "phase": "diagnose"}
    config = RunConfig(federation={"num_clients": 40, "clients_per_round": 1})
    plan = make_plan(ALGORITHMS["fedavg"](), config, dict.fromkeys(range(40), 1))
    record = RoundRecord(1)
    state = ServerState(plan, {"model": torch.zeros(4)})
    Diagnostics(0.0, {}).measure(record, state, lambda i: True, ask, asked_for)
    assert before == [(16, 0), (16, 0), (8, 0)]
    assert record.gradient_norm == pytest.approx(2)
    assert record.global_train_loss == pytest.approx(1)


def test_who_refuses_hears_of_its_number_of_examples_all_the_same() -> None:
    found = Experiment(RunConfig(**config_of(model={"name": "logistic"})))
    pool = ModelPool([found.model], found.loss)
    client = FederatedClient(0, found.data.clients[0], pool, MemoryStates())
    client.evaluates = False
    told = {"examples_before": 7, "examples_since": 3}  # an open federation's server says it once
    asked = found.template().model_copy(update={"phase": "diagnose", "round": 3, **told})
    with pytest.warns(FedoptWarning, match="from round 3 on; before it was 7"):
        arrays, _, report = client.fit([], asked.to_config())
    assert arrays == []
    assert "refuses" in str(report["error"])


def test_a_client_that_fails_leaves_no_value_and_the_run_goes_on() -> None:
    def failing(client: FederatedClient) -> FederatedClient:
        client.__class__ = Failing
        return client

    found = open_run(config_of("scaffold"), as_datasets(PARTS), wrap=failing)
    whole = open_run(config_of("scaffold"), as_datasets(PARTS))
    assert torch.equal(found.strategy.model.vector, whole.strategy.model.vector)
    by_round = {record.round: record for record in found.records}
    assert by_round[2].errors == [{"client": 1, "phase": "diagnose", "error": "no memory for that"}]
    assert by_round[2].clients == [0, 1, 2]
    assert by_round[2].failures == 0
    assert by_round[2].gradient_norm is None
    assert by_round[2].global_train_loss is None
    assert by_round[2].drift is not None
    assert by_round[3].gradient_cosine is None  # as ∇f before it is not known
    for number in (1, 3):
        assert by_round[number].gradient_norm == whole.records[number].gradient_norm
    require_states(by_round[2], is_open=False)  # none of them is a state that was lost
    assert diverged_at(found.records) is None


def test_a_state_that_is_lost_is_no_failure_of_a_diagnosis() -> None:
    config = config_of("scaffold", federation={"clients_per_round": 1, "num_rounds": 1})

    def forget(now: Any) -> None:
        if now.records[-1].round == 0:
            now.states.prune(0, ())

    found = open_run(config, as_datasets(PARTS), on_round=forget)
    last = found.records[-1]
    assert [error for error in last.errors if error["phase"] == "diagnose"] == []
    assert last.gradient_norm is not None
    assert "control_norm" not in last.each_client["0"]
    assert "control_norm" in last.each_client["1"]


def test_a_resumed_run_has_the_same_records(tmp_path: Path) -> None:
    class Stop(Exception): ...

    class Stopping(Silent):
        def on_round(self, record: RoundRecord) -> None:
            if record.round == 2:  # after which ∇f is needed once more
                raise Stop

    def config(folder: str) -> dict[str, Any]:
        output = {"directory": str(tmp_path / folder), "checkpoint_every": 1, "evaluate_every": 2}
        return config_of(
            "scaffold_m",
            federation={"num_rounds": 6, "clients_per_round": 2},
            output=output,
            model={"name": "logistic"},
        )

    whole = simulate(config("whole"))
    with pytest.raises(Stop):
        run_experiment(Experiment(RunConfig(**config("cut"))), listener=Stopping())
    again = resume(tmp_path / "cut")
    assert again.rounds_before == 2
    assert without_times(tmp_path / "whole") == without_times(tmp_path / "cut")
    assert [r.round for r in whole.rounds if r.gradient_cosine is not None] == [1, 3, 5]


def test_what_clients_hold_out_is_in_each_client_and_among_the_measures() -> None:
    config = config_of(
        data={"holdout": 0.4}, evaluation={"on_clients": True}, output={"evaluate_every": 3}
    )
    records = run(config)
    last = records[-1]
    told = {str(e["client"]): e["values"] for e in last.on_clients["clients"]}
    for i, values in told.items():
        assert last.each_client[i]["test_loss"] == values["loss"]
        assert last.each_client[i]["test_accuracy"] == values["accuracy"]
    accuracies = [values["accuracy"] for values in told.values()]
    assert len(accuracies) == 3
    assert last.measured("worst_test_accuracy") == min(accuracies)  # a tenth of 3 is one client
    assert last.measured("worst_test_loss") == max(v["loss"] for v in told.values())
    assert last.measured("client_accuracy_std") == pytest.approx(np.std(accuracies))
    assert last.measured("client_loss_std") == pytest.approx(
        np.std([v["loss"] for v in told.values()])
    )
    assert records[0].measured("worst_test_accuracy") is None
    assert "test_loss" not in records[0].each_client["0"]


def test_measures_are_found_where_they_are_recorded() -> None:
    spread = {"accuracy": {"worst": 0.05, "deviation": 0.3}}
    record = RoundRecord(1, on_clients={"clients": [], "spread": spread, "own_spread": {}})
    assert record.measured("worst_test_accuracy") == 0.05
    assert record.measured("client_accuracy_std") == 0.3
    assert record.measured("worst_test_loss") is None
    assert RoundRecord(1).measured("client_loss_std") is None
    assert rounds_to_target([record], 0.04, "worst_test_accuracy") == 1
    assert rounds_to_target([record], 0.06, "worst_test_accuracy") is None
    assert rounds_to_target([RoundRecord(2, drift=0.5)], 0.5, "drift") == 2


def test_a_run_may_stop_at_a_measure() -> None:
    drifts = [record.drift for record in run(config_of())]
    assert drifts == sorted(drifts, reverse=True)
    config = config_of(stop={"metric": "drift", "target": drifts[1]})
    assert len(run(config)) == 2
    config = config_of(
        stop={"metric": "worst_test_loss", "target": 100.0},
        data={"holdout": 0.2},
        evaluation={"on_clients": True},
    )
    assert len(run(config)) == 1


@pytest.mark.parametrize(
    ("rule", "sections", "message"),
    [
        ("fedavg", {"stop": {"metric": "drift"}}, "only with output.diagnostics = true"),
        (
            "fedavg",
            {"stop": {"metric": "worst_test_loss"}},
            "only with evaluation.on_clients = true",
        ),
        (
            "fedavg",
            {
                "stop": {"metric": "client_accuracy_std"},
                "evaluation": {"on_clients": True},
                "model": {"metric": "f1"},
                "data": {"holdout": 0.2},
            },
            "clients do not measure 'accuracy'; add it to evaluation.metrics",
        ),
        (
            "fedavg",
            {"stop": {"metric": "control_norm"}, "output": {"diagnostics": True}},
            "'fedavg' has no control variates",
        ),
        (
            "mb_storm",
            {"stop": {"metric": "drift"}, "output": {"diagnostics": True}},
            "'mb_storm' sends no 'delta'",
        ),
        (
            "fedavg",
            {"federation": {"local_parameters": ["bias"]}, "output": {"diagnostics": True}},
            "output.diagnostics: got true beside federation.local_parameters",
        ),
    ],
)
def test_what_is_not_measured_is_refused(rule: str, sections: dict[str, Any], message: str) -> None:
    config = config_of(rule, **{"output": {"diagnostics": False}, **sections})
    with pytest.raises(ConfigError, match=message):
        run(config)


@pytest.mark.parametrize("name", ["drift", "gradient_norm", "worst_test_accuracy"])
def test_a_strategy_of_a_server_app_measures_none_of_it(name: str) -> None:
    sizes = {"num_clients": 3, "clients_per_round": 3, "num_rounds": 3}
    with pytest.raises(ConfigError, match=f"stop.metric: got '{name}', which only a run of"):
        FedAvg(linear_model(), **sizes, stop={"metric": name, "target": 0.5})


def test_records_of_runs_before_are_read() -> None:
    old = RoundRecord(3, clients=[1], gradient_norm=0.5).to_dict()
    for name in ("drift", "control_norm", "gradient_cosine", "each_client"):
        del old[name]
    assert record_of_line(json.dumps(old).encode()) == RoundRecord(
        3, clients=[1], gradient_norm=0.5
    )
    new = run(config_of("scaffold"))[-1]
    assert record_of_line(json.dumps(as_json(new.to_dict())).encode()) == new


def test_trackers_hear_of_the_round_and_of_no_client() -> None:
    record = run(config_of("scaffold"))[-1]
    assert record.each_client
    assert record.seconds_by_client
    assert record.examples_by_client
    of_clients = {"each_client", "seconds_by_client", "examples_by_client"}
    found = numbers_of(record)
    assert {"drift", "control_norm", "gradient_cosine", "gradient_norm"} <= found.keys()
    assert not {name.partition("/")[0] for name in found} & of_clients


def grpc_config(rule: str) -> dict[str, Any]:
    return config_of(
        rule,
        model={"name": "logistic"},
        data={"name": "digits", "holdout": 0.2},
        evaluation={"on_clients": True},
        federation={"clients_per_round": 2},
        training={"weight_decay": 0.1},
    )


@pytest.mark.parametrize("rule", ["fedavg", "scaffold"])
def test_over_grpc_the_same_bits_are_measured(rule: str, tmp_path: Path) -> None:
    alone, apart = simulate(grpc_config(rule)), served(grpc_config(rule), tmp_path)
    assert alone.parameters.tobytes() == apart.parameters.tobytes()
    names = (*DIAGNOSTICS, "each_client", "uplink_bytes", "downlink_bytes", "vectors_per_client")
    for one, other in zip(alone.rounds, apart.rounds, strict=True):
        assert {n: getattr(one, n) for n in names} == {n: getattr(other, n) for n in names}
    last = apart.rounds[-1]
    own = {"update_norm", "drift", "rounds_away", "test_loss", "test_accuracy"}
    expected = own | ({"control_norm"} if rule == "scaffold" else set())
    assert set(last.each_client[str(last.clients[0])]) == expected
    assert math.isfinite(last.gradient_norm)


def test_a_client_may_refuse_to_be_diagnosed(tmp_path: Path) -> None:
    with ServerThread(grpc_config("fedavg")) as server:
        host = ClientHost(server.config, range(3))

        def refusing(client: HostedClient) -> HostedClient:
            client.evaluates = client.client_id != 1
            return client

        members = [ClientThread(server, i, tmp_path, host=host, wrap=refusing) for i in range(3)]
        result = server.result()
    for member in members:
        member.join()
    assert result.parameters.tobytes() == simulate(grpc_config("fedavg")).parameters.tobytes()
    for record in result.rounds:
        assert record.gradient_norm is None
        assert [(e["client"], e["phase"]) for e in record.errors] == [(1, "diagnose")]
        assert "refuses to tell loss and gradient" in record.errors[0]["error"]
        assert record.drift is not None


@pytest.mark.filterwarnings("ignore::fedopt_flwr.errors.FedoptWarning")
def test_while_a_client_is_away_nobody_is_asked(tmp_path: Path) -> None:
    config = grpc_config("fedavg")
    config["federation"] |= {"clients_per_round": 1, "min_replies": 1, "num_rounds": 5}
    asked: list[tuple[int, int]] = []

    class Counting:
        """Notes when a client is asked for its loss and gradient."""

        def __init__(self, client: HostedClient) -> None:
            self._client = client

        def __getattr__(self, name: str) -> Any:
            return getattr(self._client, name)

        def fit(self, parameters: Any, config: dict[str, Any]) -> Any:
            if config[PHASE] == "diagnose":
                asked.append((config["fedopt.round"], int(self._client.client_id)))
            return self._client.fit(parameters, config)

    def leave(record: RoundRecord) -> None:
        if record.round == 2:
            members[2].stop()
            server.said.wait_for("client 2: left")

    server = ServerThread(config, on_round=leave)
    with server:
        host = ClientHost(server.config, range(3))
        members = [ClientThread(server, i, tmp_path, host=host, wrap=Counting) for i in range(3)]
        result = server.result()
    for member in members:
        member.join()
    assert sorted(asked) == [(number, i) for number in (1, 2) for i in range(3)]
    for record in result.rounds:
        assert (record.gradient_norm is None) == (record.round > 2)
        if record.round > 2:
            assert [(e["client"], e["phase"]) for e in record.errors] == [(2, "diagnose")]
            assert record.errors[0]["error"].startswith("away")
    assert result.rounds[2].gradient_cosine is not None  # of ∇f after round 2
    assert result.rounds[3].gradient_cosine is None


@pytest.mark.parametrize("claim", [math.nan, math.inf, -1.0, "1.0", True])
def test_a_norm_that_is_none_is_left_out(claim: Any) -> None:
    class Claiming(FederatedClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            arrays, count, report = super().fit(parameters, config)
            if config[PHASE] == "diagnose" and self.client_id == 0:
                report["control_norm"] = claim
            return arrays, count, report

    def claiming(client: FederatedClient) -> FederatedClient:
        client.__class__ = Claiming
        return client

    last = open_run(config_of("scaffold"), as_datasets(PARTS), wrap=claiming).records[-1]
    assert ["control_norm" in own for own in last.each_client.values()] == [False, True, True]
    assert last.gradient_norm is not None
    assert last.errors == []


def test_a_gradient_that_is_not_finite_is_no_part_of_a_sum() -> None:
    class Broken(FederatedClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            arrays, count, report = super().fit(parameters, config)
            if config[PHASE] == "diagnose" and self.client_id == 2:
                arrays[0][3] = math.nan
            return arrays, count, report

    def broken(client: FederatedClient) -> FederatedClient:
        client.__class__ = Broken
        return client

    found = open_run(config_of(), as_datasets(PARTS), wrap=broken)
    for record in found.records:
        assert record.gradient_norm is None
        assert [(e["client"], e["phase"]) for e in record.errors] == [(2, "diagnose")]
        assert "'gradient' is not finite" in record.errors[0]["error"]
    assert diverged_at(found.records) is None


def test_the_spread_of_records_from_before_own_models_is_read() -> None:
    record = RoundRecord(1, on_clients={"spread": {"accuracy": {"worst": 0.25}}})
    assert record.measured("worst_test_accuracy") == 0.25
    assert record.measured("client_loss_std") is None

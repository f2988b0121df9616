"""Runs that end before their last round, and the best of their models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import digits_config, linear_model, small_config, three_datasets
from safetensors import safe_open
from streams import make_config, served

from fedopt_flwr import ConfigError, FedoptError, clients, resume, simulate, strategies
from fedopt_flwr.config.sections import StopSection
from fedopt_flwr.engines.pairs import run_pair
from fedopt_flwr.rounds.record import RoundRecord
from fedopt_flwr.rounds.stopping import Stopping
from fedopt_flwr.run.run import Silent

RULES = (
    "scaffold_m",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedavg", "padamfed")),
)


def hear(section: dict[str, Any], *values: float | None) -> tuple[Stopping, list[bool]]:
    stopping = Stopping(StopSection(**section))
    stopping.catch_up([])
    found = [stopping.hear(RoundRecord(n, test_loss=v)) for n, v in enumerate(values, 1)]
    return stopping, found


def test_the_best_is_the_first_of_equal_values() -> None:
    stopping, found = hear({"metric": "test_loss"}, 3.0, 2.0, None, 2.0, float("nan"), 2.5)
    assert found == [True, True, False, False, False, False]
    assert (stopping.best_round, stopping.best_value, stopping.reason) == (2, 2.0, None)


def test_patience_counts_evaluations_without_a_better_value() -> None:
    section = {"metric": "test_loss", "patience": 2}
    assert hear(section, 3.0, 2.0, 2.5, None, None)[0].reason is None
    stopping, _ = hear(section, 3.0, 2.0, 2.5, None, 2.0)
    assert stopping.reason == "after round 5: test_loss was not lower in 2 evaluations in a row"


@pytest.mark.parametrize(("better", "target"), [("lower", 2.0), ("higher", 3.0)])
def test_a_target_is_reached_in_its_direction(better: str, target: float) -> None:
    section = {"metric": "test_loss", "better": better, "target": target}
    assert hear(section, 2.5)[0].reason is None
    assert (hear(section, 2.5, target)[0].reason or "").startswith("after round 2: test_loss is")


def test_a_round_taken_back_is_no_value() -> None:
    stopping = Stopping(StopSection(metric="train_loss", patience=1))
    assert stopping.hear(RoundRecord(1, train_loss=1.0))
    assert not stopping.hear(RoundRecord(2, train_loss=0.1, taken_back=True))
    assert stopping.best_round == 1


def test_budgets_end_a_run() -> None:
    stopping = Stopping(StopSection(max_gigabytes=1.0))
    stopping.catch_up([RoundRecord(1, uplink_bytes=6 * 10**8)])
    assert stopping.reason is None
    stopping.hear(RoundRecord(2, downlink_bytes=5 * 10**8))
    assert stopping.reason == "after round 2: 1.1 GB were sent, stop.max_gigabytes = 1.0"
    stopping = Stopping(StopSection(max_seconds=60))
    stopping.catch_up([RoundRecord(1, seconds=50.0)])
    assert stopping.reason is None
    stopping.catch_up([RoundRecord(1, seconds=50.0, evaluation_seconds=11.0)])
    assert (stopping.reason or "").startswith("after round 1: 61 s are over")


@pytest.mark.parametrize("rule", RULES)
def test_a_run_ends_after_the_same_round_in_every_engine(rule: str, tmp_path: Path) -> None:
    stop = {"metric": "test_loss", "patience": 2}
    config = make_config(rule, num_rounds=60) | {"stop": stop}
    long = {"step_scale": 100.0} if rule == "padamfed" else {"client_learning_rate": 2.0}
    config["algorithm"] |= long
    alone = simulate(config)
    number, best = alone.rounds[-1].round, alone.summary["best_round"]
    assert number < 60
    assert alone.summary["stopped"].startswith(f"after round {number}: test_loss")
    losses = [record.test_loss for record in alone.rounds]
    assert alone.rounds[int(np.argmin(losses))].round == best <= number - 2
    shorter = make_config(rule, num_rounds=60) | {"stop": {}, "algorithm": config["algorithm"]}
    plain = simulate(shorter)
    assert losses == [record.test_loss for record in plain.rounds[: len(losses)]]
    remote = served(config, tmp_path)
    assert remote.summary["stopped"] == alone.summary["stopped"]
    assert remote.parameters.tobytes() == alone.parameters.tobytes()
    assert alone.best is not None
    assert remote.best is not None
    assert all(torch.equal(remote.best[name], value) for name, value in alone.best.items())


def stopping_config(folder: Path, **stop: Any) -> dict[str, Any]:
    config = digits_config("scaffold_m", output={"directory": folder, "checkpoint_every": 2})
    config["algorithm"] |= {"client_learning_rate": 1.0}
    config["federation"] |= {"num_rounds": 30}
    return config | {"stop": {"metric": "test_accuracy", "patience": 3, **stop}}


class Killed(Silent):
    def __init__(self, number: int) -> None:
        self._number = number

    def on_round(self, record: RoundRecord) -> None:
        if record.round == self._number:
            raise KeyboardInterrupt


def best_of(folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    with safe_open(folder / "model_best.safetensors", "pt") as file:
        return int(file.metadata()["round"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_the_best_model_is_kept_and_survives_a_resume(tmp_path: Path) -> None:
    whole = simulate(stopping_config(tmp_path / "whole"))
    number, model = best_of(tmp_path / "whole")
    assert number == whole.summary["best_round"] < whole.rounds[-1].round < 30
    cut = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        simulate(stopping_config(cut), listener=Killed(whole.summary["best_round"] + 1))
    again = resume(cut)
    assert again.summary["stopped"] == whole.summary["stopped"]
    assert best_of(cut)[0] == number
    assert all(torch.equal(best_of(cut)[1][name], value) for name, value in model.items())
    assert again.best is not None
    accuracy = whole.rounds[number].test_accuracy
    assert json.loads((cut / "summary.json").read_text())["best_value"] == accuracy


def test_a_best_model_of_a_round_that_is_done_again_is_put_back(tmp_path: Path) -> None:
    """The checkpoint of round 2 counts, the file is of round 3, and the budget ends the run."""
    folder = tmp_path / "run"
    config = stopping_config(folder, patience=None, metric="train_loss")
    config["output"]["checkpoint_every"] = 2
    with pytest.raises(KeyboardInterrupt):
        simulate(config, listener=Killed(3))
    assert best_of(folder)[0] == 3
    text = (folder / "config.toml").read_text()
    text = text.replace("[stop]", "[stop]\nmax_gigabytes = 1e-9")
    (folder / "config.toml").write_text(text)
    result = resume(folder)
    assert result.rounds[-1].round == 2
    assert best_of(folder)[0] == result.summary["best_round"] <= 2


def test_a_run_that_stopped_is_over_until_its_limits_change(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = simulate(stopping_config(folder, patience=None, target=0.5))
    with pytest.raises(
        ConfigError, match=r"ended after round \d+: test_accuracy is .*in \[stop\] of its"
    ):
        resume(folder)
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace("target = 0.5", "target = 0.8"))
    second = resume(folder)
    assert second.rounds[-1].round > first.rounds[-1].round
    assert "the target 0.8" in second.summary["stopped"]


def test_a_stop_between_evaluations_evaluates_the_model_that_is_left() -> None:
    config = digits_config("fedavg", output={"evaluate_every": 5}, stop={"max_gigabytes": 1e-6})
    result = simulate(config)
    assert [r.round for r in result.rounds] == [1]
    assert result.rounds[0].test_loss is None
    assert result.summary["final_test_loss"] > 0
    sent = result.summary["gigabytes"]
    limit = {"max_gigabytes": 8.5 * sent}  # in round 9
    config |= {"stop": limit, "algorithm": {"name": "fedavg", "client_learning_rate": 0.5}}
    result = simulate(config)
    assert result.rounds[-1].round == 9
    assert result.summary["final_test_accuracy"] > (result.rounds[4].test_accuracy or 1)
    assert result.summary["best_test_accuracy"] == result.summary["final_test_accuracy"]


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ({"patience": 3}, "stop.patience: got 3 without stop.metric"),
        ({"metric": "own"}, "stop.better: must be 'higher' or 'lower' for stop.metric = 'own'"),
        ({"metric": "f1", "target": 1}, "stop.metric: unknown 'f1'.*Known: accuracy, test_acc"),
        ({"metric": "gradient_norm"}, "only with output.diagnostics = true"),
        ({"max_seconds": 0}, "stop.max_seconds: got 0"),
        ({"max_gigabytes": -1}, "stop.max_gigabytes: got -1"),
        ({"patience": 0, "metric": "f1"}, "stop.patience: got 0"),
    ],
)
def test_what_cannot_stop_a_run_is_refused(stop: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        simulate(small_config(stop=stop), linear_model, three_datasets(), three_datasets()[0])


def test_without_test_data_only_the_training_loss_can_stop_a_run() -> None:
    stop = {"metric": "test_loss"}
    with pytest.raises(ConfigError, match="no test data here, so only 'train_loss' is measured"):
        simulate(small_config(stop=stop), linear_model, three_datasets())
    result = simulate(small_config(stop={"metric": "train_loss"}), linear_model, three_datasets())
    assert result.summary["best_round"] in (1, 2)


def test_a_name_that_an_own_metric_never_returns_ends_the_run() -> None:
    stop = {"metric": "recall", "better": "higher"}
    test = three_datasets()[0]
    config = small_config(stop=stop)
    with pytest.raises(FedoptError, match="got 'recall'; this run measures precision"):
        simulate(
            config, linear_model, three_datasets(), test, metric=lambda o, t: {"precision": 0.5}
        )


@pytest.mark.parametrize("rule", ["FedAvg", "ScaffoldM", "PAdaMFed"])
def test_in_ones_own_app_later_rounds_ask_nobody(rule: str) -> None:
    """Flower's loop goes on to its last round."""
    values = iter([0.5, 0.7, 0.6, 0.6, 0.9, 0.9, 0.9])

    def evaluate(number: int, arrays: Any, config: Any) -> tuple[float, dict[str, Any]]:
        return 1.0, {"recall": next(values)}

    stop = {"metric": "recall", "better": "higher", "patience": 2}
    sizes = {"num_clients": 3, "clients_per_round": 3, "num_rounds": 9}
    rates = {} if rule == "PAdaMFed" else {"client_learning_rate": 0.1}
    moved: list[torch.Tensor] = []
    strategy = getattr(strategies, rule)(
        linear_model(),
        **sizes,
        **rates,
        stop=stop,
        evaluate_fn=evaluate,
        on_round=lambda record: moved.append(strategy.state["model"].clone()),
    )
    kind = getattr(clients, f"{rule}Client")
    members = [
        kind(linear_model(), data, client_id=i, device="cpu")
        for i, data in enumerate(three_datasets())
    ]
    run_pair(strategy, [member.to_client() for member in members], 9)
    last = strategy.rounds[-1].round
    assert (
        strategy.stopped == f"after round {last}: recall was not higher in 2 evaluations in a row"
    )
    assert last < 9
    assert torch.equal(strategy.state["model"], moved[-1])
    best = next(n for n, r in enumerate(strategy.rounds) if r.test_metrics["recall"] == 0.7)
    kept = torch.cat([value.reshape(-1) for value in strategy.best.values()])
    assert torch.equal(kept, moved[best])


def test_a_metric_that_evaluate_fn_never_returns_ends_the_app() -> None:
    stop = {"metric": "recall", "better": "higher"}
    sizes = {"num_clients": 1, "clients_per_round": 1, "num_rounds": 2}
    strategy = strategies.FedAvg(
        linear_model(), **sizes, stop=stop, evaluate_fn=lambda *_: (1.0, {"precision": 1.0})
    )
    member = clients.FedAvgClient(linear_model(), three_datasets()[0], client_id=0, device="cpu")
    with pytest.raises(FedoptError, match="got 'recall'; this run measures precision"):
        run_pair(strategy, [member.to_client()], 2)


def test_a_stopped_run_that_continues_and_is_killed_can_be_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = simulate(stopping_config(folder, patience=None, target=0.5))
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace("target = 0.5", "target = 0.8"))
    with pytest.raises(KeyboardInterrupt):
        resume(folder, listener=Killed(first.rounds[-1].round + 1))
    assert not (folder / "summary.json").exists()
    assert "the target 0.8" in resume(folder).summary["stopped"]


def test_one_evaluation_without_a_value_ends_nothing() -> None:
    section = StopSection(metric="recall", better="higher", patience=3)
    stopping = Stopping(section)
    for number, own in enumerate(({"recall": 0.5, "x": 1.0}, {"x": 1.0}, {"recall": 0.6}), 1):
        stopping.hear(RoundRecord(number, test_metrics=own))
    assert (stopping.best_round, stopping.reason) == (3, None)

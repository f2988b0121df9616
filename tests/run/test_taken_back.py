"""A round that would leave the server with numbers that are not finite moves nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    CLASSES,
    FEATURES,
    SOFTMAX_DATA,
    SOME_FAST,
    WITH_CONTROL_VARIATES,
    At,
    OpenRun,
    linear_model,
    open_run,
    softmax_config,
    without_times,
)
from torch import nn

from fedopt_flwr import clients, resume, simulate, strategies
from fedopt_flwr.algorithm import Algorithm
from fedopt_flwr.algorithms import AutoFed
from fedopt_flwr.engines.in_process import run_in_process
from fedopt_flwr.errors import FedoptWarning
from fedopt_flwr.flower import FederatedClient, MemoryStates
from fedopt_flwr.flower.messages import ROUND
from fedopt_flwr.rounds.soundness import norm, spoilt

HUGE = 3e38
Spoil = Callable[[Any, int, dict[str, Any]], Any]


def filled(value: float, only: str = "") -> Spoil:
    """Replies whose float32 arrays, or those whose names begin so, hold one value alone."""

    def spoil(arrays: Any, count: int, report: dict[str, Any]) -> Any:
        names = report["arrays"].split(",")
        full = [
            np.full_like(a, value) if a.dtype == np.float32 and n.startswith(only) else a
            for n, a in zip(names, arrays, strict=True)
        ]
        return full, count, report

    return spoil


def raising(*_: Any) -> Any:
    raise RuntimeError("away")


def spoiling(ids: set[int], rounds: set[int], spoil: Spoil) -> Callable[[Any], Any]:
    """Clients with these ids answer so in these rounds."""

    def wrap(client: FederatedClient) -> FederatedClient:
        if client.client_id in ids:
            fit = client.fit

            def answer(parameters: Any, config: Any) -> Any:
                reply = fit(parameters, config)
                return spoil(*reply) if config[ROUND] in rounds else reply

            client.fit = answer  # type: ignore[method-assign]
        return client

    return wrap


def lying_in(rounds: set[int]) -> Any:
    """A `FederatedClient.fit` with which client 1 sends huge replies in these rounds."""
    fit = FederatedClient.fit

    def liar(self: FederatedClient, parameters: Any, config: Any) -> Any:
        reply = fit(self, parameters, config)
        lies = self.client_id == 1 and config[ROUND] in rounds
        return filled(HUGE)(*reply) if lies else reply

    return liar


def texts_of(run: OpenRun, number: int) -> dict[Any, str]:
    record = next(r for r in run.records if r.round == number)
    return {error["client"]: error["error"] for error in record.errors}


@pytest.mark.parametrize("name", SOME_FAST)
@pytest.mark.parametrize("value", [HUGE, -1e25])
def test_a_huge_reply_leaves_the_run_as_a_round_without_replies_does(
    name: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AutoFed, "taken_back", Algorithm.taken_back)  # it alone draws a conclusion
    gaps = []

    def compare(run: OpenRun) -> None:
        if name in WITH_CONTROL_VARIATES:
            c = run.strategy.state["control_variate"].double()
            gaps.append(float((run.mean_control_variate() - c).abs().max()))

    config, test = softmax_config(name, 4, 6), SOFTMAX_DATA[3]
    asked = open_run(config, SOFTMAX_DATA).records[-4].clients
    liar = asked[0]
    wrap = spoiling({liar}, {3}, filled(value))
    one = open_run(config, SOFTMAX_DATA, wrap=wrap, on_round=compare, test_data=test)
    nobody = spoiling(set(range(6)), {3}, raising)
    two = open_run(config, SOFTMAX_DATA, wrap=nobody, test_data=test)
    for vector, expected in two.strategy.state.vectors.items():
        assert torch.equal(one.strategy.state[vector], expected)
    assert one.strategy.versions == two.strategy.versions
    assert all(gap < 1e-5 for gap in gaps)
    taken = one.records[-4]
    assert [r.round for r in one.records if r.taken_back] == [3] == [taken.round]
    assert (taken.clients, taken.failures, taken.train_loss, taken.test_loss) == ([], 4, None, None)
    texts = texts_of(one, 3)
    assert sorted(texts) == asked
    assert texts[liar].startswith("its reply, with a norm of ")
    assert all(f"the largest reply is that of client {liar}, with" in texts[i] for i in asked[1:])
    assert all("would be not finite" in text for text in texts.values())
    assert [r.failures for r in one.records[-3:]] == [0, 0, 0]


def deep_model() -> nn.Module:
    """Whose outputs grow with the third power of its parameters."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(FEATURES, FEATURES) for _ in range(2)], linear_model())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_test_loss_that_is_not_finite_takes_its_round_back(workers: int) -> None:
    """The server's vectors are finite, and only their product is not."""
    config, test = softmax_config("scaffold_m", 6, 6), SOFTMAX_DATA[3]
    one, two = (
        open_run(config, SOFTMAX_DATA, deep_model, wrap=wrap, test_data=test, workers=workers)
        for wrap in (
            spoiling({2}, {3}, filled(1e15)),
            spoiling(set(range(6)), {3}, raising),
        )
    )
    assert [r.round for r in one.records if r.taken_back] == [3]
    assert "the test loss would be nan, not finite" in texts_of(one, 3)[0]
    assert "the largest reply is that of client 2, with a norm of " in texts_of(one, 3)[0]
    assert torch.equal(one.strategy.state["model"], two.strategy.state["model"])
    c = one.strategy.state["control_variate"].double()
    assert float((one.mean_control_variate() - c).abs().max()) < 1e-5
    # nothing but the states that count is kept
    kept = {i: one.states._versions(i) for i in range(6)}
    assert kept == {i: [one.strategy.versions[i]] for i in range(6)}


def test_a_loss_that_never_was_finite_takes_nothing_back() -> None:
    spoilt_data = torch.utils.data.TensorDataset(torch.full((3, 4), torch.nan), torch.arange(3))
    with pytest.warns(FedoptWarning, match="diverged in round 1"):
        result = simulate(
            softmax_config("fedavg", 6, 3),
            model=linear_model,
            client_data=SOFTMAX_DATA,
            test_data=spoilt_data,
        )
    assert not any(r.taken_back for r in result.rounds)
    assert all(r.test_loss is not None and math.isnan(r.test_loss) for r in result.rounds)


def test_a_rule_hears_that_a_round_was_taken_back() -> None:
    config = softmax_config("autofed", 4, 14)
    wrap = spoiling(set(range(6)), {13}, filled(HUGE))
    run = open_run(config, SOFTMAX_DATA, wrap=wrap, test_data=SOFTMAX_DATA[3])
    assert [r.round for r in run.records if r.taken_back] == [13]
    lengths = {r.round: r.chosen["gamma"] for r in run.records[1:]}
    # the line to 0 halves the last round's, and so does the rule after round 13
    assert lengths[14] == pytest.approx(lengths[13] / 4)
    assert lengths[13] == pytest.approx(lengths[12] * 2 / 3)


def test_huge_buffers_move_nothing() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(FEATURES, 3), nn.BatchNorm1d(3), nn.Linear(3, CLASSES))
        net.register_buffer("mask", torch.tensor([-torch.inf, torch.finfo().min]))
        return net

    config = softmax_config("fedavg", 6, 4)
    wrap = spoiling({5}, {2}, filled(HUGE, only="buffers"))
    run = open_run(config, SOFTMAX_DATA[:6], model, wrap=wrap, test_data=SOFTMAX_DATA[3])
    assert [r.round for r in run.records if r.taken_back] == [2]
    assert run.records[-1].failures == 0
    assert run.strategy.model.module[1].running_mean.abs().max() < 100


def test_a_huge_reply_to_the_start_pass_leaves_all_at_zero_and_the_run_goes_on() -> None:
    config = softmax_config("padamfed", 6, 3)
    wrap = spoiling({4}, {0}, filled(HUGE))
    run = open_run(config, SOFTMAX_DATA, wrap=wrap, test_data=SOFTMAX_DATA[3])
    assert (run.records[0].clients, run.records[0].failures) == ([], 6)
    assert run.records[0].test_loss is not None  # of the model that it does not move
    assert "its reply, with a norm of " in texts_of(run, 0)[4]
    assert [r.failures for r in run.records[1:]] == [0, 0, 0]
    c = run.strategy.state["control_variate"].double()
    assert float((run.mean_control_variate() - c).abs().max()) < 1e-5


@pytest.mark.parametrize("phase", [0, 2])
def test_a_reply_above_the_norm_that_is_allowed_is_its_clients_failure(phase: int) -> None:
    config = softmax_config("padamfed", 6, 3)
    config["federation"]["max_reply_norm"] = 50.0
    run = open_run(config, SOFTMAX_DATA, wrap=spoiling({4}, {phase}, filled(100.0)))
    record = run.records[phase]
    assert (record.clients, record.failures) == ([0, 1, 2, 3, 5], 1)
    (text,) = {error["error"] for error in record.errors}
    assert f"client 4, round {phase}: '" in text
    assert "has the norm 387.3; federation.max_reply_norm is 50" in text
    c = run.strategy.state["control_variate"].double()
    assert float((run.mean_control_variate() - c).abs().max()) < 1e-5


def test_a_run_ends_as_diverged_after_ten_rounds_that_were_taken_back(tmp_path: Path) -> None:
    config = softmax_config("fedavg", 6, 40, client_learning_rate=1e25)
    config["training"] = {"local_steps": 1}  # a second one would make it the clients' failure
    config["output"] = {"directory": str(tmp_path / "run"), "checkpoint_every": 4}
    objects = {
        "model": linear_model,
        "client_data": SOFTMAX_DATA,
        "test_data": SOFTMAX_DATA[3],
    }
    with pytest.warns(FedoptWarning, match=r"diverged in round 1: .* round 10 was taken back \(cl"):
        result = simulate(config, **objects)
    assert [r.round for r in result.rounds if r.taken_back] == list(range(1, 11))
    assert result.summary["rounds"] == 10
    start = torch.cat([p.detach().reshape(-1) for p in linear_model().parameters()])
    assert np.array_equal(result.parameters, start.numpy())
    assert math.isfinite(result.summary["final_test_loss"])
    for name in ("summary.json", "model.safetensors", "curves.png"):
        assert (tmp_path / "run" / name).exists()
        (tmp_path / "run" / name).unlink()
    before = without_times(tmp_path / "run")
    with pytest.warns(FedoptWarning, match="diverged in round 1"):
        again = resume(tmp_path / "run", **objects)
    assert without_times(tmp_path / "run") == before
    assert again.parameters.tobytes() == result.parameters.tobytes()


@pytest.mark.parametrize("every", [1, 4])
def test_the_summary_is_of_the_model_that_is_left(every: int) -> None:
    """Also where the last round is taken back, and with it its evaluation."""
    config = softmax_config("fedavg", 6, 6)
    config["output"] = {"evaluate_every": every}
    objects = {"client_data": SOFTMAX_DATA, "test_data": SOFTMAX_DATA[3]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FederatedClient, "fit", lying_in({6}))
        result = simulate(config, linear_model, **objects)
    config["federation"]["num_rounds"] = 5
    shorter = simulate(config, linear_model, **objects)
    assert result.summary["diverged_at"] is None
    assert result.rounds[-1].test_loss is None
    for key in ("final_test_loss", "final_test_metric", "final_test_accuracy"):
        assert result.summary[key] == shorter.summary[key]
    assert result.summary["failures"] == 6


class Stop(Exception):
    pass


def stop() -> None:
    raise Stop


def test_a_run_goes_on_bit_for_bit_beside_a_round_that_was_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FederatedClient, "fit", lying_in({3, 5}))
    config = softmax_config("scaffold_m", 6, 8)
    objects = {"model": linear_model, "client_data": SOFTMAX_DATA, "test_data": SOFTMAX_DATA[3]}
    outputs = [{"directory": str(tmp_path / n), "checkpoint_every": 3} for n in ("whole", "cut")]
    whole = simulate(config | {"output": outputs[0]}, **objects)
    with pytest.raises(Stop):
        simulate(config | {"output": outputs[1]}, listener=At(5, stop), **objects)
    cut = resume(tmp_path / "cut", **objects)
    assert [r.round for r in cut.rounds if r.taken_back] == [3, 5]
    assert cut.parameters.tobytes() == whole.parameters.tobytes()
    assert without_times(tmp_path / "cut") == without_times(tmp_path / "whole")
    assert cut.summary["diverged_at"] is None


def test_a_users_own_evaluation_takes_a_round_back_too() -> None:
    losses: list[float] = []

    def evaluate(number: int, arrays: list[np.ndarray], _: Any) -> tuple[float, dict[str, Any]]:
        size = max(float(np.abs(array).max()) for array in arrays)
        losses.append(math.inf if size > 1e6 else size)
        return losses[-1], {}

    strategy = strategies.Scaffold(
        linear_model(), num_clients=3, clients_per_round=3, num_rounds=4, evaluate_fn=evaluate
    )
    data = SOFTMAX_DATA[:3]
    members: Any = [
        clients.ScaffoldClient(linear_model(), d, client_id=i, device="cpu")
        for i, d in enumerate(data)
    ]
    wrapped = [spoiling({0}, {2}, filled(1e9))(client) for client in members]
    run_in_process(strategy, wrapped, MemoryStates(), num_rounds=4)
    assert [math.isinf(loss) for loss in losses] == [False, False, True, False, False]
    assert [r.round for r in strategy.rounds if r.taken_back] == [2]
    assert [r.test_loss is None for r in strategy.rounds] == [False, False, True, False, False]
    assert strategy.rounds[-1].clients == [0, 1, 2]


def test_what_was_not_finite_before_no_round_did() -> None:
    mask = torch.tensor([1.0, torch.inf])
    good, bad = torch.ones(2), torch.tensor([1.0, torch.nan])
    assert spoilt({"a": good, "b": bad}, {"a": good, "b": good}) == "b"
    assert spoilt({"a": good, "b": mask}, {"a": good, "b": mask}) is None
    assert spoilt({"a": good, "new": bad}, {"a": good}) == "new"
    assert spoilt({"model": torch.full((2,), 2e19)}, {"model": good}) == "model"
    assert spoilt({"model": torch.full((2,), 1e18)}, {"model": good}) is None
    assert spoilt({"a": torch.full((2,), -2e30)}, {"a": good}) == "a"
    assert spoilt({"a": torch.full((2,), 1e27)}, {"a": good}) is None  # a loss times 1e25
    assert spoilt({"a": torch.ones(0)}, {"a": torch.ones(0)}) is None
    assert norm(torch.tensor([3e38, 4e38 / 3])) == pytest.approx(3.283e38, rel=1e-3)
    assert norm(torch.tensor([3, -4])) == 5
    assert norm(torch.tensor([3.0, -torch.inf, 4.0])) == 5

"""Evaluation where the data is: each client, on what it held out of training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.common import Code, EvaluateRes, FitRes, Parameters, Status
from helpers import (
    CLASSES,
    FEATURES,
    linear_model,
    small_config,
    softmax_clients,
    three_datasets,
)
from hypothesis import given
from hypothesis import strategies as st
from streams import ClientThread, ServerThread, served
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from fedopt_flwr import ConfigError, FedoptError, clients, resume, simulate, strategies
from fedopt_flwr.data import as_client_data
from fedopt_flwr.data.holdouts import held_out
from fedopt_flwr.engines.pairs import run_pair
from fedopt_flwr.flower import STATE_LOST
from fedopt_flwr.flower.evaluations import record_evaluations
from fedopt_flwr.rounds.record import RoundRecord
from fedopt_flwr.run.hosts import ClientHost, HostedClient, states_in
from fedopt_flwr.run.needs import require_states

RULES = (
    "scaffold_m",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedavg", "padamfed")),
)
SIZES = [30, 12, 21]
PARTS = [TensorDataset(torch.from_numpy(x), torch.from_numpy(y)) for x, y in softmax_clients(SIZES)]


@given(st.integers(1, 40), st.floats(0.01, 0.99), st.integers(0, 2**60))
def test_a_holdout_is_a_random_share_that_leaves_something_to_train_on(
    size: int, share: float, seed: int
) -> None:
    data = as_client_data(TensorDataset(torch.zeros(size), torch.arange(size)))
    part = held_out(data, share, seed)
    held = [] if part.holdout is None else part.holdout.targets().tolist()
    kept = part.train.targets().tolist()
    assert sorted(kept + held) == list(range(size))
    assert len(held) == min(round(share * size), size - 1)
    assert kept == sorted(kept)
    again = held_out(data, share, seed)
    assert again.train.targets().tolist() == kept


class Counting(Dataset[Any]):
    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return 10

    def __getitem__(self, position: int) -> tuple[torch.Tensor, int]:
        self.read += 1
        return torch.zeros(1), position


def test_holding_out_reads_no_data() -> None:
    data = Counting()
    part = held_out(as_client_data(data), 0.3, 0)
    assert (part.train.num_examples, data.read) == (7, 0)


def config_of(rule: str = "fedavg", **sections: Any) -> dict[str, Any]:
    evaluation = {"on_clients": True, "metrics": ["f1"]} | sections.pop("evaluation", {})
    data = {"holdout": 0.4} | sections.pop("data", {})
    own = {"evaluation": evaluation, "data": data, "algorithm": {"name": rule}}
    return small_config(**(own | sections))


def test_what_clients_find_is_what_the_model_does_on_what_they_held_out() -> None:
    result = simulate(config_of(), linear_model, PARTS)
    found = result.rounds[-1].on_clients
    assert found is not None
    expected = []
    for i, (x, y) in enumerate(PARTS[j].tensors for j in range(3)):
        data = as_client_data(PARTS[i])
        # which rows those are is part of "same seed, same bits"
        from fedopt_flwr.randomness import derive

        held = held_out(data, 0.4, derive(0, "holdout", i)).holdout
        rows, labels = next(held.batches([torch.arange(held.num_examples)], torch.device("cpu")))
        assert len(rows) == round(0.4 * len(x)) < len(y)
        outputs = result.model(rows)
        loss = float(functional.cross_entropy(outputs, labels).detach())
        accuracy = float((outputs.argmax(1) == labels).float().mean())
        expected.append((len(rows), loss, accuracy))
    for entry, (count, loss, accuracy) in zip(found["clients"], expected, strict=True):
        assert entry["examples"] == count
        assert entry["values"]["loss"] == pytest.approx(loss, rel=1e-5)
        assert entry["values"]["accuracy"] == pytest.approx(accuracy)
    counts, losses, accuracies = map(np.array, zip(*expected, strict=True))
    spread = found["spread"]["loss"]
    assert spread["clients"] == 3
    assert spread["mean"] == pytest.approx(np.average(losses, weights=counts), rel=1e-5)
    assert spread["unweighted"] == pytest.approx(losses.mean(), rel=1e-5)
    assert spread["worst"] == pytest.approx(losses.max(), rel=1e-5)
    assert found["spread"]["accuracy"]["worst"] == pytest.approx(accuracies.min())
    assert found["spread"]["accuracy"]["deviation"] == pytest.approx(accuracies.std())
    assert found["own_spread"] == {}


def test_training_is_on_the_rest_and_evaluation_changes_no_bit() -> None:
    evaluated = simulate(config_of("scaffold_m"), linear_model, PARTS)
    silent = simulate(
        config_of("scaffold_m", evaluation={"on_clients": False}), linear_model, PARTS
    )
    assert evaluated.parameters.tobytes() == silent.parameters.tobytes()
    whole = simulate(
        config_of("scaffold_m", data={"holdout": 0.0}, evaluation={"on_clients": False}),
        linear_model,
        PARTS,
    )
    assert whole.parameters.tobytes() != silent.parameters.tobytes()
    more = evaluated.summary["gigabytes"] - silent.summary["gigabytes"]
    vector = CLASSES * (FEATURES + 1) * 4 + 128
    assert more == pytest.approx(3 * 3 * vector / 1e9)  # three rounds, round 0 among them


def answers(*values: dict[str, float] | str | None) -> RoundRecord:
    record = RoundRecord(4)
    found: dict[Any, Any] = {}
    asked = {"run": "r", "round": 4, "phase": "evaluate"}
    for number, own in enumerate(values):
        text = own if isinstance(own, str) else '{"refused": true}'
        if isinstance(own, dict):
            examples = int(own.pop("n", 1))
            pairs = ", ".join(f'"{k}": {v}' for k, v in own.items())
            text = f'{{"examples": {examples}, "values": {{{pairs}}}}}'
        found[number] = FitRes(
            Status(Code.OK, ""), Parameters([], ""), 1, {**asked, "evaluation": text}
        )
    record_evaluations(list(range(len(values))), found, asked, record, 1000)
    return record


def test_spreads_by_hand() -> None:
    each = [{"n": 2 if i == 0 else 1, "accuracy": i / 10, "loss": float(i)} for i in range(11)]
    spread = answers(*each).on_clients["spread"]
    assert spread["accuracy"] == {
        "clients": 11,
        "mean": pytest.approx(5.5 / 12),
        "unweighted": pytest.approx(0.5),
        "worst": pytest.approx(0.05),  # of the two lowest
        "deviation": pytest.approx(math.sqrt(0.1)),
    }
    assert spread["loss"]["worst"] == 9.5  # of the two highest


@pytest.mark.parametrize("as_list", [False, True])
def test_a_client_may_hold_out_nothing(as_list: bool) -> None:
    parts = three_datasets()
    none: Any = [] if as_list else TensorDataset(*(t[:0] for t in parts[1].tensors))
    pairs = [(parts[0], parts[0]), (parts[1], none), (parts[2], parts[2])]
    config = small_config(evaluation={"on_clients": True})
    last = simulate(config, linear_model, pairs).rounds[-1]
    assert last.failures == 0
    assert last.on_clients is not None
    assert sorted(own["client"] for own in last.on_clients["clients"]) == [0, 2]


def test_the_worst_perplexity_is_the_highest() -> None:
    spread = answers({"loss": 0.1, "perplexity": 1.5}, {"loss": 2.0, "perplexity": 7.0})
    assert spread.on_clients["spread"]["perplexity"]["worst"] == 7.0


def test_who_has_no_value_or_refuses_is_left_out_and_counted() -> None:
    record = answers(
        {"loss": 1.0, "auroc": 0.5}, {"loss": 3.0}, None, {"n": 0}, "{}", '{"examples": -1}', "x"
    )
    found = record.on_clients
    assert (found["asked"], found["refused"], found["without_examples"]) == (7, 1, 2)
    assert found["spread"]["auroc"]["clients"] == 1
    assert found["spread"]["loss"]["clients"] == 2
    assert [entry["client"] for entry in found["clients"]] == [0, 1]
    assert [(e["client"], e["phase"]) for e in record.errors] == [(5, "evaluate"), (6, "evaluate")]
    assert "examples: got -1" in record.errors[0]["error"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"examples": 1, "values": {"loss": NaN}}', "values"),
        ('{"examples": 1, "values": {"\\u001b[2J": 1.0}}', "must be printable"),
        ('{"examples": 1, "values": {"loss": 1.7e308}}', "values.loss"),
        ('{"examples": 1001}', "got 1001; must be at most limits.examples (1000)"),
        ('{"examples": true}', "examples"),
        ('{"own": 1}', "own"),
        ("[" * 50_000, "a text of at most 16384 characters"),
        ("[" * 9_000, "evaluation"),
    ],
)
def test_what_a_client_claims_is_checked(text: str, problem: str) -> None:
    record = answers(text, {"loss": 2.0})
    assert [error["client"] for error in record.errors] == [0]
    assert problem in record.errors[0]["error"]
    assert record.errors[0]["error"].isprintable()
    assert record.on_clients["spread"]["loss"]["clients"] == 1


def test_an_answer_to_another_question_does_not_count() -> None:
    record = RoundRecord(4)
    asked = {"run": "r", "round": 4, "phase": "evaluate"}
    late = {**asked, "round": 3, "evaluation": '{"examples": 1}'}
    answer = FitRes(Status(Code.OK, ""), Parameters([], ""), 1, late)
    record_evaluations([0], {0: answer}, asked, record, 1000)
    assert "its report is for round 3" in record.errors[0]["error"]
    assert record.on_clients["spread"] == {}


@pytest.mark.parametrize("rule", RULES)
def test_over_grpc_clients_find_the_same(rule: str, tmp_path: Path) -> None:
    config = config_of(rule, model={"name": "logistic"}, data={"name": "digits"})
    config["federation"]["clients_per_round"] = 2
    alone = simulate(config)
    result = served(config, tmp_path)
    assert result.parameters.tobytes() == alone.parameters.tobytes()
    assert [r.on_clients for r in result.rounds] == [r.on_clients for r in alone.rounds]
    assert list(alone.rounds[-1].on_clients["spread"]) == ["loss", "accuracy", "f1"]


def test_a_client_may_refuse(tmp_path: Path) -> None:
    config = config_of(model={"name": "logistic"}, data={"name": "digits"})
    with ServerThread(config) as server:
        host = ClientHost(server.config, range(3))
        members = [ClientThread(server, i, tmp_path, host=host) for i in range(2)]

        def refusing(client: HostedClient) -> HostedClient:
            client.evaluates = False
            return client

        members.append(ClientThread(server, 2, tmp_path, host=host, wrap=refusing))
        result = server.result()
    for member in members:
        member.join()
    found = result.rounds[-1].on_clients
    assert (found["refused"], [entry["client"] for entry in found["clients"]]) == (1, [0, 1])
    assert found["spread"]["loss"]["clients"] == 2
    assert result.rounds[-1].clients == [0, 1, 2]
    assert not HostedClient(0, host, states_in(tmp_path), evaluates=False).evaluates


def test_own_metrics_of_a_server_are_not_imported_by_a_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trains all the same."""
    (tmp_path / "ownhold.py").write_text("def share(o, t):\n    return 0.5\n")
    monkeypatch.chdir(tmp_path)
    config = config_of(
        evaluation={"metrics": ["ownhold:share"]},
        model={"name": "logistic"},
        data={"name": "digits"},
    )
    with ServerThread(config) as server:
        plain = server.config.with_values({"evaluation.metrics": []})
        host = ClientHost(plain, range(3))
        members = [ClientThread(server, i, tmp_path, host=host) for i in range(3)]
        result = server.result()
    for member in members:
        member.join()
    assert result.rounds[-1].clients == [0, 1, 2]
    errors = result.rounds[-1].errors
    assert {e["phase"] for e in errors} == {"evaluate"}
    assert "no other code is imported; make the two equal, or" in errors[0]["error"]


def test_so_many_evaluate_every_so_many_rounds_and_at_the_end() -> None:
    config = config_of(evaluation={"every": 4, "clients": 2})
    config["federation"]["num_rounds"] = 10
    records = simulate(config, linear_model, PARTS).rounds
    told = {
        r.round: [e["client"] for e in r.on_clients["clients"]] for r in records if r.on_clients
    }
    assert list(told) == [4, 8, 10]
    assert all(len(ids) == 2 for ids in told.values())
    assert len({tuple(ids) for ids in told.values()}) > 1


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_where_buffers_stay_local_clients_also_evaluate_their_own_model() -> None:
    config = config_of()
    config["federation"] |= {"buffers": "local", "num_rounds": 6}
    shifted = [
        TensorDataset(x + 9.0 * i, y) for i, (x, y) in enumerate(part.tensors for part in PARTS)
    ]
    found = simulate(config, Norm, shifted).rounds[-1].on_clients
    for entry in found["clients"]:
        assert entry["own_values"]["loss"] != entry["values"]["loss"]
    assert found["own_spread"]["loss"]["clients"] == 3


def test_pairs_bring_a_data_set_of_their_own_to_evaluate_on() -> None:
    pairs = [(PARTS[i], PARTS[(i + 1) % 3]) for i in range(3)]
    result = simulate(config_of(), linear_model, pairs)
    assert [e["examples"] for e in result.rounds[-1].on_clients["clients"]] == [12, 21, 30]
    plain = simulate(
        config_of(data={"holdout": 0.0}, evaluation={"on_clients": False}), linear_model, PARTS
    )
    assert result.parameters.tobytes() == plain.parameters.tobytes()


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"data": {"holdout": 0.0}}, "no client holds out any example; set data.holdout"),
        ({"data": {"holdout": 1.0}}, "data.holdout: got 1.0"),
        ({"evaluation": {"clients": 4}}, r"evaluation.clients: got 4; must be 'all' or .* \(3\)"),
        ({"evaluation": {"clients": "some"}}, "evaluation.clients.*'some'"),
        ({"evaluation": {"every": 0}}, "evaluation.every: got 0"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(sections: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        simulate(config_of(**sections), linear_model, PARTS)


def test_a_client_whose_evaluation_fails_trains_all_the_same() -> None:
    def touchy(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        if len(targets) == round(0.4 * 12):
            raise ValueError("no such thing")
        return 1.0

    result = simulate(config_of(), linear_model, PARTS, metric=touchy)
    last = result.rounds[-1]
    assert last.clients == [0, 1, 2]
    assert [(e["client"], e["phase"]) for e in last.errors] == [(1, "evaluate")]
    assert "no such thing" in last.errors[0]["error"]
    assert last.on_clients["spread"]["custom"]["clients"] == 2


@pytest.mark.slow
def test_a_run_that_is_resumed_records_the_same(tmp_path: Path) -> None:
    found = []
    for cut in (False, True):
        folder = tmp_path / str(cut)
        config = config_of(output={"directory": folder, "checkpoint_every": 1})
        config["federation"]["num_rounds"] = 4
        given: Any = (linear_model, PARTS)
        if cut:
            from helpers import At

            def stop() -> None:
                raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                simulate(config, *given, listener=At(2, stop))
            found.append(resume(folder, *given))
        else:
            found.append(simulate(config, *given))
    assert [r.on_clients for r in found[0].rounds] == [r.on_clients for r in found[1].rounds]


@pytest.mark.parametrize("rule", ["FedAvg", "ScaffoldM", "PAdaMFed"])
def test_in_ones_own_app_flowers_names_do_what_they_do(rule: str) -> None:
    sizes = {"num_clients": 3, "clients_per_round": 2, "num_rounds": 2}
    seen: list[list[tuple[int, dict[str, Any]]]] = []

    def combine(metrics: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
        seen.append(metrics)
        return {"metric": sum(n * own["metric"] for n, own in metrics) / sum(n for n, _ in metrics)}

    strategy = getattr(strategies, rule)(
        linear_model(),
        **sizes,
        fraction_evaluate=0.7,
        evaluate_metrics_aggregation_fn=combine,
    )
    held = [TensorDataset(*PARTS[(i + 1) % 3].tensors) for i in range(3)]
    members = [
        getattr(clients, f"{rule}Client")(
            linear_model(),
            PARTS[i],
            holdout=held[i],
            client_id=i,
            device="cpu",
            metric=lambda o, t: (o.argmax(1) == t).float().mean(),
        )
        for i in range(3)
    ]
    run_pair(strategy, [member.to_client() for member in members], 2)
    assert [len(metrics) for metrics in seen] == [2, 2]
    asked = strategy.configure_evaluate(2, None, None)
    assert len(asked) == 2  # int(0.7 · 3)
    results = []
    for proxy, _ in asked:
        member = members[strategy.members.id_of(proxy)]
        loss, count, own = member.evaluate(strategy.model.state_arrays(), {})
        assert count == len(member.holdout.targets())
        results.append((proxy, EvaluateRes(Status(Code.OK, ""), loss, count, own)))
    loss, combined = strategy.aggregate_evaluate(2, results, [])
    total = sum(r.num_examples for _, r in results)
    assert loss == pytest.approx(sum(r.num_examples * r.loss for _, r in results) / total)
    assert set(combined) == {"metric"}
    assert strategy.aggregate_evaluate(2, [], []) == (None, {})


def test_a_fraction_beyond_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fraction_evaluate: got 1.5; must be between 0 and 1"):
        strategies.FedAvg(
            linear_model(),
            num_clients=1,
            clients_per_round=1,
            num_rounds=1,
            fraction_evaluate=1.5,
        )


def test_a_held_out_label_that_the_model_does_not_know_is_refused_before_the_run() -> None:
    """On a GPU it would end the process."""
    x, y = PARTS[0].tensors
    pairs = [(part, PARTS[0]) for part in PARTS]
    pairs[1] = (PARTS[1], TensorDataset(x, torch.full_like(y, CLASSES)))
    with pytest.raises(FedoptError, match=f"client 1, held out: has an example of class {CLASSES}"):
        simulate(config_of(), linear_model, pairs)


def test_states_that_are_lost_only_for_an_evaluation_do_not_end_a_run() -> None:
    lost = [{"client": i, "phase": "evaluate", "error": STATE_LOST} for i in range(2)]
    require_states(RoundRecord(3, clients=[0, 1], errors=lost), is_open=False)
    own = [{"client": i, "phase": "train", "error": STATE_LOST} for i in range(2)]
    with pytest.raises(FedoptError, match="start the clients with"):
        require_states(RoundRecord(3, failures=2, errors=[*own, *lost]), is_open=False)

"""Our strategies and client functions in an app of Flower's Message API."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.client.mod import make_ffn, secagg_mod, secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import (
    LocalDpMod,
    adaptiveclipping_mod,
    arrays_size_mod,
    fixedclipping_mod,
    message_size_mod,
)
from flwr.serverapp import Grid
from helpers import as_datasets, linear_model, softmax_clients
from rooms import Room

from fedopt_flwr import (
    ConfigError,
    MessageError,
    RunConfig,
    RunError,
    clientapp,
    clients,
    serverapp,
    strategies,
)
from fedopt_flwr.algorithm import Algorithm
from fedopt_flwr.algorithms import ALGORITHMS, FedAvg
from fedopt_flwr.engines.pairs import run_pair
from fedopt_flwr.errors import FedoptWarning
from fedopt_flwr.flower import members
from fedopt_flwr.flower.message_nodes import Nodes
from fedopt_flwr.flower.message_records import averaged

DATA = as_datasets(softmax_clients([9, 14, 6]))
SIZES: dict[str, Any] = {"num_clients": 3, "clients_per_round": 2, "local_steps": 3}
NAMES = {rule.__name__: name for name, rule in ALGORITHMS.items()}
ROUNDS = 4


def make_app(mods: Any = None, train_mods: Any = None, **options: Any) -> ClientApp:
    app = ClientApp(mods=mods)

    @app.query()
    def query(message: Message, context: Any) -> Message:
        return clientapp.query(message, context, dataset=data(context))

    @app.train(mods=train_mods)
    def train(message: Message, context: Any) -> Message:
        return clientapp.train(
            message, context, model=linear_model(), dataset=data(context), device="cpu", **options
        )

    @app.evaluate()
    def evaluate(message: Message, context: Any) -> Message:
        return clientapp.evaluate(
            message, context, model=linear_model(), dataset=data(context), device="cpu", **options
        )

    return app


def data(context: Any) -> Any:
    return DATA[context.node_config["partition-id"]]


def start(strategy: serverapp.Strategy, grid: Room, rounds: int = ROUNDS, **options: Any) -> Any:
    arrays = ArrayRecord(linear_model().state_dict())
    return strategy.start(grid, arrays, num_rounds=rounds, **options)


@pytest.mark.parametrize("name", NAMES)
def test_every_rule_ends_with_the_bits_of_the_other_api(name: str) -> None:
    strategy = getattr(serverapp, name)(linear_model(), **SIZES)
    result = start(strategy, Room(make_app()))
    other = getattr(strategies, name)(linear_model(), **SIZES, num_rounds=ROUNDS)
    own = [
        clients.Client(linear_model(), part, client_id=i, device="cpu")
        for i, part in enumerate(DATA)
    ]
    arrays = run_pair(other, [client.to_client() for client in own], ROUNDS)
    for found, expected in zip(result.arrays.to_numpy_ndarrays(), arrays, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert [r.failures for r in strategy.rounds] == [0] * len(strategy.rounds)
    assert [r.clients for r in strategy.rounds] == [r.clients for r in other.rounds]
    losses = {r.round: r.train_loss for r in other.rounds if r.round}
    for number, record in result.train_metrics_clientapp.items():
        assert record["train_loss"] == pytest.approx(losses[number])


def test_every_rule_is_there_under_its_name() -> None:
    assert {*serverapp.__all__} >= {*NAMES}
    assert serverapp.PAdaMFed.__doc__ == strategies.PAdaMFed.__doc__
    with pytest.raises(ConfigError, match=r"padamfed\.momentum"):
        serverapp.PAdaMFed(linear_model(), momentum=2.0, **SIZES)
    with pytest.raises(TypeError, match=r"'num_rounds' is not for this API; start\(num_rounds"):
        serverapp.PAdaMFed(linear_model(), num_rounds=3, **SIZES)


def test_evaluation_on_both_sides() -> None:
    strategy = serverapp.ScaffoldM(linear_model(), fraction_evaluate=1.0, **SIZES)
    seen = []

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append(arrays.to_numpy_ndarrays()[0])
        return MetricRecord({"loss": 2.0 - 0.1 * number, "accuracy": 0.1 * number})

    def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return float((outputs.argmax(1) == targets).float().mean())

    grid = Room(make_app(metric=accuracy))
    result = start(
        strategy,
        grid,
        evaluate_fn=evaluate,
        train_config=ConfigRecord({"lr": 0.25}),
        evaluate_config=ConfigRecord({"eval": 7}),
    )
    assert [*result.evaluate_metrics_serverapp] == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(seen[-1], result.arrays.to_numpy_ndarrays()[0])
    assert [r.test_accuracy for r in strategy.rounds[1:]] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    trained = [m for m in grid.seen if m.metadata.message_type == "train"]
    assert {m.content["config"].get("lr") for m in trained[3:]} == {0.25}
    asked = [m for m in grid.seen if m.metadata.message_type == "evaluate"]
    assert {m.content["config"]["eval"] for m in asked} == {7}
    assert len(asked) == 12
    model = linear_model().requires_grad_(False)
    model.load_state_dict(result.arrays.to_torch_state_dict())
    losses, hits = [], []
    for part in DATA:
        x, y = part.tensors
        losses.append(float(torch.nn.functional.cross_entropy(model(x), y)) * len(y))
        hits.append(float((model(x).argmax(1) == y).float().sum()))
    last = result.evaluate_metrics_clientapp[4]
    assert last["loss"] == pytest.approx(sum(losses) / 29, rel=1e-5)
    assert last["metric"] == pytest.approx(sum(hits) / 29)


def test_failures_are_counted_for_their_client_and_round() -> None:
    grid = Room(make_app())
    strategy = serverapp.Scaffold(linear_model(), **SIZES | {"clients_per_round": 3})

    def break_things(record: Any) -> None:
        if record.round == 1:
            grid.lost.add(101)
        if record.round == 2:
            grid.lost.clear()
            grid.app = make_app(loss=no_loss)
        if record.round == 3:
            grid.app = make_app()

    strategy._options["on_round"] = break_things
    start(strategy, grid)
    assert [r.clients for r in strategy.rounds] == [[0, 1, 2], [0, 1, 2], [0, 2], [], [0, 1, 2]]
    assert [e["error"] for e in strategy.rounds[2].errors] == ["no answer"]
    assert all("no loss today" in e["error"] for e in strategy.rounds[3].errors)
    own = [
        grid.contexts[100 + i].state.array_records[f"fedopt-{strategy._inner._template.run}/{i}/4"]
        for i in range(3)
    ]
    mean = np.mean([record["control_variate"].numpy() for record in own], axis=0)
    found = strategy._inner.state["control_variate"].numpy()
    np.testing.assert_allclose(found, mean, atol=1e-6)


def no_loss(outputs: Any, targets: Any) -> Any:
    raise ValueError("no loss today")


def test_mods_that_only_look_work() -> None:
    found = []
    for mods in ([], [message_size_mod, arrays_size_mod]):
        strategy = serverapp.PAdaMFed(linear_model(), **SIZES)
        result = start(strategy, Room(make_app(mods)))
        found.append(result.arrays.to_numpy_ndarrays()[0].tobytes())
        assert [r.failures for r in strategy.rounds] == [0] * 5
    assert found[0] == found[1]


def doubled(message: Message, context: Any, call_next: Callable[..., Message]) -> Message:
    reply = call_next(message, context)
    if reply.content.get("arrays"):
        twice = [2 * array for array in reply.content["arrays"].to_numpy_ndarrays()]
        reply.content["arrays"] = ArrayRecord(twice)
    return reply


MODS = {
    "own": doubled,
    "fixed clipping": fixedclipping_mod,
    "adaptive clipping": adaptiveclipping_mod,
    "local privacy": LocalDpMod(1.0, 0.1, 1.0, 1e-5),
    "secagg": secagg_mod,
    "secagg+": secaggplus_mod,
}
ASK_FOR_ARRAYS = ("fixed clipping", "adaptive clipping", "local privacy")  # in each message


@pytest.mark.filterwarnings("ignore:connection")
@pytest.mark.parametrize("where", ["mods", "train_mods"])
@pytest.mark.parametrize("rule", ["FedAvg", "ScaffoldM", "PAdaMFed"])
@pytest.mark.parametrize("name", MODS)
def test_mods_that_change_arrays_are_refused_with_the_reason(
    name: str, rule: str, where: str
) -> None:
    strategy = getattr(serverapp, rule)(linear_model(), **SIZES)
    grid = Room(make_app(**{where: [MODS[name]]}))
    clipping = ConfigRecord({"clipping_norm": 0.1})
    unable = where == "mods" and name in ASK_FOR_ARRAYS
    if unable or rule != "FedAvg":
        with pytest.raises(RunError) as caught:
            start(strategy, grid, rounds=2, train_config=clipping)
        text = str(caught.value)
        assert ("none of the 3 clients that are connected can say who it is" in text) is unable
        assert "take them out of the ClientApp" in text
        return
    result = start(strategy, grid, rounds=2, train_config=clipping)
    errors = [e["error"] for r in strategy.rounds for e in r.errors]
    assert len(errors) == 4
    assert all("take them out of the ClientApp" in error for error in errors)
    before = linear_model().state_dict().values()
    for found, start_value in zip(result.arrays.to_numpy_ndarrays(), before, strict=True):
        np.testing.assert_array_equal(found, start_value.numpy())


def test_an_app_that_answers_no_query_ends_the_run_at_once() -> None:
    app = make_app()
    del app._registered_funcs["query.default"]
    with (
        pytest.warns(FedoptWarning, match="connection 10.: did not tell its client id"),
        pytest.raises(RunError, match=r"No query function .* answers queries with fedopt_flwr"),
    ):
        start(serverapp.FedAvg(linear_model(), **SIZES), Room(app))


@pytest.mark.filterwarnings("ignore:connection")
def test_nodes_that_cannot_be_reached_at_first_are_waited_for() -> None:
    strategy = serverapp.FedAvg(linear_model(), **SIZES, start_timeout=0.5)
    grid = Room(make_app())
    grid.gone = {*grid.contexts}
    with pytest.raises(RunError, match=r"only 0 of 3 clients were connected within 0\.5 s"):
        start(strategy, grid)


@pytest.mark.filterwarnings("ignore:connection")
def test_nodes_that_can_be_reached_again_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    class Returning(Room):
        def _reply(self, message: Message) -> Message:
            reply = super()._reply(message)
            if len(self.seen) == 4:
                self.gone.clear()
            return reply

    monkeypatch.setattr(members, "_ASK_AGAIN_SECONDS", 0.01)
    strategy = serverapp.FedAvg(linear_model(), **SIZES, start_timeout=60)
    grid = Returning(make_app())
    grid.gone = {*grid.contexts}
    start(strategy, grid, rounds=1)
    assert [r.failures for r in strategy.rounds] == [0]
    assert strategy._inner.members.ids == [0, 1, 2]


def test_clients_that_come_at_the_last_moment_are_not_missed() -> None:
    class Late(Nodes):
        def num_available(self) -> int:
            return 0  # those of a moment ago

    sizes = {"num_clients": 3, "clients_per_round": 2, "start_timeout": 0.1}
    found = members.Members(RunConfig(federation=sizes), lambda: None, {})
    found.gather(Late(Room(make_app())), "num_clients")
    assert found.here == [0, 1, 2]


def test_a_run_that_stops_asks_nobody_in_the_rounds_that_are_left() -> None:
    strategy = serverapp.ScaffoldM(
        linear_model(), **SIZES, stop={"metric": "test_loss", "target": 1.75}
    )
    grid = Room(make_app())
    result = start(
        strategy, grid, rounds=8, evaluate_fn=lambda n, a: MetricRecord({"loss": 2 - 0.1 * n})
    )
    assert [r.round for r in strategy.rounds] == [0, 1, 2, 3]
    assert strategy.stopped is not None
    assert strategy.best is not None
    trained = [m for m in grid.seen if m.metadata.message_type == "train"]
    assert len(trained) == 3 + 3 * 2
    for found, best in zip(
        result.arrays.to_torch_state_dict().values(), strategy.best.values(), strict=True
    ):
        assert torch.equal(found, best)


def test_metrics_that_no_mean_can_hold_are_left_out() -> None:
    numbers: list[dict[str, Any]] = [
        {"num-examples": 2, "loss": 1.0, "own": [1.0, 2.0]},
        {"num-examples": 6, "loss": 3.0, "f1": float("nan")},
        {"num-examples": [1, 2], "loss": 5.0},
        {"num-examples": float("inf"), "loss": 5.0},
        {"loss": 5.0},
    ]
    Room(make_app())  # without which no message can be made
    replies = [
        Message(
            RecordDict({"metrics": MetricRecord(own)}),
            reply_to=Message(RecordDict(), 100, "evaluate"),
        )
        for own in numbers
    ]
    assert averaged(replies) == MetricRecord({"loss": 2.5})


def evaluating(answer: Callable[[int], dict[str, Any]]) -> ClientApp:
    """An app that evaluates to the numbers that `answer` gives for a client's id."""
    app = make_app()
    del app._registered_funcs["evaluate.default"]

    @app.evaluate()
    def evaluate(message: Message, context: Any) -> Message:
        found = MetricRecord(answer(context.node_config["partition-id"]))
        return Message(RecordDict({"metrics": found}), reply_to=message)

    return app


def test_failed_evaluations_are_errors_of_their_client_and_round() -> None:
    def answer(client_id: int) -> dict[str, Any]:
        if client_id == 0:
            raise OSError("no disk today")
        return {"num-examples": 4, "f1": 0.5} if client_id == 1 else {"f1": 0.1}

    grid, seen = Room(evaluating(answer)), []

    def on_round(record: Any) -> None:
        seen.append(list(record.errors))
        grid.gone = {101}

    options = {**SIZES, "clients_per_round": 3, "min_replies": 1, "fraction_evaluate": 1.0}
    strategy = serverapp.FedAvg(linear_model(), **options, on_round=on_round)
    with pytest.warns(FedoptWarning, match="none of the 3 clients asked evaluated the model; the"):
        result = start(strategy, grid, rounds=2)
    assert result.evaluate_metrics_clientapp == {1: MetricRecord({"f1": 0.5})}
    texts = [
        {e["client"]: e["error"] for e in errors if e["phase"] == "evaluate"} for errors in seen
    ]
    no_examples = "its reply holds no MetricRecord with 'num-examples' above 0, by which metrics"
    assert [sorted(own) for own in texts] == [[0, 2], [0, 1, 2]]
    assert texts[0][0] == "it failed: OSError: no disk today"
    assert texts[0][2].startswith(no_examples)
    assert texts[1][1] == "it failed: Node Unavailable"
    assert [r.failures for r in strategy.rounds] == [0, 1]


class FirstAlone(serverapp.FedAvg):
    def configure_evaluate(self, *arguments: Any) -> list[Message]:
        return list(super().configure_evaluate(*arguments))[:1]


class ItsOwnMessages(serverapp.FedAvg):
    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        return [
            Message(RecordDict({"arrays": arrays, "config": config}), node, MessageType.EVALUATE)
            for node in grid.get_node_ids()
        ]


def test_a_subclass_chooses_who_evaluates() -> None:
    app = evaluating(lambda client_id: {"num-examples": 4, "f1": 0.5 * client_id})
    options = {**SIZES, "clients_per_round": 3, "fraction_evaluate": 1.0}
    strategy: serverapp.FedAvg = FirstAlone(linear_model(), **options)
    result = start(strategy, Room(app), rounds=1)
    assert result.evaluate_metrics_clientapp[1]["f1"] in (0.0, 0.5, 1.0)
    assert strategy.rounds[0].errors == []

    def answer(client_id: int) -> dict[str, Any]:
        return {"num-examples": 4, "f1": 0.5} if client_id else {"f1": 0.1}

    strategy = ItsOwnMessages(linear_model(), **options)
    result = start(strategy, Room(evaluating(answer)), rounds=1)
    assert result.evaluate_metrics_clientapp[1] == MetricRecord({"f1": 0.5})
    assert [(e["client"], e["phase"]) for e in strategy.rounds[0].errors] == [(0, "evaluate")]


def test_seconds_of_an_evaluate_function_are_recorded() -> None:
    def slow(number: int, arrays: ArrayRecord) -> MetricRecord:
        time.sleep(0.1)
        return MetricRecord({"loss": 1.0})

    strategy = serverapp.FedAvg(linear_model(), **SIZES)
    start(strategy, Room(make_app()), rounds=2, evaluate_fn=slow)
    assert all((r.evaluation_seconds or 0) >= 0.1 for r in strategy.rounds)


def test_without_an_evaluate_function_a_run_says_so() -> None:
    app = make_app()
    del app._registered_funcs["evaluate.default"]
    strategy = serverapp.FedAvg(linear_model(), **SIZES, fraction_evaluate=1.0)
    with pytest.warns(FedoptWarning, match="fraction_evaluate: .* No evaluate function registered"):
        result = start(strategy, Room(app), rounds=1)
    assert not result.evaluate_metrics_clientapp
    assert [e["phase"] for e in strategy.rounds[0].errors] == ["evaluate"] * 3


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (
            [f"m{i}" for i in range(65)],
            "its reply holds 6[56] metrics; must be at most 64; send fewer",
        ),
        (["n" * 257], "must be of at most 256 printable characters"),
        (["a\nb"], r"a metric 'a\\nb'; a name must be"),
    ],
    ids=["many", "long", "not printable"],
)
def test_names_of_metrics_are_bounded(names: list[str], text: str) -> None:
    wrong = {"num-examples": 4, **dict.fromkeys(names, 0.5)}
    app = evaluating(lambda client_id: {"num-examples": 4, "f1": 0.1} if client_id else wrong)

    def adding(message: Message, context: Any, call_next: Callable[..., Message]) -> Message:
        reply = call_next(message, context)
        if context.node_config["partition-id"] == 0 and message.metadata.message_type == "train":
            reply.content["beside"] = MetricRecord(wrong)
        return reply

    app._registered_funcs["train.default"] = make_ffn(
        app._registered_funcs["train.default"], [adding]
    )
    options = {**SIZES, "clients_per_round": 3, "fraction_evaluate": 1.0}
    strategy = serverapp.FedAvg(linear_model(), **options)
    result = start(strategy, Room(app), rounds=1)
    assert result.evaluate_metrics_clientapp[1] == MetricRecord({"f1": 0.1})
    assert [*result.train_metrics_clientapp[1]] == ["train_loss"]
    errors = strategy.rounds[0].errors
    assert [(e["client"], e["phase"]) for e in errors] == [(0, "train"), (0, "evaluate")]
    for error in errors:
        assert re.search(text, error["error"])


@pytest.mark.parametrize(
    ("metric", "found"),
    [("accuracy", {"accuracy": 0.5}), ("test_loss", {"accuracy": 0.5}), ("f1", {"loss": 1.0})],
)
def test_a_stop_metric_that_nobody_measures_is_refused(metric: str, found: dict[str, Any]) -> None:
    stop = {"metric": metric, "patience": 1, "better": "higher"}
    strategy = serverapp.FedAvg(linear_model(), **SIZES, stop=stop)
    with pytest.raises(ConfigError, match=f"stop.metric: got '{metric}', and evaluate_fn returned"):
        start(strategy, Room(make_app()), evaluate_fn=lambda n, a: MetricRecord(found))
    with pytest.raises(ConfigError, match=f"stop.metric: got '{metric}' without an evaluate_fn"):
        start(strategy, Room(make_app()))


def test_a_stop_metric_counts_in_the_rounds_that_measure_it() -> None:
    stop = {"metric": "accuracy", "patience": 1}
    strategy = serverapp.FedAvg(linear_model(), **SIZES, stop=stop)

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        return MetricRecord({"loss": 1.0, "accuracy": 0.5}) if number % 2 else None

    start(strategy, Room(make_app()), rounds=6, evaluate_fn=evaluate)
    assert [r.round for r in strategy.rounds] == [1, 2, 3]
    assert "accuracy was not higher in 1 evaluations" in str(strategy.stopped)


def test_empty_texts_of_a_user_travel() -> None:
    grid = Room(make_app())
    strategy = serverapp.FedAvg(linear_model(), **SIZES)
    start(strategy, grid, rounds=1, train_config=ConfigRecord({"note": ""}))
    configs = [m.content["config"] for m in grid.seen if m.metadata.message_type == "train"]
    assert [config["note"] for config in configs] == ["", ""]
    assert not any(config.get("fedopt.local_parameters") == "" for config in configs)


def test_evaluation_under_a_strategy_of_flowers() -> None:
    app = make_app()
    Room(app)  # without which no message can be made
    arrays = ArrayRecord(linear_model().state_dict())
    content = RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": 1})})
    context: Any = SimpleNamespace(node_config={"partition-id": 0}, state=RecordDict())
    found = app(Message(content, 100, "evaluate"), context).content["metrics"]
    loss, count, _ = clients.Client(linear_model(), DATA[0], client_id=0, device="cpu").evaluate(
        arrays.to_numpy_ndarrays(), {}
    )
    assert (found["loss"], found["num-examples"]) == (loss, count)
    with pytest.raises(
        MessageError, match=r"lacks the records \['config'\], has \['arrays'\]; send"
    ):
        app(Message(RecordDict({"arrays": arrays}), 100, "train"), context)


def test_a_users_class_takes_no_rules_place() -> None:
    script = (
        "from fedopt_flwr import algorithms, strategies\n"
        "class FedAvg(strategies.RuleStrategy):\n    kind = algorithms.Scaffold\n"
        "class Mine(strategies.RuleStrategy):\n    kind = algorithms.Scaffold\n"
        "from fedopt_flwr import serverapp\n"
        "print(serverapp.FedAvg.other.kind.name, 'Mine' in serverapp.__all__)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["fedavg", "False"]


def test_the_summary_says_rule_and_hyperparameters(caplog: pytest.LogCaptureFixture) -> None:
    strategy = serverapp.ScaffoldM(linear_model(), **SIZES, momentum=0.25)
    with caplog.at_level("INFO", "flwr"):
        strategy.summary()
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("scaffold_m: {")
    assert "'momentum': 0.25" in line


def test_arrays_of_another_model_are_refused() -> None:
    strategy = serverapp.FedAvg(linear_model(), **SIZES)
    wrong = {"weight": torch.zeros(2, 2), "extra": torch.zeros(1)}
    with pytest.raises(ConfigError) as caught:
        strategy.start(Room(make_app()), ArrayRecord(wrong), num_rounds=1)
    text = str(caught.value)
    assert "initial_arrays: 'weight' is [2, 2] in the state_dict; the model's is [3, 4]" in text
    assert "the state_dict lacks 'bias'; give those of model.state_dict()" in text
    assert "initial_arrays: the model has no 'extra' of the state_dict" in text


def test_training_starts_at_the_arrays_that_are_given() -> None:
    strategy = serverapp.FedAvg(linear_model(), **SIZES, client_learning_rate=1e-9)
    state = {name: torch.full_like(a, 0.5) for name, a in linear_model().state_dict().items()}
    result = strategy.start(Room(make_app()), ArrayRecord(state), num_rounds=1)
    for array in result.arrays.to_numpy_ndarrays():
        np.testing.assert_allclose(array, 0.5, atol=1e-6)


class Halved(FedAvg):
    name: ClassVar[str] = "halved_by_message"

    def server_update(self, state: Any, replies: Any) -> Any:
        moved = super().server_update(state, replies)["model"]
        return state.replace(model=(state["model"] + moved) / 2)


def test_a_rule_of_your_own_and_an_open_federation() -> None:
    try:
        options = {**SIZES, "num_clients": "open", "min_clients": 2}
        strategy = serverapp.Strategy(Halved(), linear_model(), **options)
        grid = Room(make_app())
        last = grid.contexts.pop(102)

        def on_round(record: Any) -> None:
            if record.round == 2:
                grid.contexts[102] = last

        strategy._options["on_round"] = on_round
        start(strategy, grid)
        assert [r.members for r in strategy.rounds] == [{}, {}, {"joined": [2]}, {}]
    finally:
        ALGORITHMS.pop("halved_by_message", None)


class Apart(Room):
    """A room whose nodes know no rule of one's own but what their app names, as those do that run
    in processes of their own."""

    def _reply(self, message: Message) -> Message:
        with unregistered():
            return super()._reply(message)


@contextmanager
def unregistered() -> Iterator[None]:
    own = ALGORITHMS.pop("halved_by_message")
    try:
        yield
    finally:
        ALGORITHMS["halved_by_message"] = own


@pytest.mark.parametrize("parts", [{}, {"local_parameters": ["bias"]}], ids=["all", "own parts"])
def test_a_rule_of_your_own_is_known_to_nodes_in_other_processes(parts: dict[str, Any]) -> None:
    options = {**SIZES, **parts}
    try:
        strategy = serverapp.Strategy(Halved(), linear_model(), **options, fraction_evaluate=1.0)
        result = start(strategy, Apart(make_app(kind=Halved)))
        assert [r.clients for r in strategy.rounds if r.errors or len(r.clients) != 2] == []
        assert [*result.evaluate_metrics_clientapp] == [1, 2, 3, 4]
        strategy = serverapp.Strategy(Halved(), linear_model(), **options)
        start(strategy, Apart(make_app()), rounds=1)
        [error, _] = [e["error"] for e in strategy.rounds[0].errors]
        assert "kind=MyRule of clientapp.train" in error
        assert "instruction.algorithm: unknown 'halved_by_message'" in error
        strategy = serverapp.Strategy(FedAvg(), linear_model(), **options)
        start(strategy, Apart(make_app(kind=Halved)), rounds=1)
        assert "the strategy runs 'fedavg', Client 'halved_by" in str(strategy.rounds[0].errors)
    finally:
        ALGORITHMS.pop("halved_by_message", None)


def test_a_rule_in_the_place_of_its_class_is_refused() -> None:
    wrong: Any = FedAvg()
    with pytest.raises(ConfigError, match=r"kind: got FedAvg\(.*; must be a class of a rule; give"):
        clients.Client(linear_model(), DATA[0], client_id=0, kind=wrong)
    with pytest.raises(ConfigError, match=r"fedopt_flwr\.algorithm:Algorithm has no `name`; decl"):
        clients.Client(linear_model(), DATA[0], client_id=0, kind=Algorithm)


def test_one_function_may_answer_queries_and_train() -> None:
    app = ClientApp()

    @app.query()
    @app.train()
    def train(message: Message, context: Any) -> Message:
        own = {"model": linear_model(), "dataset": data(context), "device": "cpu"}
        return clientapp.train(message, context, **own)

    found = []
    for client_app in (app, make_app()):
        strategy = serverapp.ScaffoldM(linear_model(), **SIZES)
        result = start(strategy, Room(client_app))
        found.append(result.arrays.to_numpy_ndarrays()[0].tobytes())
        assert [r.failures for r in strategy.rounds] == [0] * 5
    assert found[0] == found[1]


def test_a_function_of_ones_own_evaluates_a_state_dict() -> None:
    """As those do that Flower's templates come with."""
    app, seen = make_app(), []
    del app._registered_funcs["evaluate.default"]

    @app.evaluate()
    def evaluate(message: Message, context: Any) -> Message:
        model = linear_model()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        seen.append([value.clone() for value in model.state_dict().values()])
        metrics = MetricRecord({"num-examples": len(data(context)), "eval_acc": 0.5})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    strategy = serverapp.ScaffoldM(linear_model(), fraction_evaluate=1.0, **SIZES)
    result = start(strategy, Room(app))
    assert result.evaluate_metrics_clientapp[ROUNDS] == MetricRecord({"eval_acc": 0.5})
    for found, last in zip(seen[-1], result.arrays.to_torch_state_dict().values(), strict=True):
        assert torch.equal(found, last)


def test_what_a_superlink_says_in_a_nodes_place_is_that_nodes_failure() -> None:
    grid = Room(make_app())
    strategy = serverapp.FedAvg(linear_model(), **SIZES | {"clients_per_round": 3})

    def on_round(record: Any) -> None:
        grid.gone = {101} if record.round == 1 else set()

    strategy._options["on_round"] = on_round
    start(strategy, grid, rounds=3)
    assert [r.clients for r in strategy.rounds] == [[0, 1, 2], [0, 2], [0, 1, 2]]
    assert strategy.rounds[1].errors == [
        {"client": 1, "phase": "train", "error": "it failed: Node Unavailable"}
    ]


def test_nobody_is_given_an_instruction_whose_time_is_over() -> None:
    grid = Room(make_app())
    start(serverapp.ScaffoldM(linear_model(), fraction_evaluate=1.0, **SIZES), grid, timeout=7)
    kinds = {m.metadata.message_type: m.metadata.ttl for m in grid.seen if "arrays" in m.content}
    # and the hour by which a node's clock may be ahead
    assert kinds == {"train": 3607, "evaluate": 3607}


def test_a_class_of_ones_own_reads_the_replies_of_a_round() -> None:
    seen = []

    class Counting(serverapp.FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            found = super().aggregate_train(server_round, replies)
            seen.append(len(list(replies)))
            return found

    start(Counting(linear_model(), **SIZES), Room(make_app()), rounds=2)
    assert seen == [SIZES["clients_per_round"]] * 2


def test_a_last_round_that_is_taken_back_is_not_in_the_result() -> None:
    strategy = serverapp.FedAvg(linear_model(), **SIZES)
    losses = [1.0, 1.0, float("nan")]
    seen = []

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append(arrays.to_numpy_ndarrays()[0])
        return MetricRecord({"loss": losses[number]})

    result = start(strategy, Room(make_app()), rounds=2, evaluate_fn=evaluate)
    assert [bool(r.taken_back) for r in strategy.rounds] == [False, True]
    assert not np.array_equal(seen[1], seen[2])
    np.testing.assert_array_equal(result.arrays.to_numpy_ndarrays()[0], seen[1])


def test_help_shows_a_rules_own_arguments_and_no_others() -> None:
    own = {*signature(serverapp.ScaffoldM).parameters}
    assert {"model", "momentum", "num_clients", "local_epochs", "on_round"} <= own
    for name in {*signature(strategies.ScaffoldM).parameters} - own:
        with pytest.raises(TypeError, match=f"'{name}' is not for this API; "):
            serverapp.ScaffoldM(linear_model(), **SIZES | {name: 1})

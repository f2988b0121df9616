"""The user's own module, loss, metric, data and rule: what they may be, what is refused and how."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from helpers import (
    CLASSES,
    FEATURES,
    linear_model,
    small_config,
    three_datasets,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from fedopt_flwr import ConfigError, DataError, FedoptError, RunError, simulate
from fedopt_flwr.algorithm import Algorithm
from fedopt_flwr.algorithms import ALGORITHMS, FedAvg
from fedopt_flwr.data import as_client_data
from fedopt_flwr.errors import FedoptWarning
from fedopt_flwr.own_code import load_attribute
from fedopt_flwr.run.run import Silent
from fedopt_flwr.training.dry_run import try_training
from fedopt_flwr.training.flat_model import FlatModel

HERE = __name__


class Module(nn.Module):
    """A linear layer behind something that the test wants to see."""

    def __init__(self, before: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.before = linear_model(), before

    def forward(self, x: Tensor) -> Tensor:
        self.before(x)
        return self.layer(x)


def raises(error: BaseException) -> Callable[..., Any]:
    def function(*_: Any) -> Any:
        raise error

    return function


def wide() -> nn.Module:
    return nn.Linear(FEATURES + 1, CLASSES)


def narrow() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES - 1)


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES))


MODELS = {
    "raises": (
        lambda: Module(raises(KeyError("sensor"))),
        r"model: failed on .*KeyError: 'sensor'",
    ),
    "exits": (lambda: Module(raises(SystemExit(3))), r"model: failed on .*SystemExit: 3"),
    "cannot be made": (raises(OSError("no weights")), "model: the function failed: OSError"),
    "exits when made": (raises(SystemExit(3)), "model: the function failed: SystemExit"),
    "does not fit": (
        wide,
        r"model: failed on inputs float32 \[4, 4\] and targets int64 \[4\] of client 0: .*model.na",
    ),
    "too few outputs": (narrow, r"client \d: has an example of class 2; the model has 2 outputs"),
    "no module": (lambda: 3, "the factory returned a int; it must return an nn.Module"),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_cannot_train_is_refused_before_the_run(case: str, tmp_path: Path) -> None:
    model, text = MODELS[case]
    config = small_config(output={"directory": tmp_path / "run"})
    with pytest.raises(FedoptError, match=text) as caught:
        simulate(config, model=model, client_data=three_datasets())
    assert caught.value.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_a_module_in_place_of_a_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="model: got an object of type Linear; give a function"):
        simulate(small_config(), model=linear_model(), client_data=three_datasets())


LOSSES = {
    "raises": (raises(ZeroDivisionError("zero")), r"model.loss: failed on .*ZeroDivisionError"),
    "one number an example": (
        lambda outputs, targets: functional.cross_entropy(outputs, targets, reduction="none"),
        r"model.loss: returned float32 \[4\].* must return the mean over the batch",
    ),
    "none": (lambda outputs, targets: None, "model.loss: returned NoneType"),
    "detached": (lambda outputs, targets: outputs.detach().mean(), "without a gradient"),
    "no function": ("mse", "loss: got an object of type str; must be a function"),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_that_is_none_is_refused_before_the_run(case: str) -> None:
    loss, text = LOSSES[case]
    with pytest.raises(ConfigError, match=text):
        simulate(small_config(), model=linear_model, client_data=three_datasets(), loss=loss)


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        (raises(RuntimeError("metric")), "model.metric: failed on .*RuntimeError: metric"),
        (lambda outputs, targets: "good", "model.metric: failed on .*could not convert"),
        (3, "metric: got an object of type int; must be a function"),
    ],
)
def test_a_metric_that_is_none_is_refused_before_the_run(metric: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        simulate(
            small_config(),
            model=linear_model,
            client_data=three_datasets(),
            test_data=three_datasets()[0],
            metric=metric,
        )


def test_a_metric_that_fails_later_ends_the_run_with_its_text() -> None:
    calls: list[int] = []

    def metric(outputs: Tensor, targets: Tensor) -> float:
        calls.append(len(targets))
        if len(calls) == 4:  # after the trial, the initial model and round 1
            raise ValueError("no positives")
        return 1.0

    with pytest.raises(RunError, match="evaluation on the test data failed: ValueError: no posit"):
        simulate(
            small_config(),
            model=linear_model,
            client_data=three_datasets(),
            test_data=three_datasets()[0],
            metric=metric,
        )


class Unreadable(Dataset):
    """`first` examples can be read."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index >= self.first:
            raise ValueError(f"image {index} is broken")
        return torch.full((FEATURES,), float(index)), index % CLASSES


class NoPairs(Unreadable):
    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(2, FEATURES)


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        yield torch.zeros(FEATURES), 0


def changed(inputs: Callable[[Tensor], Tensor], labels: Callable[[Tensor], Tensor]) -> list[Any]:
    return [TensorDataset(inputs(d.tensors[0]), labels(d.tensors[1])) for d in three_datasets()]


def same(tensor: Tensor) -> Tensor:
    return tensor


DATA = {
    "no list": (
        dict(enumerate(three_datasets())),
        "client_data: got an object of type dict; must be a list",
    ),
    "arrays": (
        [(np.zeros((9, 4)), np.zeros(9))] * 3,
        "client 0: data set: .*type tuple.*as_tensor",
    ),
    "endless": ([Endless()] * 3, "client 0: data set: got an IterableDataset .*without a length"),
    "a number": ([5, 5, 5], "client 0: data set: got an object of type int"),
    "no pairs": ([NoPairs(9)] * 3, "client 0: .*got Tensor instead of a pair"),
    "unreadable": (
        [Unreadable(0)] * 3,
        "client 0: .*example 0 cannot be read: ValueError: image 0",
    ),
    "float64": (changed(Tensor.double, same), r"failed on inputs float64 \[4, 4\]"),
    "columns": (changed(same, lambda y: y[:, None]), r"model.loss: .*targets int64 \[4, 1\]"),
    "negative": (changed(same, lambda y: y - 1), r"client \d: has an example of class -1"),
}


@pytest.mark.parametrize("case", DATA)
def test_data_that_no_client_can_use_is_refused_before_the_run(case: str) -> None:
    data, text = DATA[case]
    with pytest.raises(FedoptError, match=text) as caught:
        simulate(small_config(), model=linear_model, client_data=data)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("test", "text"),
    [
        (TensorDataset(torch.zeros(0, 4), torch.zeros(0).long()), "test data: has no example"),
        (TensorDataset(torch.zeros(5, 7), torch.zeros(5).long()), r"\[5, 7\] .*of the test data"),
        (TensorDataset(torch.zeros(5, 4), torch.full((5,), 9)), "the test data: .*of class 9"),
        (7, "test data: data set: got an object of type int"),
    ],
)
def test_test_data_that_cannot_be_used_are_refused_before_the_run(test: Any, text: str) -> None:
    with pytest.raises(FedoptError, match=text):
        simulate(small_config(), model=linear_model, client_data=three_datasets(), test_data=test)


@pytest.mark.filterwarnings("ignore:client .*failed in .* rounds in which")
@pytest.mark.parametrize(
    "odd", [Unreadable(0), TensorDataset(torch.zeros(20, 7), torch.zeros(20).long())]
)
def test_one_client_that_cannot_be_used_is_a_warning_and_its_failure(odd: Any) -> None:
    data = three_datasets()
    data[1] = odd
    with pytest.warns(FedoptWarning, match=r"client 1.*; this client will fail in its rounds"):
        result = simulate(small_config(), model=linear_model, client_data=data)
    assert [(r.clients, r.failures) for r in result.rounds] == [([0, 2], 1)] * 2


def test_a_label_that_the_model_has_not_is_refused_wherever_it_is() -> None:
    data = three_datasets()
    data[2].tensors[1][7] = 5
    with pytest.raises(DataError, match="client 2: has an example of class 5; the model has 3"):
        simulate(small_config(), model=linear_model, client_data=data)
    data[2].tensors[1][7] = -100  # what cross-entropy leaves out
    assert simulate(small_config(), model=linear_model, client_data=data).summary["failures"] == 0


def test_the_trial_leaves_no_trace() -> None:
    """Batch norm's statistics, gradients and torch's generator are as they were."""
    model = FlatModel(with_batch_norm())
    dropping = FlatModel(nn.Sequential(nn.Dropout(), linear_model()))
    before = torch.get_rng_state()
    start = {k: v.clone() for k, v in model.read_buffers().items()}
    data = {0: as_client_data(three_datasets()[0])}
    assert try_training(model, functional.cross_entropy, data) is False
    assert all(torch.equal(v, start[k]) for k, v in model.read_buffers().items())
    assert not model.gradient.any()
    assert try_training(dropping, functional.cross_entropy, data) is True
    assert torch.equal(torch.get_rng_state(), before)


CALLS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a number": (5, {}, "config: got 5; must be a RunConfig"),
    "no names": ({1: 2}, {}, r"config: got \{1: 2\}"),
    "workers": ({}, {"workers": 0}, "workers: got 0; must be a whole number from 1"),
    "no section": ({"federation": 5}, {}, "federation: got 5; must be a section of keys"),
    "text": ({"federation": {"num_clients": "20"}}, {}, "num_clients: got '20'"),
    "truth": ({"federation": {"seed": True}}, {}, "federation.seed: got True"),
    "fraction": ({"federation": {"num_clients": 4.0}}, {}, "num_clients: got 4.0"),
}


@pytest.mark.parametrize("case", CALLS)
def test_arguments_of_another_kind_are_refused(case: str) -> None:
    config, options, text = CALLS[case]
    with pytest.raises(ConfigError, match=text):
        simulate(config, **options)


class Nameless(Algorithm):
    summary: ClassVar[str] = "has everything but a name"


def test_a_rule_without_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    with pytest.raises(ConfigError, match=rf"the class {HERE}:Nameless has no `name`; declare it"):
        simulate({"algorithm": {"name": f"{HERE}:Nameless"}})


def exiting_loader(**_: Any) -> Any:
    sys.exit(9)


def number_for_data(**_: Any) -> Any:
    return 5, None


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        ("exiting_loader", f"data.name: '{HERE}:exiting_loader' failed: SystemExit: 9"),
        ("number_for_data", "data set: got an object of type int"),
    ],
)
def test_a_loader_that_gives_no_data_is_refused(
    loader: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    with pytest.raises(FedoptError, match=text):
        simulate(small_config(data={"name": f"{HERE}:{loader}"}))


def test_problems_of_all_parts_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        simulate(
            {
                "federation": {"clients_per_round": 99},
                "algorithm": {"name": "fedavg", "client_learning_rate": -1},
                "rules": {"fedavg": {"momentun": 1}, "scafold": {}},
            }
        )
    assert [line.partition(":")[0] for line in caught.value.problems] == [
        "federation.clients_per_round",
        "rules",
        "algorithm.client_learning_rate",
        "rules.fedavg.momentun",
    ]
    with pytest.raises(ConfigError) as caught:
        simulate(
            {
                "model": {"loss": "mse", "metric": "f2"},
                "data": {"name": "digit"},
                "training": {"device": "cuda:7"},
            }
        )
    assert [line.partition(":")[0] for line in caught.value.problems] == [
        "training.device",
        "model.loss",
        "model.metric",
        "data.name",
    ]


def test_a_module_shared_between_two_models_is_refused() -> None:
    shared = nn.Linear(FEATURES, 8)
    with pytest.raises(ConfigError, match="returned the same module twice, or parts of it"):
        simulate(
            small_config(),
            model=lambda: nn.Sequential(shared, nn.Linear(8, CLASSES)),
            client_data=three_datasets(),
            workers=2,
        )


def test_another_class_of_a_rules_name_is_another_rule(tmp_path: Path) -> None:
    def rule(folder: str, factor: str) -> dict[str, Any]:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(
            "from typing import ClassVar\n"
            "from fedopt_flwr.algorithms import FedAvg\n"
            "class Mine(FedAvg):\n"
            "    name: ClassVar[str] = 'mine'\n"
            "    def client_update(self, received, state, objective):\n"
            "        upload, state = super().client_update(received, state, objective)\n"
            f"        return {{'delta': {factor} * upload['delta']}}, state\n"
        )
        file = tmp_path / folder / "run.toml"
        file.write_text('[algorithm]\nname = "mine:Mine"\n[federation]\nnum_rounds = 1\n')
        return simulate(file).rounds[-1].test_loss

    losses = [rule("one", "1"), rule("two", "0")]
    ALGORITHMS.pop("mine")
    sys.modules.pop("mine")
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"model": {"options": {"act": nn.ReLU}}}, "model.options: got .*must hold text, numbers"),
        ({"data": {"options": {"q": None}}}, "data.options: got .*must hold text, numbers"),
        ({"model": {"name": "os:path"}}, "model.name: 'os:path' is no function or class"),
        ({"algorithm": {"momentum": True}}, "algorithm.momentum: got True"),
        (
            {"model": {"name": "nope", "loss": "no"}},
            "model.loss: unknown 'no'(.|\\n)*model.name: unk",
        ),
    ],
)
def test_values_of_another_kind_are_refused(section: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        simulate(section)


def test_a_run_in_which_no_reply_counts_warns() -> None:
    calls: list[int] = []

    def fails(x: Tensor) -> None:
        calls.append(1)
        if len(calls) > 1:  # after the trial
            raise ValueError("sensor 7 is blind")

    with pytest.warns(FedoptWarning, match=r"no client's reply.*client \d: ValueError: sensor 7"):
        result = simulate(small_config(), model=lambda: Module(fails), client_data=three_datasets())
    assert result.last_error is not None


def test_an_import_keeps_what_others_add_to_the_path(tmp_path: Path) -> None:
    """As Ray does, which Flower may import in another thread at the same time."""
    (tmp_path / "adds.py").write_text(
        "import sys\nsys.path.insert(0, '/from/elsewhere')\nvalue = 3\n"
    )
    before = list(sys.path)
    try:
        assert load_attribute("model.name", "adds:value", [tmp_path]) == 3
        assert sys.path == ["/from/elsewhere", *before]
    finally:
        sys.path[:] = before


class Forgetful(FedAvg):
    """Raises on the server."""

    name: ClassVar[str] = "forgetful"

    def server_update(self, state: Any, replies: Any) -> Any:
        raise KeyError("momentum")


class Dark(Silent):
    def on_start(self, *arguments: Any) -> None:
        raise ValueError("screen is off")


def test_a_rule_that_raises_on_the_server_is_named_with_the_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    try:
        with pytest.raises(
            RunError, match=rf"'{HERE}:Forgetful' failed: KeyError: 'momentum' \(.*{HERE}.py, line"
        ):
            simulate({"algorithm": {"name": f"{HERE}:Forgetful"}})
        with pytest.raises(ValueError, match="screen is off"):  # a listener is no rule
            simulate({"algorithm": {"name": f"{HERE}:Forgetful"}}, listener=Dark())
    finally:
        ALGORITHMS.pop("forgetful", None)

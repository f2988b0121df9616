"""An error in the user's own code is told with its file and line."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import as_datasets, linear_model, open_run, small_config, softmax_clients
from torch import nn

from fedopt_flwr import FedoptError, RunConfig, simulate
from fedopt_flwr.own_code import place_of

OWN = """
import json
import torch
from torch.utils.data import Dataset, TensorDataset

X, Y = torch.ones(20, 4), torch.arange(20) % 3
ROUNDS = []


def fail(where, asked):
    if where == asked:
        return {}["missing"]  # line 12


class Rows(Dataset):
    def __init__(self, where):
        self.where = where

    def __len__(self):
        return 20

    def __getitem__(self, index):
        fail("item", self.where)
        return X[index], Y[index]


def load(num_clients, seed, where=""):
    fail("load", where)
    return [Rows(where)] * num_clients, TensorDataset(X, Y)


class Net(torch.nn.Module):
    def __init__(self, where=""):
        super().__init__()
        fail("init", where)
        self.layer, self.where = torch.nn.Linear(4, 3), where

    def forward(self, x):
        fail("forward", self.where)
        return self.layer(x)


def loss(outputs, targets):
    return fail("loss", "loss")


def metric(outputs, targets):
    return fail("metric", "metric")


def parse(outputs, targets):
    return json.loads("nothing")


class Optional(torch.nn.Module):
    def __init__(self, weight=None):
        super().__init__()

    def forward(self, outputs, targets):
        return torch.nn.functional.cross_entropy(outputs, targets)


class Needy(Optional):
    def __init__(self, weight):
        super().__init__()
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.delitem(sys.modules, "ownplace", raising=False)
    (tmp_path / "ownplace.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return small_config(data={"name": "ownplace:load"}, model={"name": "ownplace:Net"})


@pytest.mark.parametrize(
    ("section", "values", "text"),
    [
        ("data", {"options": {"where": "load"}}, "data.name: .*"),
        ("data", {"options": {"where": "item"}}, "client 0: .*"),
        ("model", {"options": {"where": "init"}}, "model.options: .*"),
        ("model", {"options": {"where": "forward"}}, "model: failed on .*"),
        ("model", {"loss": "ownplace:loss"}, "model.loss: .*"),
        ("model", {"metric": "ownplace:metric"}, "model.metric: .*"),
    ],
)
def test_what_fails_before_the_run_says_where(
    own: dict[str, Any], section: str, values: dict[str, Any], text: str
) -> None:
    own[section] |= values
    with pytest.raises(FedoptError, match=rf"{text}KeyError: 'missing' \(ownplace.py, line 12\)"):
        simulate(own)


def test_a_library_that_the_users_code_calls_is_not_the_place(own: dict[str, Any]) -> None:
    own["model"] |= {"metric": "ownplace:parse"}
    line = OWN.splitlines().index('    return json.loads("nothing")') + 1
    with pytest.raises(FedoptError, match=rf"JSONDecodeError: .* \(ownplace.py, line {line}\)"):
        simulate(own)


def test_a_module_that_cannot_be_imported_says_where(tmp_path: Path, own: dict[str, Any]) -> None:
    (tmp_path / "owntop.py").write_text("import ownplace\n\nownplace.fail(1, 1)\n")
    own["model"] = {"name": "owntop:Net"}
    with pytest.raises(FedoptError, match=r"cannot import 'owntop:Net' .*\(ownplace.py, line 12\)"):
        simulate(own)


def test_errors_without_own_code_have_no_place() -> None:
    def caught(function: Any) -> BaseException:
        try:
            function()
        except Exception as error:
            return error
        raise AssertionError

    here = str(Path(__file__).name)
    assert here in place_of(caught(lambda: json.loads("nothing")))
    with pytest.raises(FedoptError) as refused:
        RunConfig(federation=5)
    assert here in place_of(refused.value)
    assert place_of(ValueError("never raised")) == ""


class Late(nn.Module):
    """Fails in training, after the trial."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear_model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Late.calls += 1
        if Late.calls > 1:
            raise ZeroDivisionError("sensor")
        return self.layer(x)


def test_a_failure_in_training_names_the_place_and_is_logged_with_its_traceback(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    Late.calls = 0
    caplog.set_level(logging.CRITICAL, "fedopt_flwr")
    run = open_run(small_config(), as_datasets(softmax_clients([9] * 3)), Late)
    line = (
        Path(__file__)
        .read_text()
        .splitlines()
        .index('            raise ZeroDivisionError("sensor")')
        + 1
    )
    text = run.records[0].errors[0]["error"]
    assert text.startswith("ZeroDivisionError: sensor (")
    assert text.endswith(f"{Path(__file__).name}, line {line})")
    assert capfd.readouterr().err == ""
    Late.calls = 0
    caplog.set_level(logging.ERROR, "fedopt_flwr")
    open_run(small_config(), as_datasets(softmax_clients([9] * 3)), Late)
    assert caplog.messages[:2] == ["client 0, round 1", "client 1, round 1"]
    assert 'raise ZeroDivisionError("sensor")' in caplog.text


def test_nothing_is_printed_unless_a_handler_is_attached(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger("fedopt_flwr"), "propagate", False)
    logging.getLogger("fedopt_flwr").error("client 0, round 1")
    assert capfd.readouterr().err == ""


def test_a_class_as_loss_or_metric_is_made_where_it_can_be(own: dict[str, Any]) -> None:
    own["model"] |= {"loss": "torch.nn:CrossEntropyLoss", "metric": "ownplace:Optional"}
    expected = simulate({**own, "model": {"name": "ownplace:Net"}})
    result = simulate(own)
    assert result.parameters.tobytes() == expected.parameters.tobytes()
    given = simulate(
        {**own, "model": {"name": "ownplace:Net"}},
        loss=nn.CrossEntropyLoss,
        metric=nn.CrossEntropyLoss,
    )
    assert given.parameters.tobytes() == expected.parameters.tobytes()
    assert given.rounds[-1].test_metric == result.rounds[-1].test_metric


@pytest.mark.parametrize("field", ["loss", "metric"])
def test_a_class_that_wants_arguments_is_refused_with_the_remedy(
    own: dict[str, Any], field: str
) -> None:
    model = {"name": "ownplace:Net"}
    own["model"] = {**model, field: "ownplace:Needy"}
    text = r"'Needy' is a class, .*argument: 'weight'.*`chosen = Needy\(...\)`"
    with pytest.raises(FedoptError, match=rf"model.{field}: {text}"):
        simulate(own)
    own["model"] = {**model, field: "ownplace:X"}
    with pytest.raises(
        FedoptError, match=rf"model.{field}: got an object of type Tensor; must be a"
    ):
        simulate(own)
    own["model"] = model
    with pytest.raises(FedoptError, match=rf"{field}: 'Linear' is a class"):
        simulate(own, **{field: nn.Linear})


def test_a_home_folder_is_expanded_wherever_data_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedopt_flwr.data.files import cache_root, configured_root

    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x").mkdir()
    assert configured_root(Path("~/x")) == tmp_path / "x"
    monkeypatch.setenv("FEDOPT_DATA", "~/x")
    assert configured_root(None) == tmp_path / "x"
    monkeypatch.setenv("XDG_CACHE_HOME", "~/cache")
    assert cache_root() == tmp_path / "cache" / "fedopt-flwr" / "data"
    config = RunConfig(data={"name": "npz", "path": "~/x"})
    assert config.to_dict()["data"]["path"] == str(tmp_path / "x")
    with pytest.raises(FedoptError, match=r"data.path: '~nobody-of-this-name/x' is not a folder"):
        configured_root(Path("~nobody-of-this-name/x"))

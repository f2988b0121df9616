"""Models that start from a file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import linear_model
from safetensors.torch import load_file, save_file
from streams import ClientThread, ServerThread
from torch import nn

from fedopt_flwr import ConfigError, RunConfig, resume, serverapp, simulate, strategies
from fedopt_flwr.errors import FedoptWarning
from fedopt_flwr.models.weights import load_weights
from fedopt_flwr.run.hosts import ClientHost

OWN_CODE = """
import torch

def make():
    trunk = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.BatchNorm1d(8))
    for parameter in trunk.parameters():
        parameter.requires_grad_(False)
    return torch.nn.Sequential(trunk, torch.nn.ReLU(), torch.nn.Linear(8, 10))
"""


def config_of(folder: Path, **sections: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "algorithm": {"name": "scaffold_m"},
        "federation": {"num_clients": 3, "clients_per_round": 2, "num_rounds": 2},
        "training": {"local_steps": 2, "device": "cpu"},
        "model": {"name": "logistic"},
        "output": {"directory": folder},
    }
    return {
        name: {**config.get(name, {}), **sections.get(name, {})} for name in {**config, **sections}
    }


def test_a_run_starts_where_another_ended(tmp_path: Path) -> None:
    first = simulate(config_of(tmp_path / "first"))
    weights = tmp_path / "first" / "model.safetensors"
    still = {"name": "fedavg", "client_learning_rate": 1e-12}
    second = simulate(config_of(tmp_path / "second", model={"weights": weights}, algorithm=still))
    torch.testing.assert_close(torch.tensor(second.parameters), torch.tensor(first.parameters))
    assert RunConfig.from_file(tmp_path / "second" / "config.toml").model.weights == weights


def test_names_and_shapes_are_strict_unless_said_otherwise(tmp_path: Path) -> None:
    module, path = linear_model(), tmp_path / "w.safetensors"
    state = {f"net.{n}": torch.full_like(a, 2.0) for n, a in module.state_dict().items()}
    save_file(state | {"head.weight": torch.zeros(1)}, path)

    def problem(*arguments: Any, **options: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            load_weights(linear_model(), *arguments, **options)
        return str(caught.value)

    text = problem(path)
    assert f"model.weights: {str(path)!r} lacks '" in text
    assert "the model has no 'head.weight', 'net." in text
    assert "name the prefix (model.weights_prefix) or say model.weights_strict = false" in text
    assert "nothing in" in problem(path, strict=False)
    load_weights(module, path, "net.")
    assert all(bool((a == 2).all()) for a in module.state_dict().values())
    (first, *others) = linear_model().state_dict()
    part = {first: torch.ones_like(linear_model().state_dict()[first])}
    fresh = linear_model()
    said = (
        "strict = false: 1 of the model's 2 arrays stay as they are .'bias'., 0 of the state_dict"
    )
    with pytest.warns(FedoptWarning, match=said):
        load_weights(fresh, part, strict=False)
    assert bool((fresh.state_dict()[first] == 1).all())
    for name in others:
        assert torch.equal(fresh.state_dict()[name], linear_model().state_dict()[name])
    wrong = dict.fromkeys(state, torch.zeros(7))
    assert f"{first!r} is [7] in the state_dict; the model's is [3, 4]" in problem(wrong, "net.")
    path.write_bytes(b"garbage")
    assert f"cannot read {str(path)!r}" in problem(path)
    assert "must be a safetensors file" in problem(tmp_path / "none.safetensors")


def test_values_that_nothing_can_start_from_are_refused_by_name(tmp_path: Path) -> None:
    module, path = linear_model(), tmp_path / "w.safetensors"
    module.register_buffer("mask", torch.tensor([0.0, -torch.inf]))  # a constant of the model
    state = module.state_dict()
    load_weights(module, state)
    spoilt = state["weight"].clone()
    spoilt[0, :2] = torch.tensor([torch.nan, torch.inf])
    save_file({**state, "weight": spoilt, "mask": torch.tensor([torch.nan, 0.0])}, path)
    with pytest.raises(ConfigError) as caught:
        load_weights(module, path)
    assert "model.weights: 'weight' holds 2 values that are not finite in" in str(caught.value)
    assert "'mask' holds 1 values that are not finite" in str(caught.value)
    assert bool(module.weight.isfinite().all())
    with pytest.raises(ConfigError, match="'bias' is ndarray in the state_dict; the model's is"):
        load_weights(module, {**state, "bias": state["bias"].numpy()})


def tied_model() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    return module


def test_unlike_values_of_tied_names_are_refused() -> None:
    state = {name: value.clone() for name, value in tied_model().state_dict().items()}
    state["1.weight"] = state["0.weight"].clone()
    load_weights(tied_model(), state)
    state["1.weight"][0, 0] += 1
    with pytest.raises(
        ConfigError, match=r"'0\.weight' and '1\.weight' are one array of the model"
    ):
        load_weights(tied_model(), state)
    del state["0.weight"]
    module = tied_model()
    load_weights(module, state)
    assert torch.equal(module[0].weight, state["1.weight"])


def test_names_of_compiled_modules_are_those_of_the_module_inside() -> None:
    plain, compiled = linear_model(), torch.compile(linear_model())
    with torch.no_grad():
        plain.weight.fill_(2.0)
    load_weights(compiled, plain.state_dict())
    assert bool((compiled.state_dict()["_orig_mod.weight"] == 2).all())
    inside = {f"net.{name}": value for name, value in compiled.state_dict().items()}
    for module in (linear_model(), torch.compile(linear_model())):
        for prefix in ("net.", "net._orig_mod."):
            load_weights(module, inside, prefix)
            assert all(bool((p == 2).all()) for n, p in module.named_parameters() if "weight" in n)


def test_a_run_in_python_starts_from_a_state_dict(tmp_path: Path) -> None:
    state = {"1.weight": torch.full((10, 64), 0.5), "1.bias": torch.full((10,), 0.5)}
    config = config_of(tmp_path / "run", output={"checkpoint_every": 1})
    config["algorithm"] = {"name": "fedavg", "client_learning_rate": 1e-12}
    config["model"]["weights"] = tmp_path / "none.safetensors"
    with pytest.raises(Stop):
        simulate(config, weights=state, listener=Stopping())
    with pytest.raises(ConfigError, match="weights"):
        resume(tmp_path / "run")
    found = resume(tmp_path / "run", weights=state).parameters
    np.testing.assert_allclose(found, 0.5, atol=1e-6)
    with pytest.raises(ConfigError, match=r"model\.weights: '1\.bias' is \[3\] in the state_dict"):
        simulate(config, weights={**state, "1.bias": torch.zeros(3)})


@pytest.mark.parametrize("strategy", [partial(strategies.FedAvg, num_rounds=1), serverapp.FedAvg])
def test_problems_of_a_strategys_weights_name_its_own_options(strategy: Any) -> None:
    sizes = {"num_clients": 2, "clients_per_round": 2}
    state = {f"net.{n}": torch.full_like(a, 3.0) for n, a in linear_model().state_dict().items()}
    text = r"^weights: the state_dict lacks .* \(weights_prefix\) or say weights_strict = false"
    with pytest.raises(ConfigError, match=text):
        strategy(linear_model(), weights=state, **sizes)
    del state["net.bias"]
    options = {"weights": state, "weights_prefix": "net.", "weights_strict": False}
    with pytest.warns(FedoptWarning, match="^weights_strict = false: 1 of the model's 2"):
        made = strategy(linear_model(), **options, **sizes)
    made = getattr(made, "_inner", made)
    assert bool((made.model.module.weight == 3).all())
    assert torch.equal(made.model.module.bias, linear_model().bias)
    with pytest.raises(
        ConfigError, match=r"^weights: got an object of type list; must be a state_"
    ):
        strategy(linear_model(), weights=[1.0], **sizes)
    with pytest.raises(ConfigError, match=r"^weights: cannot read 'none\.safetensors'"):
        strategy(linear_model(), weights="none.safetensors", **sizes)
    for name, value in (("weights_prefix", None), ("weights_strict", "false")):
        with pytest.raises(ConfigError, match=rf"model\.{name}: got {value!r}; should be a valid"):
            strategy(linear_model(), **{"weights": state, name: value}, **sizes)
    with pytest.raises(ConfigError, match=r"^weights_prefix: got 'net\.' without weights"):
        strategy(linear_model(), weights_prefix="net.", **sizes)


def test_what_is_said_of_weights_needs_them(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run")
    config["model"]["weights_prefix"] = "net."
    with pytest.raises(ConfigError, match=r"model\.weights_strict: got 'net\.' and True without"):
        simulate(config)


def test_strategies_of_both_kinds_start_from_a_file_or_a_state_dict(tmp_path: Path) -> None:
    state = {n: torch.full_like(a, 3.0) for n, a in linear_model().state_dict().items()}
    save_file(state, tmp_path / "w.safetensors")
    sizes: dict[str, Any] = {"num_clients": 2, "clients_per_round": 2}
    for weights in (str(tmp_path / "w.safetensors"), tmp_path / "w.safetensors", state):
        one = strategies.FedAvg(linear_model(), **sizes, num_rounds=1, weights=weights)
        other = serverapp.FedAvg(linear_model(), **sizes, weights=weights)
        for strategy in (one, other._inner):
            assert bool((strategy.model.vector == 3).all())


class Stop(Exception): ...


class Stopping:
    def on_start(self, *_: Any) -> None: ...

    def on_round(self, record: Any) -> None:
        if record.round == 1:
            raise Stop


@pytest.mark.filterwarnings("ignore:--resume")
def test_a_file_that_was_changed_since_the_checkpoint_is_named(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    config = config_of(tmp_path / "run", output={"checkpoint_every": 1}, model={"weights": path})

    simulate(config_of(tmp_path / "names"))
    names = load_file(tmp_path / "names" / "model.safetensors")
    save_file(names, path)
    with pytest.raises(Stop):
        simulate(config, listener=Stopping())
    save_file({n: a + 1 for n, a in names.items()}, path)
    with pytest.warns(UserWarning, match=r"model\.weights: the file was changed since"):
        resume(tmp_path / "run")


@pytest.mark.filterwarnings("ignore:client 0. failed in")
def test_what_does_not_travel_is_the_same_on_both_sides_or_the_client_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_trunk.py").write_text(OWN_CODE)
    monkeypatch.chdir(tmp_path)
    simulate(config_of(tmp_path / "names", model={"name": "own_trunk:make"}))
    state = load_file(tmp_path / "names" / "model.safetensors")
    path = tmp_path / "w.safetensors"
    save_file({n: a + 0.1 if a.is_floating_point() else a for n, a in state.items()}, path)
    model = {"name": "own_trunk:make", "weights": path}
    alone = simulate(config_of(tmp_path / "alone", model=model))
    config = config_of(tmp_path / "run", model=model)
    config["transport"] = {"keep_alive_seconds": 5}
    without = RunConfig(federation={"num_clients": 5}, model={"name": "own_trunk:make"})
    with ServerThread(config) as server:
        wrong = ClientThread(server, 0, tmp_path / "state", host=ClientHost(without, [0]))
        others = [ClientThread(server, i, tmp_path / "state") for i in (1, 2)]
        result = server.result()
    errors = [text for _, client, text in server.errors if client == 0]
    assert "'0.1.weight' does not travel; give both the same file" in errors[0]
    assert "starts from a file that this client lacks" in errors[0]
    config["output"] = {"directory": tmp_path / "again"}
    with ServerThread(config) as server:
        others = [ClientThread(server, i, tmp_path / "other") for i in range(3)]
        result = server.result()
    assert result.parameters.tobytes() == alone.parameters.tobytes()
    for thread in [wrong, *others]:
        thread.stop()

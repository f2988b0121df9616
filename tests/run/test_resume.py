"""Going on with a run: what must be as it was, what is refused, and that nothing is lost."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    SOFTMAX_DATA,
    At,
    checkpointed,
    linear_model,
    model_bytes,
    softmax_config,
    without_times,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from fedopt_flwr import ConfigError, RunConfig, resume, simulate
from fedopt_flwr.algorithm import Plan
from fedopt_flwr.data import FederatedData, as_client_data, fingerprint
from fedopt_flwr.data.client_data import DatasetData
from fedopt_flwr.errors import FedoptWarning
from fedopt_flwr.run.directory import RunDirectory
from fedopt_flwr.run.resuming import _require_unchanged, read_run, require_same_clients


class Stop(Exception):
    pass


def stop() -> None:
    raise Stop


@pytest.mark.parametrize("every", [3, 4])  # the last checkpoint is of the last round, or is not
def test_a_run_that_stopped_before_its_results_were_written_is_finished(
    tmp_path: Path, every: int
) -> None:
    run = tmp_path / "run"
    simulate(checkpointed(run, every=every))
    before, summary = model_bytes(run), (run / "summary.json").read_text()
    for name in ("model.safetensors", "summary.json", "curves.png"):
        (run / name).unlink()
    result = resume(run)
    assert model_bytes(run) == before
    now, then = json.loads((run / "summary.json").read_text()), json.loads(summary)
    times = {"seconds", "simulated_seconds"}
    assert {k: v for k, v in now.items() if k not in times} == {
        k: v for k, v in then.items() if k not in times
    }
    assert [r.round for r in result.rounds] == list(range(10))
    assert (run / "curves.png").exists()


OWN = """
from pathlib import Path
import numpy as np
import torch

def load(num_clients, seed):
    rows = np.load(Path(__file__).with_name("rows.npy"))
    data = torch.utils.data.TensorDataset(torch.as_tensor(rows), torch.arange(len(rows)) % 3)
    return data, data

def net():
    return torch.nn.Linear(4, 3)
"""


def own_run(folder: Path) -> RunConfig:
    rows = np.random.default_rng(0).normal(size=(120, 4)).astype(np.float32)
    np.save(folder / "rows.npy", rows)
    (folder / "mine.py").write_text(OWN)
    (folder / "run.toml").write_text(
        "[federation]\nnum_clients = 4\nclients_per_round = 2\nnum_rounds = 6\n"
        '[algorithm]\nname = "fedavg"\n'
        '[data]\nname = "mine:load"\n[data.partition]\nkind = "iid"\n'
        f'[model]\nname = "mine:net"\n[output]\ncheckpoint_every = 4\ndirectory = "{folder}/run"\n'
    )
    return RunConfig.from_file(folder / "run.toml")


def test_other_data_is_not_gone_on_with(tmp_path: Path) -> None:
    simulate(own_run(tmp_path))
    before = model_bytes(tmp_path / "run")
    assert resume(tmp_path / "run").rounds[-1].round == 6
    assert model_bytes(tmp_path / "run") == before
    rows = np.load(tmp_path / "rows.npy")
    rows[7, 2] += 1e-3
    np.save(tmp_path / "rows.npy", rows)
    with pytest.raises(ConfigError, match=r"--resume: the training data of 'mine:load' is not tha"):
        resume(tmp_path / "run")
    assert model_bytes(tmp_path / "run") == before


@pytest.mark.parametrize("number", [2, 6])  # before the first checkpoint, of round 4, and after it
def test_own_code_that_was_changed_is_said(tmp_path: Path, number: int) -> None:
    def change() -> None:
        (tmp_path / "mine.py").write_text(OWN + "# mended\n")

    simulate(own_run(tmp_path), listener=At(number, change))
    sys.modules.pop("mine")
    with pytest.warns(FedoptWarning, match="--resume: mine:load, mine:net: the file was changed"):
        resume(tmp_path / "run")


def test_another_data_folder_of_the_environment_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    for place, shift in (("here", 0.0), ("there", 1.0)):
        (tmp_path / place).mkdir()
        for part in ("train", "test"):
            x = rng.normal(size=(80, 4)) + shift
            np.savez(tmp_path / place / f"{part}.npz", x=x, y=np.arange(80) % 4)
    settings = checkpointed(tmp_path / "run", "fedavg")
    settings["data"] = {"name": "npz", "partition": {"kind": "iid"}}
    monkeypatch.setenv("FEDOPT_DATA", str(tmp_path / "here"))
    simulate(settings)
    monkeypatch.setenv("FEDOPT_DATA", str(tmp_path / "there"))
    with pytest.raises(ConfigError, match=r"training data of 'npz' is not that.*FEDOPT_DATA"):
        resume(tmp_path / "run")
    monkeypatch.setenv("FEDOPT_DATA", str(tmp_path / "here"))
    assert resume(tmp_path / "run").rounds[-1].round == 9


def test_states_that_are_with_other_processes_are_not_taken_for_zero(tmp_path: Path) -> None:
    """A checkpoint as a server of processes writes it: the clients have the states."""
    simulate(checkpointed(tmp_path / "run"))
    directory = RunDirectory(tmp_path / "run")
    checkpoint = directory.read_checkpoint()
    assert len(checkpoint.client_states) == 8
    directory.write_checkpoint(replace(checkpoint, client_states={}, clients_keep_state=True), 3)
    before = model_bytes(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"--resume: the clients of the run .*fedopt launch --re"):
        resume(tmp_path / "run")
    assert model_bytes(tmp_path / "run") == before


NAN_ROW = TensorDataset(torch.full((3, 4), torch.nan), torch.arange(3))
DIVERGING = {  # rate, test data, rounds between evaluations, loss
    "not at all": (0.1, SOFTMAX_DATA[0], 1, cross_entropy),
    "train and test loss": (50.0, SOFTMAX_DATA[0], 1, cross_entropy),
    "losses of replies": (
        0.1,
        None,
        1,
        lambda outputs, targets: cross_entropy(outputs, targets) + torch.inf,
    ),
    "test loss": (0.1, NAN_ROW, 5, cross_entropy),
}


@pytest.mark.parametrize("name", DIVERGING)
@pytest.mark.parametrize("every", [10, 12])  # 12: all rounds are done, the results are not there
def test_divergence_is_dated_alike_with_and_without_a_stop(
    tmp_path: Path, name: str, every: int
) -> None:
    """Losses that are not finite, JSON cannot hold."""
    rate, test_data, evaluate_every, loss = DIVERGING[name]

    def settings(folder: str) -> dict[str, Any]:
        output = {"checkpoint_every": every, "evaluate_every": evaluate_every}
        return {
            **softmax_config("fedavg", 6, 12, client_learning_rate=rate),
            "training": {"local_steps": 4, "batch_size": 4, "weight_decay": 0.1},
            "output": {"directory": str(tmp_path / folder), **output},
        }

    objects = {
        "model": linear_model,
        "client_data": SOFTMAX_DATA,
        "test_data": test_data,
        "loss": loss,
    }
    with pytest.warns(FedoptWarning) if name != "not at all" else contextlib.nullcontext():
        whole = simulate(settings("whole"), **objects)
        with pytest.raises(Stop):
            simulate(settings("cut"), listener=At(max(11, every), stop), **objects)
        cut = resume(tmp_path / "cut", **objects)
    summaries, records = [], []
    for result in (whole, cut):
        summaries.append({k: v for k, v in result.summary.items() if "seconds" not in k})
        records.append([(r.train_loss, r.test_loss) for r in result.rounds])
    assert str(summaries[0]) == str(summaries[1])
    assert str(records[0]).replace("inf", "nan") == str(records[1]).replace("inf", "nan")
    assert (summaries[0]["diverged_at"] is not None) == (name != "not at all")


def test_a_run_that_goes_on_elsewhere_is_left_alone(tmp_path: Path) -> None:
    refusals: list[str] = []

    def interfere() -> None:
        with pytest.raises(ConfigError, match="is not over, another process is at it") as refusal:
            resume(tmp_path / "run")
        refusals.append(str(refusal.value))

    whole = simulate(checkpointed(tmp_path / "whole"))
    result = simulate(checkpointed(tmp_path / "run"), listener=At(6, interfere))
    assert refusals
    assert result.parameters.tobytes() == whole.parameters.tobytes()
    assert without_times(tmp_path / "run") == without_times(tmp_path / "whole")
    assert resume(tmp_path / "run").rounds[-1].round == 9  # its lock went with it


LINES = {
    "text for a number": ('"round": 2,', '"round": "2",'),
    "an error that is a number": ('"errors": []', '"errors": [1]'),
    "an error without its text": ('"errors": []', '"errors": [{"client": 1}]'),
    "a number that is a list": ('"uplink_bytes": ', '"uplink_bytes": [], "x": '),
    "no object": ('{"round": 2,', '[{"round": 2,'),
}


def test_records_of_other_types_are_refused(tmp_path: Path) -> None:
    simulate(checkpointed(tmp_path / "run"))
    rounds = tmp_path / "run" / "rounds.jsonl"
    whole = rounds.read_text().splitlines(keepends=True)
    for old, new in LINES.values():
        assert whole[2].count(old) == 1
        spoilt = "".join([*whole[:2], whole[2].replace(old, new), *whole[3:]])
        rounds.write_text(spoilt)
        with pytest.raises(ConfigError, match=r"--resume: .*rounds.jsonl' cannot be read: "):
            resume(tmp_path / "run")
        assert rounds.read_text() == spoilt


EDITS = {
    "round": ('"round": 8', '"round": 6'),
    "a version": ('"versions": [[0, ', '"versions": [[0, 1'),
    "type of versions": ('"versions": [[', '"versions": ["", ['),
    "initial loss": ('"initial_loss": ', '"initial_loss": "x", "y": '),
    "folder": ('"folder": "', '"folder": 3, "x": "'),
}


def test_a_checkpoint_that_was_edited_is_refused(tmp_path: Path) -> None:
    settings = checkpointed(tmp_path / "run")
    settings["output"]["keep"] = 1
    simulate(settings)
    (file,) = (tmp_path / "run").glob("checkpoint-*")
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    arrays = load_file(file)
    for old, new in EDITS.values():
        assert metadata["fedopt"].count(old) == 1
        edited = metadata["fedopt"].replace(old, new)
        save_file(arrays, file, metadata | {"fedopt": edited})
        with pytest.raises(ConfigError, match=r"is broken: it is not as it was written"):
            resume(tmp_path / "run")
    save_file(arrays, file, {k: v for k, v in metadata.items() if k != "sha256"})
    with pytest.raises(ConfigError, match=r"is broken: it does not hold its own digest"):
        resume(tmp_path / "run")
    (name,) = (n for n in arrays if n == "vectors/model")
    save_file(arrays | {name: arrays[name] + 1e-6}, file, metadata)
    with pytest.raises(ConfigError, match=r"is broken: it is not as it was written"):
        resume(tmp_path / "run")


def test_a_configuration_given_beside_must_agree(tmp_path: Path) -> None:
    run, file = tmp_path / "run", tmp_path / "given.toml"
    simulate(checkpointed(run))
    (run / "model.safetensors").unlink()
    given = (run / "config.toml").read_text()
    given = given.replace("keep_alive_seconds = 30", "keep_alive_seconds = 5")
    file.write_text(given.replace("start_timeout = 600", "start_timeout = 7"))
    found, checkpoint = read_run(run, file)
    assert (found.transport.keep_alive_seconds, found.federation.start_timeout) == (5, 7)
    assert found.output.directory == run
    assert found.import_folders[0] == tmp_path
    assert checkpoint.server.round == 8
    with pytest.raises(
        ConfigError, match=r"--resume: federation.seed is 4 in '.*given.toml' and --set, but"
    ):
        read_run(run, file, ["federation.seed=4"])
    with pytest.raises(
        ConfigError, match=r"--resume: output.evaluate_every is 2 in .*config.toml'"
    ):
        read_run(run, settings=["output.evaluate_every=2"])


def test_a_folder_with_any_name_holds_a_run(tmp_path: Path) -> None:
    folder = tmp_path / 'à tous 😀 quo"ted back\\slash \x7f'
    whole = simulate(checkpointed(folder))
    (folder / "model.safetensors").unlink()
    assert np.array_equal(resume(folder).parameters, whole.parameters)


def test_numbers_of_a_rule_that_are_not_finite_can_be_gone_on_with(tmp_path: Path) -> None:
    """As a rule of one's own may report them; JSON has null for them."""
    run = tmp_path / "run"
    whole = simulate(checkpointed(run, "padamfed_dog"))
    rounds = run / "rounds.jsonl"
    spoilt, count = re.subn(r'"gamma": [0-9.e-]+', '"gamma": null', rounds.read_text())
    assert count == 9
    rounds.write_text(spoilt)
    (run / "model.safetensors").unlink()
    again = resume(run)
    assert again.parameters.tobytes() == whole.parameters.tobytes()
    assert math.isnan(again.rounds[1].chosen["gamma"])


def test_a_checkpoint_holds_clients_and_states_of_any_name(tmp_path: Path) -> None:
    simulate(checkpointed(tmp_path / "run"))
    directory = RunDirectory(tmp_path / "run")
    states = {"ward/3": {"c/mine": torch.ones(2)}, 7: {"c": torch.zeros(1)}, "7": {}}
    directory.write_checkpoint(replace(directory.read_checkpoint(), client_states=states), 3)
    found = directory.read_checkpoint().client_states
    assert {i: {n: t.tolist() for n, t in state.items()} for i, state in found.items()} == {
        "ward/3": {"c/mine": [1.0, 1.0]},
        7: {"c": [0.0]},
    }


def test_other_clients_and_sizes_are_refused(tmp_path: Path) -> None:
    simulate(checkpointed(tmp_path / "run"))
    checkpoint = RunDirectory(tmp_path / "run").read_checkpoint()
    sizes = dict(checkpoint.origin.num_examples)
    assert list(sizes) == list(range(8))
    plan = Plan(8, 4, 9, sizes, dict.fromkeys(sizes, 4), dict.fromkeys(sizes, 0.125))
    require_same_clients(plan, checkpoint)
    more = replace(plan, num_examples=sizes | {3: sizes[3] + 1})
    with pytest.raises(
        ConfigError, match=rf"client 3 holds {sizes[3] + 1} examples and held {sizes[3]}"
    ):
        require_same_clients(more, checkpoint)
    named = replace(plan, num_examples={f"ward-{i}": n for i, n in sizes.items()})
    with pytest.raises(ConfigError, match=r"has the clients \[0, 1, .*\['ward-0', .*start those"):
        require_same_clients(named, checkpoint)


class Lazy(torch.utils.data.Dataset[Any]):
    """Read example by example, as from files; its targets become known when it is divided."""

    def __init__(self, targets: list[int]) -> None:
        self._targets = targets

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, position: int) -> tuple[torch.Tensor, int]:
        return torch.full((4,), float(position)), self._targets[position]


def test_a_fingerprint_tells_data_apart_by_what_is_in_memory() -> None:
    def of(train: Any, test: Any) -> dict[str, str]:
        data = [as_client_data(train)]
        return fingerprint(
            FederatedData(data, None if test is None else as_client_data(test), (4,))
        )

    labels = torch.arange(6) % 3
    one, other = (TensorDataset(torch.full((6, 4), value), labels) for value in (0.0, 1.0))
    assert of(one, one) == of(one, one)
    assert of(one, one)["test data"] != of(one, other)["test data"]
    assert of(one, one)["training data"] == of(one, other)["training data"]
    assert of(one, one)["training data"] != of(other, one)["training data"]
    assert of(one, None).keys() == {"training data"}
    lazy = [DatasetData(Lazy(t), np.array(t)) for t in ([0, 1, 2], [0, 1, 1])]
    assert of(lazy[0], None) != of(lazy[1], None)
    assert of(Lazy([0, 1]), None) != of(Lazy([0, 1, 1]), None)


def test_data_that_lies_elsewhere_by_now_is_gone_on_with(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "mine").mkdir()
    for part in ("train", "test"):
        np.savez(tmp_path / "mine" / f"{part}.npz", x=rng.normal(size=(80, 4)), y=np.arange(80) % 4)
    settings = checkpointed(tmp_path / "run", "fedavg")
    settings["data"] = {"name": "npz", "path": tmp_path / "mine", "partition": {"kind": "iid"}}
    whole = simulate(settings)
    (tmp_path / "mine").rename(tmp_path / "moved")
    file = tmp_path / "run" / "config.toml"
    file.write_text(file.read_text().replace(str(tmp_path / "mine"), str(tmp_path / "moved")))
    assert np.array_equal(resume(tmp_path / "run").parameters, whole.parameters)


def test_a_key_that_is_newer_than_the_checkpoint_has_its_default() -> None:
    """Both a run's config.toml and its checkpoint lack it."""
    config = RunConfig()
    old = config.to_dict()
    del old["training"]["precision"]
    checkpoint: Any = SimpleNamespace(config=old, origin=SimpleNamespace(data={}))
    _require_unchanged(config, checkpoint, "config.toml")
    with pytest.raises(ConfigError, match=r"training\.precision is 'bf16' .* with 'float32'"):
        _require_unchanged(
            config.with_values({"training.precision": "bf16"}), checkpoint, "config.toml"
        )

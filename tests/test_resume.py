"""Going on with a run: what must be as it was, what is refused, and that nothing is lost."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import linear_model
from test_engine import config, model_bytes
from test_more_rule_facts import DATA
from test_more_rule_facts import config as linear_config
from test_run_files import checkpointed, without_times
from torch import nn

from fedopt_flwr import ConfigError, RunConfig, RunError, resume, simulate
from fedopt_flwr.errors import FedoptWarning
from fedopt_flwr.metrics import RoundRecord
from fedopt_flwr.outputs import RunDirectory
from fedopt_flwr.resuming import read_run
from fedopt_flwr.runs import Silent

pytestmark = pytest.mark.filterwarnings("ignore:algorithm.momentum")


class At(Silent):
    """Does something when a round is over."""

    def __init__(self, number: int, action: Callable[[], Any]) -> None:
        self._number, self._action = number, action

    def on_round(self, record: RoundRecord) -> None:
        if record.round == self._number:
            self._action()


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


def test_own_code_that_was_changed_is_said(tmp_path: Path) -> None:
    simulate(own_run(tmp_path))
    (tmp_path / "mine.py").write_text(OWN + "# mended\n")
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
    from dataclasses import replace

    checkpoint = directory.read_checkpoint()
    assert len(checkpoint.client_states) == 8
    directory.write_checkpoint(replace(checkpoint, client_states={}, clients_keep_state=True))
    before = model_bytes(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"--resume: the clients of the run .*fedopt launch --re"):
        resume(tmp_path / "run")
    assert model_bytes(tmp_path / "run") == before


@pytest.mark.parametrize("rate", [0.1, 50.0])
def test_divergence_is_dated_alike_with_and_without_a_stop(tmp_path: Path, rate: float) -> None:
    """At 50 losses stop being finite after a few rounds, which JSON cannot hold."""

    def settings(folder: str) -> dict[str, Any]:
        return {
            **linear_config("fedavg", 6, 12, client_learning_rate=rate),
            "training": {"local_steps": 4, "batch_size": 4, "weight_decay": 0.1},
            "output": {"directory": str(tmp_path / folder), "checkpoint_every": 10},
        }

    objects = {"model": linear_model, "client_data": DATA, "test_data": DATA[0]}
    summaries = []
    with pytest.warns(FedoptWarning) if rate > 1 else pytest.MonkeyPatch.context():
        whole = simulate(settings("whole"), **objects)
        with pytest.raises(Stop):
            simulate(settings("cut"), listener=At(11, stop), **objects)
        cut = resume(tmp_path / "cut", **objects)
    for result in (whole, cut):
        summaries.append({k: v for k, v in result.summary.items() if "seconds" not in k})
    assert str(summaries[0]) == str(summaries[1])
    assert (summaries[0]["diverged_at"] is not None) == (rate > 1)


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


def test_a_folder_that_is_removed_ends_the_run_at_once(tmp_path: Path) -> None:
    heard: list[int] = []

    class Listener(At):
        def on_round(self, record: RoundRecord) -> None:
            heard.append(record.round)
            super().on_round(record)

    settings = config("fedavg", tmp_path / "run")
    with pytest.raises(RunError, match=r"round 4 cannot be .*was removed; put the folder back and"):
        simulate(settings, listener=Listener(3, lambda: shutil.rmtree(tmp_path / "run")))
    assert heard == [1, 2, 3]


LINES = {
    "text for a number": ('"round": 2,', '"round": "2",'),
    "an error that is a number": ('"errors": []', '"errors": [1]'),
    "an error without its text": ('"errors": []', '"errors": [{"client": 1}]'),
    "a loss that is a list": ('"uplink_bytes": ', '"uplink_bytes": [], "x": '),
    "no object": ('{"round": 2,', '[{"round": 2,'),
}


@pytest.mark.parametrize("name", LINES)
def test_records_of_other_types_are_refused(tmp_path: Path, name: str) -> None:
    simulate(checkpointed(tmp_path / "run"))
    rounds = tmp_path / "run" / "rounds.jsonl"
    lines = rounds.read_text().splitlines(keepends=True)
    old, new = LINES[name]
    assert lines[2].count(old) == 1
    lines[2] = lines[2].replace(old, new)
    rounds.write_text("".join(lines))
    with pytest.raises(ConfigError, match=r"--resume: .*rounds.jsonl' cannot be read: "):
        resume(tmp_path / "run")
    assert rounds.read_text() == "".join(lines)


EDITS = {
    "round": ('"round": 8', '"round": 6'),
    "a version": ('"versions": [[0, ', '"versions": [[0, 1'),
    "type of versions": ('"versions": [[', '"versions": ["", ['),
    "initial loss": ('"initial_loss": ', '"initial_loss": "x", "y": '),
    "folder": ('"folder": "', '"folder": 3, "x": "'),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_checkpoint_that_was_edited_is_refused(tmp_path: Path, name: str) -> None:
    simulate(checkpointed(tmp_path / "run"))
    file = tmp_path / "run" / "checkpoint" / "checkpoint.json"
    old, new = EDITS[name]
    assert file.read_text().count(old) == 1
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=r"is broken: .* do not belong together; one was changed"):
        resume(tmp_path / "run")


@pytest.mark.parametrize("name", ["server.safetensors", "clients.safetensors"])
def test_files_of_two_checkpoints_are_not_mixed(tmp_path: Path, name: str) -> None:
    for folder in ("one", "two"):
        simulate(checkpointed(tmp_path / folder))
    shutil.copy(tmp_path / "two" / "checkpoint" / name, tmp_path / "one" / "checkpoint" / name)
    with pytest.raises(ConfigError, match=rf"broken: {name} and checkpoint.json do not belong"):
        resume(tmp_path / "one")


def test_a_configuration_given_beside_must_agree(tmp_path: Path) -> None:
    settings = checkpointed(tmp_path / "run")
    simulate(settings)
    (tmp_path / "run" / "model.safetensors").unlink()
    settings["output"] = {}
    settings["transport"] = {"keep_alive_seconds": 5}
    settings["federation"] = settings["federation"] | {"start_timeout": 7}
    config_now, checkpoint = read_run(tmp_path / "run", RunConfig(**settings))
    assert config_now.transport.keep_alive_seconds == 5
    assert config_now.output.directory == tmp_path / "run"
    assert checkpoint.server.round == 8
    settings["federation"] = settings["federation"] | {"seed": 4}
    with pytest.raises(ConfigError, match=r"--resume: federation.seed is 4 in the given configura"):
        read_run(tmp_path / "run", RunConfig(**settings))


def test_a_folder_with_any_name_holds_a_run(tmp_path: Path) -> None:
    for name in ("Bonjour à tous", "data 😀", 'quo"ted', "back\\slash", "a\x7fb"):
        whole = simulate(checkpointed(tmp_path / name))
        (tmp_path / name / "model.safetensors").unlink()
        assert np.array_equal(resume(tmp_path / name).parameters, whole.parameters)


def test_a_disk_that_is_full_at_the_start_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("fedopt_flwr.outputs.Path.write_text", full)
        with pytest.raises(ConfigError, match=r"output.directory: cannot write .*No space left"):
            simulate(config("fedavg", tmp_path / "a" / "run"))
    assert not list(tmp_path.iterdir())
    simulate(config("fedavg", tmp_path / "a" / "run"))


class FailsLater(nn.Module):
    """Trains a while, then raises in all training."""

    rounds = 0  # of training passes that work

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs: Any) -> Any:
        if self.training:
            FailsLater.rounds -= 1
            if FailsLater.rounds < 0:
                raise ValueError("sensor 7 is blind")
        return self.layer(inputs)


@pytest.mark.parametrize(("passes", "idle_from"), [(3, 3), (5, None)])
def test_a_run_that_ends_without_replies_says_from_which_round(
    monkeypatch: pytest.MonkeyPatch, passes: int, idle_from: int | None
) -> None:
    monkeypatch.setattr(FailsLater, "rounds", passes)  # one of them tries the model
    settings = {
        "algorithm": {"name": "fedavg"},
        "federation": {"num_clients": 3, "clients_per_round": 1, "num_rounds": 6},
        "training": {"local_steps": 1},
    }
    data = DATA[:3]
    if idle_from is None:
        result = simulate(settings, model=FailsLater, client_data=data)
    else:
        with pytest.warns(
            FedoptWarning, match=r"reply was counted from round 3 on, so .*before; the last error: "
        ):
            result = simulate(settings, model=FailsLater, client_data=data)
        assert "sensor 7 is blind" in str(result.last_error)
    assert result.idle_from == idle_from

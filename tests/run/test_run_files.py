"""What a run writes, what it never writes over, and how a run is resumed."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    SOME_FAST,
    as_datasets,
    break_checkpoints,
    checkpoint_file,
    checkpointed,
    digits_config,
    linear_model,
    model_bytes,
    softmax_clients,
    without_times,
)
from safetensors.torch import load_file, save_file
from torch import nn

from fedopt_flwr import ConfigError, RunConfig, RunError, resume, simulate
from fedopt_flwr.errors import FedoptWarning
from fedopt_flwr.rounds.record import RoundRecord
from fedopt_flwr.run.directory import RunDirectory
from fedopt_flwr.run.plots.partition import draw_partition


@pytest.mark.parametrize("buffers", ["average", "local"])
@pytest.mark.parametrize("name", SOME_FAST)
def test_a_resumed_run_equals_one_that_never_stopped(
    name: str, buffers: str, tmp_path: Path
) -> None:
    class Stop(Exception):
        pass

    class Stopper:
        def on_start(self, *_: Any) -> None: ...

        def on_round(self, record: RoundRecord) -> None:
            if record.round == 7:
                raise Stop

    (tmp_path / "batchnorm.py").write_text(
        "import torch\n"
        "def net():\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 12),\n"
        "                               torch.nn.BatchNorm1d(12), torch.nn.Linear(12, 10))\n"
    )
    file = tmp_path / "run.toml"
    file.write_text('[model]\nname = "batchnorm:net"\n')
    settings = [
        f"algorithm.name={name}",
        f"federation.buffers={buffers}",
        "federation.num_clients=8",
        "federation.clients_per_round=4",
        "federation.num_rounds=9",
        "training.batch_size=8",
        "data.partition.min_examples=20",
        "data.partition.concentration=1.0",
        "output.checkpoint_every=3",
    ]

    def run_config(folder: str) -> RunConfig:
        return RunConfig.from_file(file, [*settings, f"output.directory={tmp_path / folder}"])

    whole = simulate(run_config("whole"))
    with pytest.raises(Stop):
        simulate(run_config("stopped"), listener=Stopper())
    sys.modules.pop("batchnorm")  # a new process would have to find it again
    assert len(without_times(tmp_path / "stopped")) < len(without_times(tmp_path / "whole"))
    resumed = resume(tmp_path / "stopped")
    assert model_bytes(tmp_path / "whole") == model_bytes(tmp_path / "stopped")
    assert without_times(tmp_path / "whole") == without_times(tmp_path / "stopped")
    assert [r.round for r in resumed.rounds] == [r.round for r in whole.rounds]
    assert sum(r.failures for r in resumed.rounds) == 0
    with pytest.raises(ConfigError, match="has done all 9 rounds"):
        resume(tmp_path / "stopped")


def test_resume_says_what_is_missing_or_broken(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        resume(tmp_path / "absent")
    simulate(digits_config("fedavg", tmp_path / "plain"))
    with pytest.raises(ConfigError, match=r"holds no checkpoint; .*checkpoint_every"):
        resume(tmp_path / "plain")
    checkpointed = digits_config("padamfed", tmp_path / "run")
    checkpointed["output"]["checkpoint_every"] = 4
    simulate(checkpointed)
    break_checkpoints(tmp_path / "run")
    with pytest.raises(ConfigError, match="is broken"):
        resume(tmp_path / "run")


def test_a_run_given_python_objects_resumes_only_with_them(tmp_path: Path) -> None:
    datasets = as_datasets(softmax_clients([9, 9, 9]))
    settings = digits_config("scaffold", tmp_path / "run")
    settings["federation"] = {"num_clients": 3, "clients_per_round": 2, "num_rounds": 5}
    settings["output"]["checkpoint_every"] = 3
    whole = simulate(settings, model=linear_model, client_data=datasets).parameters
    with pytest.raises(
        ConfigError, match=r"was given \['model', 'client_data'\].*this call nothing"
    ):
        resume(tmp_path / "run")
    with pytest.raises(
        ConfigError,
        match=r"vector 'model' is \[15\] of torch.float32, .*rule and model it is \[20\]",
    ):
        resume(tmp_path / "run", model=lambda: nn.Linear(4, 4), client_data=datasets)
    resumed = resume(tmp_path / "run", model=linear_model, client_data=datasets).parameters
    np.testing.assert_array_equal(resumed, whole)


def test_outputs_hold_what_the_result_holds(tmp_path: Path) -> None:
    result = simulate(digits_config("padamfed", tmp_path / "run"))
    records = [
        json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    ]
    assert [r["round"] for r in records] == list(range(10))
    assert records == [r.to_dict() for r in result.rounds]
    state = load_file(tmp_path / "run" / "model.safetensors")
    vector = torch.cat([state[name].reshape(-1) for name in result.model.state_dict()])
    np.testing.assert_array_equal(vector.numpy(), result.parameters)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["final_test_accuracy"] == result.rounds[-1].test_accuracy
    assert summary["uplink_bytes"] == sum(r.uplink_bytes for r in result.rounds)
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    written = RunConfig.from_file(tmp_path / "run" / "config.toml")
    assert written.to_dict() == RunConfig(**digits_config("padamfed", tmp_path / "run")).to_dict()
    assert not list((tmp_path / "run").glob("*.unfinished"))


def test_tensors_in_any_order_of_memory_are_written(tmp_path: Path) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear_model()
            self.frozen = nn.Parameter(torch.arange(16.0).reshape(4, 4).t(), requires_grad=False)
            self.register_buffer("mixing", torch.eye(4)[[1, 2, 3, 0]].t())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x @ self.mixing + 0 * self.frozen.sum())

    datasets = as_datasets(softmax_clients([6, 6, 6]))
    settings = digits_config("fedavg", tmp_path / "run")
    settings["output"] = {"directory": str(tmp_path / "run"), "checkpoint_every": 1}
    settings["federation"] |= {"num_clients": 3, "clients_per_round": 2}
    simulate(settings, model=Mixed, client_data=datasets)
    written = load_file(tmp_path / "run" / "model.safetensors")
    assert written["frozen"].tolist() == torch.arange(16.0).reshape(4, 4).t().tolist()
    assert written["mixing"].tolist() == torch.eye(4)[[1, 2, 3, 0]].t().tolist()


def test_the_model_file_of_two_runs_is_the_same_whatever_the_folder(tmp_path: Path) -> None:
    for folder in ("a", "b/c"):
        simulate(digits_config("fedavg", tmp_path / folder))
    assert model_bytes(tmp_path / "a") == model_bytes(tmp_path / "b/c")


def test_results_are_never_written_over(tmp_path: Path) -> None:
    simulate(digits_config("fedavg", tmp_path / "run"))
    before = model_bytes(tmp_path / "run")
    with pytest.raises(ConfigError, match="already holds a run; name another folder"):
        simulate(digits_config("scaffold", tmp_path / "run"))
    assert model_bytes(tmp_path / "run") == before
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write .*File exists.*name another"):
        simulate(digits_config("fedavg", tmp_path / "file"))


def test_a_full_disk_ends_the_run_with_the_file_and_the_round(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.open({})
    directory._rounds.close()
    (tmp_path / "run" / "rounds.jsonl").unlink()
    (tmp_path / "run" / "rounds.jsonl").symlink_to("/dev/full")
    directory._rounds = open("/dev/full", "w")  # noqa: SIM115
    with pytest.raises(RunError, match=r"record of round 4 cannot be written: .*No space left"):
        directory.add(RoundRecord(4))
    directory.close()  # raises nothing more


def test_a_folder_with_files_of_the_same_names_is_left_alone(tmp_path: Path) -> None:
    own = tmp_path / "config.toml"
    own.write_text("[federation]\nnum_rounds = 1\n")
    with pytest.raises(ConfigError, match=r"output.directory: .* holds a 'config.toml'"):
        simulate({"output": {"directory": str(tmp_path)}})
    assert own.read_text() == "[federation]\nnum_rounds = 1\n"
    assert list(tmp_path.iterdir()) == [own]


def test_a_folder_named_like_a_date_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {
        "federation": {"num_rounds": 3, "num_clients": 4, "clients_per_round": 2},
        "output": {"directory": "2024-01-01", "checkpoint_every": 2},
    }
    whole = simulate(settings)
    assert np.array_equal(resume("2024-01-01").parameters, whole.parameters)


@pytest.mark.parametrize("spoil", ["gone", "garbage"])
def test_records_that_cannot_be_read_are_named(tmp_path: Path, spoil: str) -> None:
    settings = digits_config("fedavg")
    settings["output"] = {"directory": tmp_path / "run", "checkpoint_every": 4}
    simulate(settings)
    rounds = tmp_path / "run" / "rounds.jsonl"
    rounds.unlink() if spoil == "gone" else rounds.write_text("garbage}\n")
    with pytest.raises(ConfigError, match=r"--resume: .*rounds.jsonl' cannot be read"):
        resume(tmp_path / "run")
    break_checkpoints(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"--resume: the checkpoint .* is broken"):
        resume(tmp_path / "run")


def test_curves_that_cannot_be_written_do_not_fail_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedopt_flwr.run.run.draw_run", full)
    with pytest.warns(FedoptWarning, match=r"curves.png: not drawn: .*No space left"):
        simulate(digits_config("fedavg", tmp_path / "run"))
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_a_picture_goes_through_links_and_pipes_and_never_takes_their_place(tmp_path: Path) -> None:
    """As --plot /dev/null must not make a file of the device."""
    counts = np.array([[3, 1], [0, 2]])
    link, pipe = tmp_path / "link.png", tmp_path / "pipe"
    (tmp_path / "there").mkdir()
    link.symlink_to(tmp_path / "there" / "p.png")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in (link, pipe):
        draw_partition(counts, path, "two clients")
    assert link.is_symlink()
    assert link.read_bytes().startswith(b"\x89PNG")
    assert pipe.is_fifo()
    assert os.read(reader, 4) == b"\x89PNG"
    os.close(reader)
    assert {p.name for p in tmp_path.rglob("*")} == {"link.png", "pipe", "there", "p.png"}


@pytest.mark.parametrize("what", ["checkpoint", "results"])
def test_a_disk_that_is_full_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    place = "checkpoints.sealed" if what == "checkpoint" else "directory.tensor_bytes"
    monkeypatch.setattr(f"fedopt_flwr.run.{place}", full)
    settings = digits_config("fedavg")
    every = 4 if what == "checkpoint" else 0
    settings["output"] = {"directory": tmp_path / "run", "checkpoint_every": every}
    with pytest.raises(
        RunError, match=rf"its {what} cannot be written: .*No space left.*make room"
    ):
        simulate(settings)
    assert not list(tmp_path.rglob("*.unfinished"))


EDITS = {
    "algorithm.name": ('name = "scaffold_m"', 'name = "fedavg"'),
    "federation.num_clients": ("num_clients = 8", "num_clients = 9"),
    "federation.num_rounds": ("num_rounds = 9", "num_rounds = 12"),
    "federation.seed": ("seed = 3", "seed = 4"),
    "data.name": ('name = "digits"', 'name = "synthetic"'),
    "training.threads": ("threads = 1", "threads = 2"),
}


def test_a_configuration_that_was_edited_is_not_gone_on_with(tmp_path: Path) -> None:
    simulate(checkpointed(tmp_path / "run"))
    file = tmp_path / "run" / "config.toml"
    text = file.read_text()
    for key, (old, new) in EDITS.items():
        assert text.count(old) == 1
        file.write_text(text.replace(old, new))
        with pytest.raises(ConfigError, match=rf"--resume: {key} is .*checkpoint was made with"):
            resume(tmp_path / "run")
    file.write_text(text.replace("min_replies = 1", "min_replies = 2"))  # changes no past round
    assert resume(tmp_path / "run").rounds[-1].round == 9


def test_a_relative_data_path_is_found_from_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "mine").mkdir()
    for part in ("train", "test"):
        np.savez(tmp_path / "mine" / f"{part}.npz", x=rng.normal(size=(80, 4)), y=np.arange(80) % 4)
    monkeypatch.chdir(tmp_path)
    settings = checkpointed(tmp_path / "run", "fedavg")
    settings["data"] = {"name": "npz", "path": "mine", "partition": {"kind": "iid"}}
    whole = simulate(settings)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert np.array_equal(resume(tmp_path / "run").parameters, whole.parameters)


def test_a_half_written_record_and_those_after_the_checkpoint_are_written_again(
    tmp_path: Path,
) -> None:
    """As a process leaves them that is killed between two checkpoints, in the middle of a line."""
    simulate(checkpointed(tmp_path / "run"))
    rounds, model = tmp_path / "run" / "rounds.jsonl", tmp_path / "run" / "model.safetensors"
    before, records = model_bytes(tmp_path / "run"), without_times(tmp_path / "run")
    model.unlink()
    rounds.write_text(rounds.read_text()[:-40])
    resume(tmp_path / "run")
    assert model_bytes(tmp_path / "run") == before
    assert without_times(tmp_path / "run") == records


def test_half_a_checkpoint_of_a_killed_process_is_passed_over(tmp_path: Path) -> None:
    simulate(checkpointed(tmp_path / "run"))
    run = tmp_path / "run"
    before = model_bytes(run)
    (run / "model.safetensors").unlink()
    whole = checkpoint_file(run)
    (run / f"checkpoint-000009.safetensors.{'1' * 16}.unfinished").write_bytes(
        whole.read_bytes()[:99]
    )
    (run / "mine.unfinished").write_bytes(b"")
    resume(run)
    assert [path.name for path in run.glob("*.unfinished")] == ["mine.unfinished"]
    assert model_bytes(run) == before


@pytest.mark.parametrize("place", ["fedopt_flwr.files.os.replace", "fedopt_flwr.files.os.fsync"])
def test_a_checkpoint_that_fails_leaves_the_only_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    simulate(checkpointed(tmp_path / "run", every=8))
    run = tmp_path / "run"
    directory = RunDirectory(run)
    checkpoint = directory.read_checkpoint()
    later = replace(checkpoint, server=replace(checkpoint.server, round=9))

    def interrupted(*paths: Any) -> None:
        raise OSError("killed")

    monkeypatch.setattr(place, interrupted)
    with pytest.raises(RunError, match="checkpoint cannot be written"):
        directory.write_checkpoint(later, 2)
    monkeypatch.undo()
    assert directory.read_checkpoint().server.round == 8
    assert sorted(path.name[:17] for path in run.glob("checkpoint*")) == [
        "checkpoint-000000",
        "checkpoint-000008",
    ]
    directory.write_checkpoint(later, 2)
    assert directory.read_checkpoint().server.round == 9
    assert sorted(path.name[:17] for path in run.glob("checkpoint*")) == [
        "checkpoint-000008",
        "checkpoint-000009",
    ]


def test_a_checkpoint_of_another_layout_is_refused_by_its_version(tmp_path: Path) -> None:
    simulate(checkpointed(tmp_path / "run"))
    run = tmp_path / "run"
    file = checkpoint_file(run)
    save_file({"vectors/model": torch.zeros(1)}, file, {"layout": "7"})
    with pytest.raises(ConfigError, match=r"has layout 7, of another version .* reads layout 3"):
        resume(run)
    for file in run.glob("checkpoint-*"):
        file.unlink()
    (run / "checkpoint").mkdir()  # as the first layout was
    with pytest.raises(ConfigError, match=r"has layout 1, of another version .* reads layout 3"):
        resume(run)


def test_a_refused_folder_leaves_none_of_its_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: Any, **options: Any) -> None:
        raise RunError("nobody came")

    monkeypatch.setattr("fedopt_flwr.run.simulate.run_in_process", stop)
    with pytest.raises(RunError, match="nobody came"):
        simulate(digits_config("fedavg", tmp_path / "a" / "b" / "c"))
    assert not list(tmp_path.iterdir())
    (tmp_path / "a").mkdir()
    with pytest.raises(RunError, match="nobody came"):
        simulate(digits_config("fedavg", tmp_path / "a" / "b" / "c"))
    assert list(tmp_path.rglob("*")) == [tmp_path / "a"]


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "file/under"])
def test_a_folder_that_no_system_makes_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output.directory: cannot write .*name another folder"):
        simulate(digits_config("fedavg", tmp_path / name))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_records_with_gaps_or_repeats_are_refused_and_stay_as_they_are(tmp_path: Path) -> None:
    simulate(checkpointed(tmp_path / "run"))  # 9 rounds after round 0, the last checkpoint at 8
    rounds, config_file = tmp_path / "run" / "rounds.jsonl", tmp_path / "run" / "config.toml"
    lines = rounds.read_text().splitlines(keepends=True)
    assert len(lines) == 10
    spoilt = {
        "none": [],
        "cut": lines[:5],
        "a gap": [*lines[:3], *lines[4:]],
        "twice": [*lines[:3], *lines[2:]],
        "no start": lines[2:],
    }
    for kept in spoilt.values():
        rounds.write_text("".join(kept))
        with pytest.raises(ConfigError, match=r"--resume: .*rounds.jsonl' lacks round .*up to"):
            resume(tmp_path / "run")
        assert rounds.read_text() == "".join(kept)
        assert config_file.exists()
    rounds.write_text("".join(lines))
    assert [r.round for r in resume(tmp_path / "run").rounds] == list(range(10))

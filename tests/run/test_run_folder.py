"""The folder of a run that is at work: moved, removed or on a full disk."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import At, checkpointed, digits_config, model_bytes, without_times

from fedopt_flwr import ConfigError, RunError, simulate
from fedopt_flwr.cli.console import LOG, logging_to
from fedopt_flwr.flower import DiskStates
from fedopt_flwr.rounds.record import RoundRecord
from fedopt_flwr.run.checkpoints import has_checkpoint
from fedopt_flwr.run.directory import RunDirectory


def test_a_run_whose_folder_was_moved_writes_nothing_into_the_next_one(tmp_path: Path) -> None:
    def move() -> None:
        (tmp_path / "run").rename(tmp_path / "moved")
        simulate(digits_config("scaffold", tmp_path / "run"))

    with pytest.raises(
        RunError, match=r"round 4 cannot be written: .*was moved or removed; put th"
    ):
        simulate(checkpointed(tmp_path / "run"), listener=At(3, move))
    simulate(digits_config("scaffold", tmp_path / "alone"))
    assert model_bytes(tmp_path / "run") == model_bytes(tmp_path / "alone")
    assert without_times(tmp_path / "run") == without_times(tmp_path / "alone")
    assert not has_checkpoint(tmp_path / "run")


def test_a_folder_that_is_removed_ends_the_run_at_once(tmp_path: Path) -> None:
    heard: list[int] = []

    class Listener(At):
        def on_round(self, record: RoundRecord) -> None:
            heard.append(record.round)
            super().on_round(record)

    settings = digits_config("fedavg", tmp_path / "run")
    with pytest.raises(
        RunError, match=r"round 4 cannot be .*moved or removed; put the folder back"
    ):
        simulate(settings, listener=Listener(3, lambda: shutil.rmtree(tmp_path / "run")))
    assert heard == [1, 2, 3]


def test_a_disk_that_is_full_at_the_start_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("fedopt_flwr.files.os.open", full)
        with pytest.raises(ConfigError, match=r"output.directory: cannot write .*No space left"):
            simulate(digits_config("fedavg", tmp_path / "a" / "run"))
    assert not list(tmp_path.iterdir())
    simulate(digits_config("fedavg", tmp_path / "a" / "run"))


def test_a_disk_without_room_for_the_log_hides_no_error_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.log").symlink_to("/dev/full")

    def fail() -> None:
        with logging_to(tmp_path):
            LOG.error("lost")
            raise ValueError("of the run")

    with pytest.raises(ValueError, match="of the run"):
        fail()
    assert capsys.readouterr().err == ""


def test_reading_or_resuming_a_folder_that_is_gone_makes_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        RunDirectory(tmp_path / "gone").reopen(range(1, 2))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_looked_at_ends_the_run_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.open({})

    def stale(*arguments: Any, **options: Any) -> None:
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr("fedopt_flwr.run.directory.os.path.samestat", stale)
        with pytest.raises(RunError, match=r"round 1 cannot be written: .*put the folder back"):
            directory.add(RoundRecord(1))
        directory.close()
    with pytest.raises(ConfigError, match="holds no checkpoint"):  # and none is at it
        RunDirectory(tmp_path / "run").read_checkpoint()


def test_a_file_system_that_cannot_sync_folders_keeps_client_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def files_alone(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(22, "Invalid argument")
        real(handle)

    monkeypatch.setattr("fedopt_flwr.files.os.fsync", files_alone)
    states = DiskStates(tmp_path)
    states.save(3, 1, {"control_variate": torch.ones(2)})
    assert states.load(3, 1)["control_variate"].tolist() == [1.0, 1.0]

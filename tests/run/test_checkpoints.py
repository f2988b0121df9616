"""Checkpoints that were changed, cut, mixed up or half written: noticed, and passed over."""

from __future__ import annotations

import os
import random
import shutil
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import At, checkpoint_file, checkpointed, model_bytes, without_times

from fedopt_flwr import ConfigError, resume, simulate
from fedopt_flwr.errors import FedoptWarning
from fedopt_flwr.files import read_sealed, replacing, sealed
from fedopt_flwr.run.checkpoints import Checkpoint, read_checkpoint, write_checkpoint
from fedopt_flwr.run.directory import RunDirectory


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 9 rounds after a start pass with checkpoints of rounds 4, 6 and 8."""
    run = tmp_path_factory.mktemp("finished") / "run"
    simulate(checkpointed(run, every=2))
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, as it was before its results were written."""
    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    (copy / "model.safetensors").unlink()
    file = copy / "config.toml"
    file.write_text(file.read_text().replace(str(finished), str(copy)))
    return copy


def rounds_kept(run: Path) -> list[int]:
    return sorted(int(path.name[11:17]) for path in run.glob("checkpoint-*.safetensors"))


def flip(path: Path, byte: int, bit: int = 2) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


def test_the_last_three_are_kept_and_the_first_is_of_round_0(tmp_path: Path) -> None:
    seen: list[list[int]] = []

    class Watch(At):
        def on_start(self, *arguments: Any) -> None:
            seen.append(rounds_kept(tmp_path / "run"))

        def on_round(self, record: Any) -> None:
            seen.append(rounds_kept(tmp_path / "run"))

    for rule, start in (("fedavg", []), ("scaffold_m", [[0]])):
        seen.clear()
        simulate(checkpointed(tmp_path / "run", rule, 2), listener=Watch(0, lambda: None))
        assert seen[1:3] == [*start, [0], [0, 2]][:2]
        assert seen[-1] == [4, 6, 8]
        shutil.rmtree(tmp_path / "run")


@pytest.mark.parametrize("rule", ["fedavg", "scaffold_m"])
def test_a_run_that_stops_in_round_1_goes_on(tmp_path: Path, rule: str) -> None:
    class Stop(Exception):
        pass

    def stop() -> None:
        raise Stop

    simulate(checkpointed(tmp_path / "whole", rule))
    with pytest.raises(Stop):
        simulate(checkpointed(tmp_path / "run", rule), listener=At(1, stop))
    assert rounds_kept(tmp_path / "run") == [0]
    with (tmp_path / "run" / "rounds.jsonl").open("ab") as file:
        file.write(b"\xff\x00}")
    resume(tmp_path / "run")
    assert model_bytes(tmp_path / "run") == model_bytes(tmp_path / "whole")
    assert without_times(tmp_path / "run") == without_times(tmp_path / "whole")


def test_any_bit_of_a_checkpoint_that_changed_is_noticed(run: Path) -> None:
    file = checkpoint_file(run)
    for other in run.glob("checkpoint-*"):
        if other != file:
            other.unlink()
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    draw = random.Random(0)
    places = [*range(header), *(draw.randrange(header, len(whole)) for _ in range(1000))]
    with file.open("r+b") as opened:
        for place in places:
            opened.seek(place)
            opened.write(bytes([whole[place] ^ 1 << draw.randrange(8)]))
            opened.flush()
            with pytest.raises(ConfigError, match="is broken"):
                read_checkpoint(run)
            opened.seek(place)
            opened.write(whole[place : place + 1])
    assert file.read_bytes() == whole
    for cut in (whole[:-1], whole + b"\0", b"", whole[:9], b"\0" * 7 + b"\x10" + whole[8:]):
        file.write_bytes(cut)
        with pytest.raises(ConfigError, match="is broken"):
            read_checkpoint(run)


def test_a_damaged_checkpoint_is_passed_over_for_the_newest_whole_one(
    run: Path, finished: Path
) -> None:
    flip(run / "checkpoint-000008.safetensors", -100)
    (run / "checkpoint-000006.safetensors").write_bytes(b"")
    names = r"--resume: the checkpoint '.*000008.safetensors' is broken: .*from '.*000004.safete"
    listener = At(5, lambda: seen.extend([rounds_kept(run), len(without_times(run))]))
    seen: list[Any] = []
    with pytest.warns(FedoptWarning, match=names):
        result = resume(run, listener=listener)
    assert seen == [[4], 6]  # what came after it is gone, in rounds.jsonl too
    assert result.rounds_before == 4
    assert model_bytes(run) == model_bytes(finished)
    assert without_times(run) == without_times(finished)
    assert rounds_kept(run) == [4, 6, 8]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert RunDirectory(run).read_checkpoint().server.round == 8


def test_a_refused_resume_leaves_a_damaged_checkpoint_where_it_is(run: Path) -> None:
    flip(checkpoint_file(run), -1)
    (run / "rounds.jsonl").write_text("")
    with (
        pytest.warns(FedoptWarning, match="is broken"),
        pytest.raises(ConfigError, match="lacks round 0; all up to"),
    ):
        resume(run)
    assert rounds_kept(run) == [4, 6, 8]


def reseal(path: Path, edit: Callable[[str], str]) -> None:
    """Edit the text of a checkpoint as somebody would who knows how it is sealed."""
    arrays, metadata = read_sealed(path)
    path.write_bytes(b"".join(sealed(arrays, {**metadata, "fedopt": edit(metadata["fedopt"])})))


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda text: text.replace('"round": 8', '"round": "8"'), "round: got '8'; should be"),
        (lambda text: text.replace('"round": 8', '"round": 1000000000'), "is of round 1000000000"),
        (lambda text: text.replace('"round": 8', '"round": -8'), "round: got -8; should be"),
        (lambda text: text.replace('"round": 8', f'"round": {"[" * 100_000}'), "recursion limit"),
        (lambda text: text.replace('"versions": [[', '"versions": [[1.5, '), "versions.0"),
        (lambda text: text.replace('"folder": ', '"folders": '), "folders"),
    ],
)
def test_a_sealed_checkpoint_whose_text_is_none_is_passed_over(
    run: Path, edit: Callable[[str], str], text: str
) -> None:
    reseal(checkpoint_file(run), edit)
    with pytest.warns(FedoptWarning, match=f"is broken: .*{text}.*; the run continues from"):
        assert read_checkpoint(run).server.round == 6


def test_a_folder_in_the_place_of_a_checkpoint_is_not_passed_over_in_silence(run: Path) -> None:
    newest = checkpoint_file(run)
    newest.unlink()
    newest.mkdir()
    with pytest.raises(ConfigError, match=r"000008.safetensors' cannot be read: .*move it away"):
        resume(run)


def test_a_checkpoint_that_cannot_be_read_is_no_damaged_one(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("fedopt_flwr.run.checkpoints.read_sealed", refuse)
    with pytest.raises(ConfigError, match=r"000008.safetensors' cannot be read: .*; make it read"):
        resume(run)


def without(arrays: Any, name: str) -> dict[str, Any]:
    return {n: array for n, array in arrays.items() if n != name}


def changed(kind: str, name: str, array: torch.Tensor | None) -> Any:
    """A change of one array of a checkpoint's server, or with `client` of client 0's state."""

    def change(checkpoint: Checkpoint) -> Checkpoint:
        if kind == "client":
            own = without(checkpoint.client_states[0], name)
            states = {**checkpoint.client_states, 0: own if array is None else {name: array}}
            return replace(checkpoint, client_states=states)
        vectors = without(checkpoint.server.vectors, name)
        vectors |= {} if array is None else {name: array}
        return replace(checkpoint, server=replace(checkpoint.server, vectors=vectors))

    return change


MIXED_UP = {
    "c of another shape": (
        changed("vector", "control_variate", torch.ones(1)),
        r"vector 'control_variate' is \[1\] of torch.float32, with .*it is \[1210\] of",
    ),
    "c of another dtype": (
        changed("vector", "control_variate", torch.zeros(1210, dtype=torch.float64)),
        r"'control_variate' is \[1210\] of torch.float64, .*use those of the run",
    ),
    "no c": (changed("vector", "control_variate", None), r"'control_variate' is missing"),
    "no model": (changed("vector", "model", None), r"vector 'model' is missing"),
    "a state of another shape": (
        changed("client", "control_variate", torch.ones(1)),
        r"checkpoint's client 0's 'control_variate' is \[1\] of",
    ),
    "no state": (
        changed("client", "control_variate", None),
        r"client 0's 'control_variate' is missing",
    ),
}


@pytest.mark.parametrize("name", MIXED_UP)
def test_arrays_that_rule_and_model_do_not_have_are_named(run: Path, name: str) -> None:
    change, text = MIXED_UP[name]
    write_checkpoint(run, change(read_checkpoint(run)), keep=1)
    lines = (run / "rounds.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=f"--resume: .*{text}"):
        resume(run)
    assert (run / "rounds.jsonl").read_bytes() == lines


TAILS = {
    "half a line that ends like a whole one": b'{"round": 9, "chosen": {}',
    "half of a character": b'{"round": 9, "x": "\xc3',
    "zeros": b"\0" * 500,
    "zeros and a bracket": b"\0" * 500 + b"}",
    "brackets": b"[" * 50_000 + b"}",
    "brackets that fit": b"[" * 50_000 + b"]" * 50_000 + b"\n",
    "a later round once more": b'{"round": 3}\n',
}


@pytest.mark.parametrize("name", TAILS)
def test_what_follows_the_checkpoint_in_the_records_refuses_no_resume(
    run: Path, finished: Path, name: str
) -> None:
    rounds = run / "rounds.jsonl"
    lines = rounds.read_bytes().splitlines(keepends=True)
    rounds.write_bytes(b"".join([*lines[:9], TAILS[name]]))
    resume(run)
    assert model_bytes(run) == model_bytes(finished)
    assert without_times(run) == without_times(finished)
    rounds.write_bytes(b"".join([*lines[:3], TAILS[name] + b"\n", *lines[3:]]))
    (run / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"--resume: .*rounds.jsonl' cannot be read: "):
        resume(run)


def test_a_file_is_never_written_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, target = tmp_path / "victim", tmp_path / "summary.json"
    victim.write_text("mine")
    (tmp_path / "summary.json.unfinished").symlink_to(victim)  # the name that once was taken
    target.symlink_to(victim)
    with replacing(target) as file:
        file.write(b"new")
    assert (target.read_text(), target.is_symlink(), victim.read_text()) == ("new", False, "mine")
    monkeypatch.setattr("fedopt_flwr.files.secrets.token_hex", lambda size: "guessed")
    (tmp_path / "summary.json.guessed.unfinished").symlink_to(tmp_path / "nothing")
    with pytest.raises(FileExistsError), replacing(target) as file:
        file.write(b"newer")
    assert target.read_text() == "new"
    assert not (tmp_path / "nothing").exists()


def test_others_may_read_results_and_no_states(tmp_path: Path) -> None:
    mask = os.umask(0o022)
    try:
        simulate(checkpointed(tmp_path / "with"))
        simulate(checkpointed(tmp_path / "without", "fedavg"))
    finally:
        os.umask(mask)
    modes = {
        path.relative_to(tmp_path).as_posix(): stat.S_IMODE(path.stat().st_mode)
        for name in ("with", "without")
        for path in [checkpoint_file(tmp_path / name), tmp_path / name / "model.safetensors"]
    }
    assert list(modes.values()) == [0o600, 0o644, 0o644, 0o644], modes


# Adds a checkpoint of round 9 to those of a run, again and again, in processes of which the N-th is
# killed before its N-th operation on a file; half of what is written counts as one.
WRITERS = """
import io, os, shutil, signal, sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from fedopt_flwr.run.directory import RunDirectory
import fedopt_flwr.files

left = 0

def count():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

class Halves(io.FileIO):
    def write(self, data):
        half = len(data) // 2
        for part in (data[:half], data[half:]):
            count()
            super().write(part)
        return len(data)

def counted(real):
    return lambda *arguments: (count(), real(*arguments))[1]

def write(run, number):
    global left
    directory = RunDirectory(run)
    checkpoint = directory.read_checkpoint()
    directory.reopen(range(checkpoint.server.round + 1))
    left = number
    os.fsync, os.close = counted(os.fsync), counted(os.close)
    os.fdopen = lambda handle, mode: Halves(handle, mode)
    events = {"open", "os.rename", "os.remove", "os.listdir", "os.scandir"}
    sys.addaudithook(lambda event, arguments: event in events and count())
    later = replace(checkpoint, server=replace(checkpoint.server, round=9))
    directory.write_checkpoint(later, 3)

run, copies = map(Path, sys.argv[1:])
number, status = 0, signal.SIGKILL
while status == signal.SIGKILL:
    number += 1
    copy = copies / f"{number:03}"
    shutil.copytree(run, copy)
    child = os.fork()
    if child == 0:
        write(copy, number)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
sys.exit(status != 0)
"""


@pytest.mark.slow
def test_a_writer_that_is_killed_before_any_operation_leaves_whole_checkpoints(
    run: Path, tmp_path: Path
) -> None:
    copies = tmp_path / "copies"
    arguments = [sys.executable, "-c", WRITERS, str(run), str(copies)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    newest = []
    for copy in sorted(copies.iterdir()):
        for file in copy.glob("checkpoint-*.safetensors"):
            read_sealed(file)
        newest.append(RunDirectory(copy).read_checkpoint().server.round)
    assert newest == sorted(newest)  # the old one, then the new one
    assert newest.count(8) > 8
    assert newest.count(9) > 3
    assert any(list(copy.glob("*.unfinished")) for copy in copies.iterdir())
    assert rounds_kept(copy) == [6, 8, 9]
    for stopped in copies.iterdir():
        directory = RunDirectory(stopped)
        directory.reopen(range(9))
        directory.close()
        assert not list(stopped.glob("*.unfinished"))

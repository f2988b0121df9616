"""`fedopt compare` with many runs: side by side, continued, failing, swept over a value."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from processes import FEDOPT, QUICK, InProcess, fedopt, refused, wait_until

from fedopt_flwr.cli.comparison import Sweep

OUT = ["--set", "output.directory=out"]
SERVERS = {"aggregation_seconds", "evaluation_seconds"}
TIMES = {"seconds", "client_seconds", "seconds_by_client", *SERVERS}


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    rows = json.loads((folder / "out" / "comparison.json").read_text())
    return {row["algorithm"]: row for row in rows}


def without_times(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


@pytest.mark.slow
def test_jobs_give_the_same_bytes_as_one_after_another(tmp_path: Path) -> None:
    arguments = ["--algorithms", "padamfed,fedavg,scaffold_m", "--seeds", "0,1", *QUICK]
    alone = fedopt("compare", *arguments, "--set", "output.directory=alone", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    result = fedopt("compare", *arguments, *OUT, "--jobs", "3", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "6/6" in result.stdout
    assert result.stderr.count("the theorem's β") == 1  # a warning is told once, not for each seed
    for cell in sorted((tmp_path / "alone").iterdir()):
        if cell.is_dir():
            other = tmp_path / "out" / cell.name
            names = [{path.name for path in folder.iterdir()} for folder in (cell, other)]
            assert names[0] == names[1]
            model = "model.safetensors"
            assert (cell / model).read_bytes() == (other / model).read_bytes()
            assert without_times(cell) == without_times(other)
    table, other_table = (
        json.loads((tmp_path / name / "comparison.json").read_text()) for name in ("alone", "out")
    )
    for row, same in zip(table, other_table, strict=True):
        assert row["final_test_accuracy"] == same["final_test_accuracy"]
        assert row["rounds_to"] == same["rounds_to"]


def test_finished_runs_are_not_run_again(tmp_path: Path, in_process: InProcess) -> None:
    arguments = ["--seeds", "0", *QUICK, *OUT]
    first = in_process("compare", "--algorithms", "fedavg,fedprox", *arguments)
    assert first.returncode == 0, first.stderr
    before = rows_of(tmp_path)
    kept = tmp_path / "out" / "fedavg-seed0"
    stamp = (kept / "rounds.jsonl").stat().st_mtime_ns
    # one that was killed: records of two rounds and no summary
    cut = tmp_path / "out" / "fedprox-seed0"
    (cut / "summary.json").unlink()
    lines = (cut / "rounds.jsonl").read_text().splitlines(keepends=True)
    (cut / "rounds.jsonl").write_text("".join(lines[:2]))
    again = in_process("compare", "--algorithms", "fedavg,fedprox,fedexp", *arguments)
    assert again.returncode == 0, again.stderr
    assert "1 of 3 runs were finished before and are taken as they are" in again.stdout
    assert (kept / "rounds.jsonl").stat().st_mtime_ns == stamp
    rows = rows_of(tmp_path)
    assert list(rows) == ["fedavg", "fedprox", "fedexp"]
    assert rows["fedavg"] == before["fedavg"]
    assert rows["fedprox"]["final_test_loss"] == before["fedprox"]["final_test_loss"]
    assert len((cut / "rounds.jsonl").read_text().splitlines()) == 4
    other = in_process(
        "compare", "--algorithms", "fedavg", *arguments, "--set", "training.batch_size=8"
    )
    refused(other, "output.directory: 'out/fedavg-seed0' holds a run of another configuration")
    (kept / "rounds.jsonl").write_text("{}\n")
    broken = in_process("compare", "--algorithms", "fedavg", *arguments)
    refused(broken, "the run in 'out/fedavg-seed0' cannot be read", "remove it")


def test_a_comparison_of_a_file_is_continued(tmp_path: Path, in_process: InProcess) -> None:
    text = "[federation]\nnum_rounds = 1\n[model]\noptions = {hidden = [4]}\n"
    (tmp_path / "run.toml").write_text(text)
    asked = ["compare", "run.toml", "--algorithms", "fedavg,fedprox"]
    first = in_process(*asked, *OUT)
    assert first.returncode == 0, first.stderr
    again = in_process(*asked, "--set", f"output.directory={tmp_path}/out")
    assert again.returncode == 0, again.stderr
    assert "2 of 2 runs were finished before" in again.stdout
    (tmp_path / "out").rename(tmp_path / "renamed")
    model = tmp_path / "renamed" / "fedprox" / "model.safetensors"
    model.unlink()  # as where the disk was full
    last = in_process(*asked, "--set", "output.directory=renamed")
    assert last.returncode == 0, last.stderr
    assert "1 of 2 runs were finished before" in last.stdout
    assert model.exists()


def test_what_stops_every_run_is_said(tmp_path: Path, in_process: InProcess) -> None:
    failed = in_process("compare", "--algorithms", "fedavg", *OUT, "--set", "stop.metric=f1")
    assert failed.returncode == 1
    assert "fedavg: stop.metric: unknown 'f1'" in failed.stderr


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_comparison_that_is_stopped_says_how_to_continue(tmp_path: Path, jobs: str) -> None:
    rounds = ["--set", "federation.num_rounds=100000"]
    command = [FEDOPT, "compare", "--algorithms", "fedavg,fedprox", *rounds, "--jobs", jobs]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as run:
        begun = "runs/*/fedavg/rounds.jsonl"
        wait_until(lambda: any(tmp_path.glob(begun)), lambda: "a first round")
        run.send_signal(signal.SIGINT)
        _, errors = run.communicate(timeout=60)
    assert run.returncode == 130
    assert re.search(
        r"give the same command with --set output\.directory=runs/.*-compare\n", errors
    )


def test_a_folder_with_other_things_is_refused(tmp_path: Path, in_process: InProcess) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letter.txt").write_text("dear")
    result = in_process("compare", "--algorithms", "fedavg", *QUICK, *OUT)
    refused(result, "output.directory: 'out' exists and is not empty")
    assert (tmp_path / "out" / "letter.txt").read_text() == "dear"


def test_an_unfinished_run_with_a_checkpoint_continues_to_the_same_bits(
    tmp_path: Path, in_process: InProcess
) -> None:
    often = ["--set", "output.checkpoint_every=2", "--set", "federation.num_rounds=5"]
    arguments = ["--algorithms", "scaffold_m", "--set", "model.options.hidden=[8]", *often]
    whole = in_process("compare", *arguments, "--set", "output.directory=whole")
    assert whole.returncode == 0, whole.stderr
    first = in_process("compare", *arguments, *OUT)
    assert first.returncode == 0, first.stderr
    cell = tmp_path / "out" / "scaffold_m"
    for name in ("summary.json", "model.safetensors"):
        (cell / name).unlink()
    continued = in_process("compare", *arguments, *OUT)
    assert continued.returncode == 0, continued.stderr
    model = "model.safetensors"
    assert (cell / model).read_bytes() == (tmp_path / "whole/scaffold_m" / model).read_bytes()
    assert len((cell / "rounds.jsonl").read_text().splitlines()) == 6


OWN = """
import os, signal
import torch
from torch import nn
from fedopt_flwr.algorithm import *
from fedopt_flwr import *

def loss(outputs, targets):
    if os.environ.get("KILLED"):
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.cross_entropy(outputs, targets)
"""


@pytest.mark.parametrize("jobs", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_failing_run_is_a_row(tmp_path: Path, jobs: str) -> None:
    """SCAFFOLD-M-VR's fixed previous model is refused once K is known; FedAvg runs all the same."""
    labels = "fedavg_m_vr:previous_model=same,fedavg"
    result = fedopt("compare", "--algorithms", labels, *QUICK, *OUT, "--jobs", jobs, cwd=tmp_path)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "error: fedavg_m_vr:previous_model=same: algorithm.previous_model: got 'same'" in (
        result.stderr
    )
    assert "failed" in result.stdout
    rows = rows_of(tmp_path)
    assert rows["fedavg"]["final_test_accuracy"] is not None
    failed = rows["fedavg_m_vr:previous_model=same"]
    assert failed["final_test_accuracy"] is None
    assert "got 'same'" in failed["error"]


@pytest.mark.slow
def test_a_process_that_is_killed_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    arguments = ["compare", "--algorithms", "fedavg,fedprox", *QUICK, *OUT, "--jobs", "2"]
    command = [str(FEDOPT), *arguments, "--set", "federation.num_rounds=3000"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=-1, stderr=-1, text=True) as process:
        victim = tmp_path / "out" / "fedavg" / "rounds.jsonl"
        wait_until(lambda: victim.exists() and victim.stat().st_size > 0, lambda: "a first round")
        for child in children_of(process.pid):
            if f"{tmp_path}/out/fedavg/rounds.jsonl" in open_files(child):
                os.kill(child, signal.SIGKILL)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 1, err
    assert "its process ended with exit code -9" in err
    assert "failed" in out
    rows = rows_of(tmp_path)
    assert rows["fedprox"]["final_test_accuracy"] is not None
    assert rows["fedavg"]["error"]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_all_processes_end_with_the_command(tmp_path: Path, how: signal.Signals) -> None:
    arguments = ["compare", "--algorithms", "fedavg,fedprox", *QUICK, *OUT, "--jobs", "2"]
    command = [str(FEDOPT), *arguments, "--set", "federation.num_rounds=100000"]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background has it not
    with subprocess.Popen(command, cwd=tmp_path, stdout=-1, stderr=-1, preexec_fn=heard) as process:
        begun = [tmp_path / "out" / name / "rounds.jsonl" for name in ("fedavg", "fedprox")]
        wait_until(lambda: all(p.exists() and p.stat().st_size for p in begun), lambda: "rounds")
        process.send_signal(how)
        process.communicate(timeout=60)
    wait_until(lambda: not growing(begun), lambda: "the end of all")


def growing(files: list[Path]) -> bool:
    before = [file.stat().st_size for file in files]
    time.sleep(1)
    return before != [file.stat().st_size for file in files]


def children_of(parent: int) -> list[int]:
    """All processes below a process, of any generation."""
    found = []
    for task in Path(f"/proc/{parent}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *children_of(child)]
    return found


def open_files(process: int) -> set[str]:
    return {os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir()}


def test_a_curve_over_a_value_has_a_row_and_a_point_for_each(
    tmp_path: Path, in_process: InProcess
) -> None:
    over = ["--curve-over", "rules.padamfed.step_scale=0.5,2", "--algorithms", "fedavg"]
    goals = ["--targets", "0.1,gradient_norm=0.7", "--set", "output.diagnostics=true"]
    result = in_process("compare", *over, *goals, *QUICK, *OUT)
    assert result.returncode == 0, result.stderr
    rows = rows_of(tmp_path)
    assert list(rows) == ["fedavg", "padamfed:step_scale=0.5", "padamfed:step_scale=2"]
    rates = [rows[f"padamfed:step_scale={v}"]["hyperparameters"] for v in ("0.5", "2")]
    assert rates[1]["client_learning_rate"] == pytest.approx(4 * rates[0]["client_learning_rate"])
    assert all(row["rounds_to"].keys() == {"0.1", "gradient_norm 0.7"} for row in rows.values())
    lines = (tmp_path / "out" / "fedavg" / "rounds.jsonl").read_text().splitlines()
    norms = {r["round"]: r["gradient_norm"] for r in map(json.loads, lines)}
    reached = [number for number, norm in norms.items() if norm <= 0.7]
    assert rows["fedavg"]["rounds_to"]["gradient_norm 0.7"] == min(reached, default=None)
    assert (tmp_path / "out" / "sweep.png").is_file()


def test_close_values_stay_apart() -> None:
    sweep = Sweep("padamfed", "step_scale", (0.1, 0.1000001, 3.0))
    numbers = ("0.1", "0.1000001", "3")
    assert sweep.labels == [f"padamfed:step_scale={number}" for number in numbers]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--curve-over", "padamfed.step_scale=1"], "must be rules.NAME.KEY=V1,V2,..."),
        (["--curve-over", "rules.padamfed.step_scale=a"], "must be rules.NAME.KEY=V1,V2,..."),
        (["--curve-over", "rules.padamfed.step_scale=nan"], "with numbers"),
        (["--curve-over", "rules.padamfed.step_scal=1"], "did you mean 'step_scale'?"),
        (["--curve-over", "rules.padamfd.step_scale=1"], "did you mean 'padamfed'?"),
        (["--curve-over", "rules.padamfed.step_scale=-1"], "algorithm.step_scale"),
        (["--targets", "gradient_norm=1"], "only with output.diagnostics = true"),
        (["--targets", "drift=1"], "--targets: got 'drift', which is measured only with output."),
        (["--targets", "worst_test_accuracy=1"], "only with evaluation.on_clients = true"),
        (["--targets", "gradient=1"], "--targets: unknown 'gradient'"),
        (["--targets", "gradient_norm=-1"], "--targets: got '-1'"),
        (["--jobs", "0"], "--jobs"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    in_process: InProcess, arguments: list[str], message: str
) -> None:
    result = in_process("compare", *arguments)
    assert result.returncode == 2
    assert message in " ".join(result.stderr.split())

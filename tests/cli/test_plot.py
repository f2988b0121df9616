"""`fedopt plot` as a user runs it: what it reads, draws, says and refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import write_run_at_work
from matplotlib.figure import Figure
from processes import QUICK, InProcess, Processes, fedopt, refused, wait_until

from fedopt_flwr import simulate
from fedopt_flwr.rounds.record import RoundRecord, as_json
from fedopt_flwr.run.plots import look
from fedopt_flwr.run.reading import read_so_far


def finished(folder: Path, **sections: dict[str, Any]) -> None:
    """A short run, as `fedopt simulate` leaves it."""
    defaults: dict[str, dict[str, Any]] = {
        "algorithm": {"name": "fedavg"},
        "federation": {"num_rounds": 3, "num_clients": 4, "clients_per_round": 2},
        "training": {"local_steps": 2},
        "model": {"options": {"hidden": [4]}},
        "output": {"directory": str(folder)},
    }
    for name, section in sections.items():
        defaults[name] = defaults.get(name, {}) | section
    simulate(defaults)


def measured(number: int, accuracy: float) -> RoundRecord:
    return RoundRecord(
        number,
        [0, 1],
        train_loss=1 - accuracy,
        test_loss=1 - accuracy,
        test_metric=accuracy,
        test_accuracy=accuracy,
        test_metrics={"accuracy": accuracy},
    )


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures of all pictures that are written."""
    found: list[Figure] = []
    save = look.save

    def kept(figure: Figure, path: Path) -> None:
        found.append(figure)
        save(figure, path)

    monkeypatch.setattr(look, "save", kept)
    return found


def lines(figure: Figure) -> dict[str, list[float]]:
    """The heights of the curves in the upper panel, by name."""
    named = [x for x in figure.axes[0].get_lines() if not str(x.get_label()).startswith("_")]
    return {str(line.get_label()): [float(y) for y in line.get_ydata()] for line in named}


def test_runs_and_comparisons_are_drawn_together_finished_or_not(
    tmp_path: Path, in_process: InProcess, figures: list[Figure]
) -> None:
    finished(tmp_path / "both" / "one")
    finished(tmp_path / "both" / "two", federation={"seed": 1})
    write_run_at_work(tmp_path / "now", measured(1, 0.4), measured(2, 0.6))
    with (tmp_path / "now" / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3, "clie')
    ended = in_process("plot", "both", "now", "now", "both/one", "--output", "p.svg")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "3 runs drawn in p.svg\n"
    assert ended.stderr == ""
    assert (tmp_path / "p.svg").read_bytes().startswith(b"<?xml")
    curves = lines(figures[-1])
    now, fedavg = sorted(curves)
    assert now.startswith("autofed, ")
    assert curves[now] == pytest.approx([0.6, 0.4])
    seeds = [read_so_far(tmp_path / "both" / name).rounds for name in ("one", "two")]
    means = [1 - (a.test_accuracy + b.test_accuracy) / 2 for a, b in zip(*seeds, strict=True)]  # type: ignore[operator]
    assert fedavg.startswith("fedavg, ")
    assert curves[fedavg] == pytest.approx(means)
    texts = [text.get_text() for text in figures[-1].axes[0].texts]
    assert any("so far, round 2" in " ".join(text.split()) for text in texts)


@pytest.mark.slow
def test_what_compare_leaves_is_drawn_again_with_the_same_curves(
    in_process: InProcess, figures: list[Figure]
) -> None:
    rules = "fedavg,fedavg:client_learning_rate=0.2,padamfed"
    more = ("--seeds", "0,1", "--targets", "0.1", "--set", "output.directory=out")
    ended = in_process("compare", "--algorithms", rules, *more, *QUICK)
    assert ended.returncode == 0, ended.stderr
    assert in_process("plot", "out").returncode == 0
    compared, plotted = figures[-2:]
    assert [text.get_text() for text in compared.texts[-1:]] == [
        "What it costs to reach 10 % accuracy"
    ]
    assert set(lines(compared)) == {"fedavg", "fedavg, client_learning_rate=0.2", "padamfed"}
    again = {
        name.replace(", client_learning_rate=0.05", ""): y for name, y in lines(plotted).items()
    }
    assert again == lines(compared)
    by_hand = [read_so_far(Path(f"out/padamfed-seed{seed}")).rounds for seed in (0, 1)]
    ends = [rounds[-1].test_accuracy or 0.0 for rounds in by_hand]
    assert lines(plotted)["padamfed"][-1] == pytest.approx(1 - sum(ends) / 2)


@pytest.mark.slow
def test_a_run_of_another_process_is_drawn_while_it_is_at_work(
    tmp_path: Path, processes: Processes
) -> None:
    many = ["--set", "federation.num_rounds=100000", "--set", "output.directory=now"]
    run = processes.start("run", "simulate", *many, *QUICK[2:])
    records = tmp_path / "now" / "rounds.jsonl"
    wait_until(lambda: records.exists() and records.stat().st_size > 2000, lambda: run.log)
    for _ in range(3):
        ended = fedopt("plot", "now", "--output", "now.svg", cwd=tmp_path)
        assert (ended.returncode, ended.stderr) == (0, "")
    assert run.process.poll() is None
    assert (tmp_path / "now.svg").is_file()
    run.kill()
    with records.open("rb+") as file:
        file.truncate(records.stat().st_size - 7)  # as a line that was being written
    assert fedopt("plot", "now", cwd=tmp_path).stdout == "1 run drawn in plot.png\n"


def test_one_run_is_drawn_with_its_clients_and_over_bytes_or_seconds(
    tmp_path: Path, in_process: InProcess, figures: list[Figure]
) -> None:
    finished(tmp_path / "run")
    for unit, heading in (("bytes", "MB down and up"), ("seconds", "seconds of rounds")):
        ended = in_process("plot", "run", "--x", unit)
        assert ended.stdout == "1 run drawn in plot.png\n"
        axes = {a.get_title(loc="left"): a for a in figures[-1].axes}
        assert "Who took part; no reply failed" in axes
        assert axes["Losses"].get_xlabel().startswith(heading)
        rounds = read_so_far(tmp_path / "run").rounds
        (line,) = axes["Test error"].get_lines()
        costs = {
            "bytes": sum(r.uplink_bytes + r.downlink_bytes for r in rounds) / 1e6,
            "seconds": sum(r.seconds for r in rounds),
        }
        assert line.get_xdata()[-1] == pytest.approx(costs[unit])  # type: ignore[index]
        assert line.get_ydata()[-1] == pytest.approx(1 - (rounds[-1].test_accuracy or 0))  # type: ignore[index]


@pytest.mark.parametrize(("unit", "heading"), [("bytes", "MB down"), ("seconds", "seconds of")])
def test_several_runs_are_drawn_over_bytes_or_seconds_as_a_pdf(
    unit: str, heading: str, tmp_path: Path, in_process: InProcess, figures: list[Figure]
) -> None:
    for name, cost in (("cheap", 1.0), ("dear", 3.0)):
        rounds = [measured(1, 0.5), measured(2, 0.6)]
        for each in rounds:
            each.uplink_bytes, each.downlink_bytes, each.seconds = int(cost * 1e6), 0, cost
        write_run_at_work(tmp_path / name, *rounds, training={"local_steps": int(cost)})
    ended = in_process("plot", "cheap", "dear", "--x", unit, "--output", "p.pdf")
    assert (ended.stdout, ended.stderr) == ("2 runs drawn in p.pdf\n", "")
    assert (tmp_path / "p.pdf").read_bytes().startswith(b"%PDF")
    axes = figures[-1].axes[0]
    assert axes.get_xlabel().startswith(heading)
    found = {str(line.get_label()): [*map(float, line.get_xdata())] for line in axes.get_lines()}
    assert found["local_steps=1"] == [1.0, 2.0]
    assert found["local_steps=3"] == [3.0, 6.0]


def test_the_loss_of_the_start_pass_is_no_training_loss_of_a_round(
    tmp_path: Path, in_process: InProcess, figures: list[Figure]
) -> None:
    """It is that of the untrained model, before any step."""
    rounds = [RoundRecord(n, [0], train_loss=loss) for n, loss in enumerate((2.0, 1.0, 0.5))]
    write_run_at_work(tmp_path / "one", *rounds, training={"local_steps": 1})
    write_run_at_work(tmp_path / "other", *rounds, training={"local_steps": 2})
    for runs in (["one"], ["one", "other"]):
        assert in_process("plot", *runs).returncode == 0
        assert [*lines(figures[-1]).values()] == [[1.0, 0.5]] * len(runs)


def test_a_run_without_a_round_is_left_out_and_alone_refused(
    tmp_path: Path, in_process: InProcess
) -> None:
    write_run_at_work(tmp_path / "young")
    write_run_at_work(tmp_path / "old", measured(1, 0.5))
    ended = in_process("plot", "young", "old")
    assert ended.stdout == "1 run drawn in plot.png\n"
    assert "warning: RUN: no round is over yet in 'young', which is left out" in ended.stderr
    refused(in_process("plot", "young"), "RUN: no round is over yet in 'young'; try again")


def test_runs_without_what_is_drawn_are_left_out(tmp_path: Path, in_process: InProcess) -> None:
    untested = RoundRecord(1, [0], train_loss=1.0)
    write_run_at_work(tmp_path / "untested", untested, training={"local_steps": 3})
    write_run_at_work(tmp_path / "tested", measured(1, 0.5))
    ended = in_process("plot", "untested", "tested")
    assert ended.returncode == 0
    assert "no test error yet of local_steps=3, which is left out" in ended.stderr
    for name in ("empty", "void"):
        write_run_at_work(tmp_path / name, RoundRecord(1, failures=2))
    refused(in_process("plot", "empty", "void"), "none of these runs has a train loss yet")


def test_runs_that_cannot_be_compared_are_drawn_with_a_warning(
    tmp_path: Path, in_process: InProcess, figures: list[Figure]
) -> None:
    write_run_at_work(tmp_path / "digits", measured(1, 0.5))
    write_run_at_work(tmp_path / "mnist", measured(1, 0.6), data={"name": "mnist"})
    ended = in_process("plot", "digits", "mnist")
    assert ended.returncode == 0
    assert "these runs are of different data (digits, mnist); test error is drawn" in ended.stderr
    assert lines(figures[-1]) == {"digits": [0.5], "mnist": [0.4]}
    write_run_at_work(tmp_path / "f1", measured(1, 0.7), model={"metric": "f1"})
    ended = in_process("plot", "digits", "f1")
    assert "these runs have different metrics (accuracy, f1); their test loss" in ended.stderr
    assert "losses" not in ended.stderr
    assert figures[-1].axes[0].get_ylabel() == "test loss"
    write_run_at_work(tmp_path / "mse", measured(1, 0.7), model={"metric": "mse", "loss": "mse"})
    ended = in_process("plot", "digits", "mse")
    assert "different losses (cross_entropy, mse); test loss is drawn, and does not say" in (
        ended.stderr
    )


def test_bad_input_is_named_and_leaves_nothing(tmp_path: Path, in_process: InProcess) -> None:
    write_run_at_work(tmp_path / "run", measured(1, 0.5))
    (tmp_path / "file").touch()
    (tmp_path / "bare").mkdir()
    (tmp_path / "folder.png").mkdir()
    before = {path.name for path in tmp_path.iterdir()}
    cases = {
        ("nowhere",): ["RUN: got 'nowhere'; there is no such folder; name the folder of a run"],
        ("file",): ["RUN: got 'file'; it is a file; name the folder of a run"],
        ("bare",): ["RUN: got 'bare'; neither it nor a folder in it holds a run (rounds.jsonl)"],
        ("run", "--output", "p.gif"): ["--output: got 'p.gif'; must end with .png, .svg or .pdf"],
        ("run", "--output", "p"): ["--output: got 'p'; must end with .png, .svg or .pdf"],
        ("run", "--output", "no/p.png"): ["--output: got 'no/p.png'; there is no folder 'no'"],
        ("run", "--output", "folder.png"): ["--output: cannot write 'folder.png'", "is a folder"],
        ("run", "--x", "epochs"): ["'epochs' is not one of 'rounds', 'bytes',"],
        (): ["Missing argument 'RUN...'"],
    }
    for arguments, texts in cases.items():
        refused(in_process("plot", *arguments), *texts)
    assert {path.name for path in tmp_path.iterdir()} == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path, in_process: InProcess) -> None:
    write_run_at_work(tmp_path / "run", measured(1, 0.5))
    (tmp_path / "closed").mkdir(mode=0o500)
    refused(
        in_process("plot", "run", "--output", "closed/p.png"),
        "--output: got 'closed/p.png'; 'closed' cannot be written to",
    )


def test_a_disk_that_is_full_costs_no_picture_that_is_there(
    tmp_path: Path, in_process: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run_at_work(tmp_path / "run", measured(1, 0.5))
    assert in_process("plot", "run").returncode == 0
    before = (tmp_path / "plot.png").read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedopt_flwr.files.replacing", full)
    refused(in_process("plot", "run"), "--output: cannot write 'plot.png': No space left on device")
    assert (tmp_path / "plot.png").read_bytes() == before


def test_a_broken_line_of_the_records_is_named(tmp_path: Path, in_process: InProcess) -> None:
    write_run_at_work(tmp_path / "run", measured(1, 0.5), measured(2, 0.6))
    with (tmp_path / "run" / "rounds.jsonl").open("a") as file:
        file.write("garbage\n")
    refused(in_process("plot", "run"), "RUN: line 3 of 'run/rounds.jsonl' is no record of a round")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("on_clients", {"spread": [1]}, "on_clients.spread: Input should be"),
        ("on_clients", {"own_spread": {"accuracy": 1}}, "on_clients.own_spread.accuracy: Input"),
        ("on_clients", {"spread": {"loss": {"worst": "x"}}}, "on_clients.spread.loss.worst: Input"),
        ("errors", [{"client": None, "phase": "train", "error": "x"}], "errors.0.client"),
        ("errors", [{"client": [1], "phase": "train", "error": "x"}], "errors.0.client"),
        ("errors", [{"client": 1, "phase": 2, "error": "x"}], "errors.0.phase: Input should be"),
        ("errors", [{"client": 1, "phase": "train"}], "errors.0.error: Field required"),
        ("round", 1, "round: got 1 after round 1; must be above it"),
    ],
)
def test_a_line_whose_contents_are_wrong_is_named(
    name: str, value: Any, text: str, tmp_path: Path, in_process: InProcess
) -> None:
    write_run_at_work(tmp_path / "run", measured(1, 0.5))
    line = as_json(measured(2, 0.6).to_dict()) | {name: value}
    with (tmp_path / "run" / "rounds.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    start = "RUN: line 2 of 'run/rounds.jsonl' is no record of a round"
    refused(in_process("plot", "run"), f"{start}: {text}")


@pytest.mark.parametrize("number", [7, "one", [1]])
def test_a_divergence_that_no_record_tells_of_costs_no_picture(
    number: Any, tmp_path: Path, in_process: InProcess
) -> None:
    for name in ("one", "other"):
        write_run_at_work(tmp_path / name, measured(1, 0.5), federation={"seed": len(name)})
        summary = {"diverged_at": number, "best_round": None}
        (tmp_path / name / "summary.json").write_text(json.dumps(summary))
    for runs in (["one"], ["one", "other"]):
        ended = in_process("plot", *runs)
        assert (ended.returncode, ended.stderr) == (0, "")


def test_a_plot_needs_neither_torch_nor_flower(tmp_path: Path) -> None:
    write_run_at_work(tmp_path / "one", measured(1, 0.5))
    write_run_at_work(tmp_path / "other", measured(1, 0.6), federation={"num_rounds": 9})
    program = (
        "import sys\nfrom typer.testing import CliRunner\nfrom fedopt_flwr.cli import app\n"
        "print(CliRunner().invoke(app, ['plot', 'one', 'other']).output)\n"
        "print({'torch', 'flwr', 'ray'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", program]
    text = subprocess.check_output(command, text=True, cwd=tmp_path)
    assert text.split("\n") == ["2 runs drawn in plot.png", "", "set()", ""]


def test_help_says_what_is_read_and_written(in_process: InProcess) -> None:
    ended = in_process("plot", "--help")
    assert ended.returncode == 0
    text = " ".join(ended.stdout.split())
    assert "RUN..." in text
    for part in ("finished or not", "[rounds|bytes|seconds]", ".png, .svg or .pdf", "plot.png"):
        assert part in text
    assert "plot" in in_process("--help").stdout

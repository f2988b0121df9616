"""`fedopt reproduce`: what runs, what is kept, and that claims are judged by what was found."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from processes import InProcess, refused

from fedopt_flwr.cli import reproduction
from fedopt_flwr.cli.claims import STUDIES, Claim, Row, Study, over
from fedopt_flwr.run.result import Outcome

RATES = (0.01, 0.5, 1e30)  # the last diverges
SMALL = """
[federation]
num_clients = 4
clients_per_round = 2
num_rounds = 3
[model]
options = { hidden = [4] }
"""
TOY = Study(
    "a toy",
    "toy.small.toml",
    {"fedavg": Row("fedavg", over("client_learning_rate", *RATES)), "none": Row("padamfed", ({},))},
    (
        Claim("gain", lambda f: f("fedavg", variant="S = 2") - f("none", variant="S = 2"), ">", 2),
        Claim("level", lambda f: f("fedavg", "accuracy", "S = 2"), "<", 2.0, "as it must"),
        Claim("never", lambda f: f("none", "rounds", "S = 4"), "<", 100.0),
    ),
    {f"S = {s}": (f"federation.clients_per_round={s}",) for s in (2, 4)},
    counts_rounds=True,
    target=0.999,
)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like a clone, with one study."""
    (tmp_path / "examples/papers").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "examples/papers/toy.small.toml").write_text(SMALL)
    monkeypatch.setattr(reproduction, "STUDIES", {"R1": TOY})
    return tmp_path


def cells(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "examples/papers/results.json").read_text())
    return found


@pytest.mark.slow
def test_missing_cells_run_and_claims_are_judged(toy: Path, in_process: InProcess) -> None:
    first = in_process("reproduce", "R1", "--jobs", "2")
    assert first.returncode == 0, first.stderr
    found = cells(toy)
    # seed 0 of all points, the best one on the other seeds
    assert len(found) == 2 * (len(RATES) + 2 + 1 + 2)
    at_zero = {
        rate: found[f"R1 | S = 2 | fedavg, client_learning_rate={rate:g} | 0"] for rate in RATES
    }
    assert at_zero[1e30]["accuracy"] < 0.2  # every round was taken back
    best = max(RATES[:2], key=lambda rate: at_zero[rate]["accuracy"])
    label = f"R1 | S = 2 | fedavg, client_learning_rate={best:g}"
    mean = fmean(found[f"{label} | {seed}"]["accuracy"] for seed in (0, 1, 2))
    other = fmean(found[f"R1 | S = 2 | none | {seed}"]["accuracy"] for seed in (0, 1, 2))
    text = (toy / "docs/reproduction.md").read_text()
    assert f"| R1 | gain | > 2 | {mean - other:.4g} | **no** |  |" in text
    assert f"| R1 | level | < 2 | {mean:.4g} | yes | as it must |" in text
    assert "| R1 | never | < 100 | never reached | **no** |  |" in text
    assert f"| S = 2 | fedavg | client_learning_rate={best:g} | {mean:.4f} ±" in text
    del found[f"{label} | 2"]
    (toy / "examples/papers/results.json").write_text(json.dumps(found))
    again = in_process("reproduce", "R1")
    assert again.returncode == 0, again.stderr
    assert [line for line in again.stdout.splitlines() if line.startswith("  R1")] == [
        line for line in again.stdout.splitlines() if line.startswith(f"  {label} | 2")
    ]
    assert len(cells(toy)) == len(found) + 1
    assert (toy / "docs/reproduction.md").read_text().splitlines()[:14] == text.splitlines()[:14]


def test_a_run_that_failed_is_no_result(
    toy: Path, in_process: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was killed says nothing of its rule; the next attempt runs it again."""
    good = Outcome(
        rounds=[], summary={"final_test_accuracy": 0.5, "final_test_loss": 1.0, "seconds": 1.0}
    )

    def run(cells: Any, *, on_end: Any, **_: int) -> None:
        for number, cell in enumerate(cells):
            on_end(cell, "its process ended with exit code -9" if number == 0 else good, [])

    monkeypatch.setattr(reproduction, "run_side_by_side", run)
    result = in_process("reproduce", "R1")
    assert result.returncode == 1
    assert "exit code -9" in result.stderr
    assert "R1: run it again for what is missing" in result.stderr
    assert len(cells(toy)) == 2 * (len(RATES) + 1) - 1
    assert all("error" not in found for found in cells(toy).values())


def test_what_was_not_run_is_said(toy: Path) -> None:
    (toy / "examples/papers/results.json").write_text("{}")
    text = reproduction.report(reproduction.Results(toy / "examples/papers/results.json"))
    assert text.count("not run yet") == 4


def test_reproduce_refuses_what_it_does_not_know(tmp_path: Path, in_process: InProcess) -> None:
    refused(in_process("reproduce", "R11"), "fedopt reproduce: unknown 'R11'; did you mean")
    refused(in_process("reproduce", "R1"), "run it in the folder of a clone")
    (tmp_path / "examples/papers").mkdir(parents=True)
    (tmp_path / "examples/papers/results.json").write_text("{")
    refused(in_process("reproduce", "R1"), "examples/papers/results.json: cannot be read")


def test_the_report_of_the_repository_is_that_of_its_results() -> None:
    """docs/reproduction.md follows from examples/papers/results.json and the claims, today's."""
    root = Path(__file__).parents[2]
    results = reproduction.Results(root / reproduction.RESULTS)
    assert (root / reproduction.REPORT).read_text(encoding="utf-8") == reproduction.report(results)
    known = {key.split(" | ")[0] for key in results.known}
    assert known <= {*STUDIES, "R10"}


def test_the_width_of_a_range_by_hand() -> None:
    """Best 0.9 at 3; 0.89 at 1 and 10 belong to it, 0.85 at 30 does not: one decade."""
    from fedopt_flwr.cli.claims import _decades

    ends = {"c 0.3": 0.895, "c 1": 0.5, "c 3": 0.9, "c 10": 0.89, "c 30": 0.881, "c 100": 0.85}

    def found(row: str, *_: object) -> float:
        return ends[row]

    assert _decades(found, "c ", (0.3, 1, 3, 10, 30, 100)) == pytest.approx(1.0)

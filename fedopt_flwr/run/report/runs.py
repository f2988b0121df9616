"""The runs of a page, with what their lines hold of single clients."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...problems import foreign_text
from ...rounds.record import RoundRecord
from ..reading import ROUNDS, RecordedRun, read_so_far

COMPARISON = "comparison.json"
DIAGNOSES = ("drift", "control_norm", "gradient_cosine")
_LONGEST_NAME = 120


@dataclass
class ReportRecord(RoundRecord):
    """A round with how far its clients are from each other; nothing of it where not recorded."""

    drift: float | None = None
    control_norm: float | None = None
    gradient_cosine: float | None = None
    each_client: dict[str, dict[str, float]] = field(default_factory=dict)  # by client, as text


def read_runs(folders: Sequence[Path]) -> list[RecordedRun]:
    """Return the runs in these folders, finished or not, their rounds as `ReportRecord`s.

    ConfigError names the line or file that cannot be read.
    """
    return [_with_diagnoses(read_so_far(folder)) for folder in folders]


def _with_diagnoses(run: RecordedRun) -> RecordedRun:
    found: dict[Any, dict[str, Any]] = {}
    with (run.path / ROUNDS).open("rb") as lines:
        for line, _ in zip(lines, run.rounds, strict=False):  # of a run at work there may be more
            values = json.loads(line)
            found[values["round"]] = values
    return replace(run, rounds=[_record(r, found.get(r.round, {})) for r in run.rounds])


def _record(record: RoundRecord, line: dict[str, Any]) -> ReportRecord:
    more = {name: number_of(line.get(name)) for name in DIAGNOSES}
    each = line.get("each_client")
    clients = each if isinstance(each, dict) else {}
    own = {
        client: {k: n for k, v in values.items() if (n := number_of(v)) is not None}
        for client, values in clients.items()
        if isinstance(values, dict)
    }
    return ReportRecord(**{**record.to_dict(), **more, "each_client": own})


def number_of(value: object) -> float | None:
    """Return a finite number, or None for anything else."""
    if type(value) is float and math.isfinite(value):  # most, and there are many
        return value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]


def names_of(runs: Sequence[RecordedRun]) -> list[str]:
    """Name each run by its folder, by the whole path where two folders have one name."""
    last = [run.path.resolve().name for run in runs]
    return [
        foreign_text(name if last.count(name) == 1 else run.path, _LONGEST_NAME)
        for name, run in zip(last, runs, strict=True)
    ]


def failed_cells(given: Sequence[Path]) -> list[tuple[str, str]]:
    """Return name and error of what failed in comparisons among these folders."""
    failed = []
    for folder in given:
        try:
            rows = json.loads((folder / COMPARISON).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):  # a run, or a comparison at work
            continue
        for row in rows if isinstance(rows, list) else []:
            if isinstance(row, dict) and row.get("error"):
                failed.append((foreign_text(row.get("algorithm")), foreign_text(row["error"])))
    return failed

"""The names of a page's runs, and what of a comparison could not be run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ...problems import foreign_text
from ..grouping import numbered
from ..reading import RecordedRun

COMPARISON = "comparison.json"
_LONGEST_NAME = 120


def names_of(runs: Sequence[RecordedRun]) -> list[str]:
    """Name each run by its folder, by the whole path where two folders have one name; of paths
    that are too long to be told apart the later ones are numbered."""
    last = [run.path.resolve().name for run in runs]
    names = [
        foreign_text(name if last.count(name) == 1 else run.path, _LONGEST_NAME)
        for name, run in zip(last, runs, strict=True)
    ]
    return numbered(names)


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

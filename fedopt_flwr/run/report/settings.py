"""What was set, and what differs between runs; the rules with formula and source; versions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ...algorithms import ALGORITHMS
from ...problems import foreign_text
from ..grouping import flat_settings
from ..reading import RecordedRun
from ..versions import read_versions

_LONGEST_VALUE = 300


def settings_of(groups: Sequence[Sequence[RecordedRun]]) -> list[dict[str, Any]]:
    """Return a row for each key: its value in each group of runs, and whether they differ."""
    columns = [_column(runs) for runs in groups]
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = []
    for key in keys:
        values = [column.get(key, ["–"]) for column in columns]
        differs = len({text for texts in values for text in texts}) > 1
        texts = [", ".join(own) for own in values]
        is_one = len(set(texts)) == 1
        rows.append({"key": key, "values": texts[:1] if is_one else texts, "differs": differs})
    return sorted(rows, key=lambda row: not row["differs"])


def _column(runs: Sequence[RecordedRun]) -> dict[str, list[str]]:
    """Return the values of runs that differ in nothing that counts, each text once."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        values = run.config.to_dict()
        values["algorithm"] = {**_rule_values(run), "name": run.config.algorithm.name}
        for key, value in flat_settings(values):
            if key == "output.directory":  # the page names the folders; they differ in every run
                continue
            found.setdefault(key, {})[foreign_text(value, _LONGEST_VALUE)] = None
    return {key: [*texts] for key, texts in found.items()}


def _rule_values(run: RecordedRun) -> Mapping[str, Any]:
    """Return all hyperparameters of a rule of this package, of another those that were given."""
    name = run.config.algorithm.name
    if name not in ALGORITHMS:
        return {**run.config.rules.get(name, {}), **run.config.algorithm.hyperparameters}
    values = run.config.make_rule().model_dump(mode="json")
    return {key: "chosen by the rule" if value is None else value for key, value in values.items()}


def rules_of(runs: Sequence[RecordedRun]) -> list[dict[str, str]]:
    """Return name, title, formula and source of each rule among the runs."""
    names = dict.fromkeys(run.config.algorithm.name for run in runs)
    return [_rule(name) for name in names]


def _rule(name: str) -> dict[str, str]:
    kind = ALGORITHMS.get(name)
    if kind is None:
        title = "A rule of your own, which a report does not load"
        return {"name": foreign_text(name), "title": title, "formula": "", "source": ""}
    documentation = inspect.cleandoc(sys.modules[kind.__module__].__doc__ or "")
    title, _, source = documentation.partition("\n")
    formula = inspect.cleandoc(kind.__doc__ or "")
    return {"name": name, "title": title, "formula": formula, "source": source.strip()}


def versions_of(runs: Sequence[RecordedRun]) -> list[tuple[str, str]]:
    """Return what was installed when these runs began; several versions where they differ."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, version in (read_versions(run.path) or {"Python": "not recorded"}).items():
            found.setdefault(foreign_text(name, _LONGEST_VALUE), {})[
                foreign_text(version, _LONGEST_VALUE)
            ] = None
    return [(name, ", ".join(texts)) for name, texts in found.items()]

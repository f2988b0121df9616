"""The page: what is known of some runs as one file of HTML that asks for nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from ...problems import foreign_text
from ...rounds.record import RoundRecord, as_json
from ..grouping import curves_of
from ..plots import look
from ..plots.subject import subject_of
from ..reading import RecordedRun, read_so_far
from .clients import MOST_ROWS, clients_of
from .curves import Ranked, colours_of, measures_of, panel, ranked
from .labels import Labels, picture_of
from .results import results_of
from .runs import failed_cells, names_of
from .settings import rules_of, settings_of, versions_of
from .words import summary_of

MARK = b"<!DOCTYPE html><!-- fedopt report -->"  # how every page begins
PARTS = ("header", "summary", "results", "settings", "rules", "versions")  # macros of parts.html
_HERE = Path(__file__).parent
_ENVIRONMENT = Environment(
    loader=FileSystemLoader(_HERE),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


class Report:
    """Runs as a page: `words` are what is written as HTML, `numbers` what is drawn from JSON."""

    def __init__(
        self,
        folders: Sequence[Path],
        given: Sequence[Path] = (),
        labels: Labels | None = None,
        parse: Callable[[bytes], RoundRecord] | None = None,
    ) -> None:
        """Read the runs in these folders; `given` may hold comparisons whose failures count.

        `labels` and `parse` are those of an earlier page of these runs: what they remember is not
        computed again. ConfigError says which file cannot be read.
        """
        runs = [read_so_far(folder, parse) for folder in folders]
        names = names_of(runs)
        curves = curves_of(runs)
        found = ranked(curves, runs)
        groups = _groups(found, runs)
        subject = subject_of([run.config for run in runs])
        counts = labels or Labels()
        self.words: dict[str, Any] = {
            "title": f"{_title(found, names)} on {subject.data}",
            "setting": subject.setting,
            "summary": summary_of(runs, names, found, failed_cells(given)),
            "names": [curve.name for curve in found.curves],
            "results": results_of(found),
            "settings": settings_of(groups),
            "rules": rules_of(runs),
            "versions": versions_of(runs),
            "runs": [foreign_text(run.path, 300) for run in runs],
        }
        self.numbers: dict[str, Any] = {
            "curves": [curve.name for curve in found.curves],
            "colours": colours_of(len(found.curves)),
            "named": len(look.COLOURS),
            "alarm": look.ALARM,
            "measures": [panel(found, measure) for measure in measures_of(found)],
            "runs": [
                _clients(run, name, counts.of(run), len(runs))
                for run, name in zip(runs, names, strict=True)
            ],
            "most_rows": MOST_ROWS,
        }

    def parts(self) -> dict[str, str]:
        """Return the written parts of the page, by name."""
        macros = _ENVIRONMENT.get_template("parts.html").module
        return {name: str(getattr(macros, name)(self.words)) for name in PARTS}

    def html(self, live: str = "") -> bytes:
        """Return the page; with `live`, a state of the runs, it asks its server for newer ones."""
        scripts = [_plotly(), _text("page.js")]
        page = _ENVIRONMENT.get_template("page.html").render(
            words=self.words,
            numbers=as_json(self.numbers),
            live=live,
            style=_text("page.css"),
            scripts=scripts,
            hashes=[_hash(script) for script in scripts],
        )
        return MARK + page.encode()


def _title(found: Ranked, names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"{found.curves[0].name}: {names[0]}"
    curves = len(found.curves)
    return f"{len(names)} runs" if curves == len(names) else f"{len(names)} runs, {curves} curves"


def _groups(found: Ranked, runs: Sequence[RecordedRun]) -> list[list[RecordedRun]]:
    """Return the runs of each curve."""
    by_rounds = {id(run.rounds): run for run in runs}
    return [[by_rounds[id(trace.rounds)] for trace in curve.traces] for curve in found.curves]


def _clients(
    run: RecordedRun, name: str, counts: np.ndarray | str, num_runs: int
) -> dict[str, Any]:
    if isinstance(counts, str):
        own = clients_of(run, None, num_runs)
        return {"name": name, **own, "labels": None, "why_no_labels": counts}
    own = clients_of(run, counts.sum(axis=1).tolist(), num_runs)
    return {"name": name, **own, "labels": picture_of(counts), "why_no_labels": ""}


def _text(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _plotly() -> str:
    return str(get_plotlyjs()).replace("\r", "").replace("</script", r"<\/script")


def _hash(script: str) -> str:
    """Return a script as the page's policy names it: no other one is run."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def content(report: Report, state: str) -> bytes:
    """Return what changes on a page while a run goes on, as JSON."""
    values = {"state": state, "parts": report.parts(), "numbers": report.numbers}
    return json.dumps(as_json(values), separators=(",", ":")).encode()

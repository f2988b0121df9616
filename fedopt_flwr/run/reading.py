"""Runs read from their folders: finished ones, and those at work."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from ..algorithm import ClientId
from ..config.run_config import RunConfig
from ..config.text import read_toml
from ..errors import ConfigError
from ..rounds.record import RoundRecord
from .result import Outcome
from .summary import diverged_at

CONFIG = "config.toml"
ROUNDS = "rounds.jsonl"
SUMMARY = "summary.json"
_RECORD = TypeAdapter(RoundRecord)
_Spread = dict[str, dict[str, float | None]]  # by metric, and what of it


class _Error(BaseModel):
    client: ClientId
    phase: str
    error: str


class _OnClients(BaseModel):
    spread: _Spread = {}
    own_spread: _Spread = {}


class _Tables(BaseModel):
    """What pictures and tables read of the values in a record that have no type there."""

    errors: list[_Error] = []
    on_clients: _OnClients | None = None


@dataclass(frozen=True)
class RecordedRun:
    """A run as its folder tells of it."""

    path: Path
    config: RunConfig
    rounds: list[RoundRecord]
    diverged_at: int | None
    is_finished: bool
    stopped: str = ""  # "after round 7: ...", if it ended before its last round


def read_finished(path: Path) -> Outcome:
    """Return what a run that came to its end left in its folder; ConfigError if it is not whole."""
    try:
        lines = (path / ROUNDS).read_bytes().splitlines()
        records = [record_of_line(line) for line in lines]
        summary = _read_summary(path)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"output.directory: the run in {str(path)!r} cannot be read: {error}; remove it, and "
            "it is run again"
        ) from error
    return Outcome(rounds=_with_lost_losses(records), summary=summary)


def read_so_far(path: Path, parse: Callable[[bytes], RoundRecord] | None = None) -> RecordedRun:
    """Return a run, finished or not; a last line that is still being written is left out.

    `parse` may be a `record_of_line` that remembers what it returned. ConfigError names the line or
    file that cannot be read.
    """
    place = path / ROUNDS
    try:
        lines = place.read_bytes().split(b"\n")[:-1]  # what follows the last newline is unfinished
    except OSError as error:
        raise ConfigError(
            f"RUN: {str(place)!r} cannot be read: {error.strerror}; leave that run out"
        ) from error
    records: list[RoundRecord] = []
    for number, line in enumerate(lines, 1):
        try:
            record = (parse or record_of_line)(line)
            if records and record.round <= records[-1].round:
                raise ValueError(
                    f"round: got {record.round} after round {records[-1].round}; must be above it"
                )
            records.append(record)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"RUN: line {number} of {str(place)!r} is no record of a round: {error}; restore "
                "the file or leave that run out"
            ) from error
    records = _with_lost_losses(records)
    try:
        config = RunConfig(**read_toml(path / CONFIG))
    except ConfigError as error:
        raise ConfigError([f"RUN: {str(path)!r}: {text}" for text in error.problems]) from error
    is_finished = (path / SUMMARY).exists()
    found, stopped = diverged_at(records), ""
    with contextlib.suppress(OSError, ValueError, RecursionError):  # of another version
        if is_finished:
            summary = _read_summary(path)
            found, stopped = summary["diverged_at"], str(summary.get("stopped") or "")
    return RecordedRun(path, config, records, found, is_finished, stopped)


def _read_summary(path: Path) -> dict[str, Any]:
    summary = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
    is_known = isinstance(summary, dict) and {"diverged_at", "best_round"} <= summary.keys()
    if not is_known or not isinstance(summary["diverged_at"], int | None):
        raise ValueError(f"{SUMMARY} is not that of a run of this version")
    known: dict[str, Any] = summary
    return known


def run_folders(given: Sequence[Path]) -> list[Path]:
    """Return the folders of runs among these and, for a comparison, in them; each once.

    ConfigError names what is none of these.
    """
    found: dict[Path, Path] = {}
    for folder in given:
        if not folder.is_dir():
            what = "it is a file" if folder.exists() else "there is no such folder"
            raise ConfigError(
                f"RUN: got {str(folder)!r}; {what}; name the folder of a run or of a comparison"
            )
        own = [folder] if (folder / ROUNDS).exists() else sorted(folder.iterdir())
        inside = [path for path in own if (path / ROUNDS).is_file()]
        if not inside:
            raise ConfigError(
                f"RUN: got {str(folder)!r}; neither it nor a folder in it holds a run "
                f"({ROUNDS}); name the folder of a run or of a comparison"
            )
        for path in inside:
            found.setdefault(path.resolve(), path)
    return list(found.values())


def record_of_line(line: bytes) -> RoundRecord:
    """Return a line of rounds.jsonl as a record; ValueError says what is wrong with it."""
    values = json.loads(line)
    chosen = values.get("chosen") if isinstance(values, dict) else None
    if isinstance(chosen, dict):  # numbers that are not finite were written as null
        values["chosen"] = {k: math.nan if v is None else v for k, v in chosen.items()}
    try:
        record = _RECORD.validate_json(json.dumps(values), strict=True)
        _Tables.model_validate(values, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "a line"
        raise ValueError(f"{where}: {first['msg']}") from None
    return record


def _with_lost_losses(records: list[RoundRecord]) -> list[RoundRecord]:
    """Put back test losses that were not finite, which JSON cannot hold."""
    for record in records:
        if record.test_loss is None and record.test_metric is not None:
            record.test_loss = math.nan
    return records

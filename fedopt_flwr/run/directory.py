"""The files of a run: written as it goes, read again to resume it."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import filelock
import tomli_w
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from torch import Tensor

from ..errors import ConfigError, RunError
from ..files import replacing
from ..rounds.record import RoundRecord, as_json
from .checkpoints import (
    Checkpoint,
    has_checkpoint,
    has_old_checkpoint,
    read_checkpoint,
    save_tensors,
    write_checkpoint,
)

CONFIG = "config.toml"
ROUNDS = "rounds.jsonl"
SUMMARY = "summary.json"
MODEL = "model.safetensors"
CURVES = "curves.png"
_LOCK = ".lock"  # there while a process writes to the folder
_RECORD = TypeAdapter(RoundRecord)
_REMEDIES = {
    errno.EROFS: "make the folder writable",
    errno.EACCES: "make the folder writable",
    errno.EPERM: "make the folder writable",
}


class RunDirectory:
    """One run's folder. Nothing is created before `open`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rounds: TextIO | None = None
        self._lock = filelock.FileLock(path / _LOCK, blocking=False, fallback_to_soft=False)
        self._made: list[Path] = []  # folders that were not there, the innermost first

    def require_unused(self) -> None:
        """Raise ConfigError if another run's results lie here; they are never written over."""
        with self._usable():
            self._require_unused()

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: a null character
            raise ConfigError(
                f"output.directory: cannot write {str(self.path)!r}: {error}; name another folder"
            ) from error

    def _require_unused(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(
                f"output.directory: {str(self.path)!r} is a file; name a new or empty folder"
            )
        if (self.path / ROUNDS).exists():
            more = f", or continue it: --resume {self.path}" if has_checkpoint(self.path) else ""
            raise ConfigError(
                f"output.directory: {str(self.path)!r} already holds a run; name another folder or "
                f"remove this one{more}"
            )
        present = [name for name in (CONFIG, SUMMARY, MODEL, CURVES) if (self.path / name).exists()]
        if has_checkpoint(self.path) or has_old_checkpoint(self.path):
            present.append("checkpoint")
        if present:
            raise ConfigError(
                f"output.directory: {str(self.path)!r} holds a {present[0]!r}, which a run would "
                "write over; name a new or empty folder"
            )

    def open(self, config: Mapping[str, Any]) -> None:
        """Create the folder and start a run in it."""
        with self._usable():
            self._made = [p for p in (self.path, *self.path.parents) if not p.exists()]
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                self._rounds = (self.path / ROUNDS).open("x", encoding="utf-8")  # the only run here
            except OSError:
                self._remove_made()
                raise
            try:
                self.lock()
                with replacing(self.path / CONFIG) as unfinished:
                    unfinished.write_text(tomli_w.dumps(config), encoding="utf-8")
            except (OSError, ValueError):  # ValueError: text that UTF-8 cannot hold
                self.close()
                self.discard()
                raise

    def lock(self) -> None:
        """Keep other processes from continuing this run until `close`; the system unlocks it
        however this process ends. ConfigError if another has it."""
        if not self.path.is_dir():  # which locking would make
            return
        try:
            self._lock.acquire()
        except filelock.Timeout:
            self.close()
            raise ConfigError(
                f"--resume: the run in {str(self.path)!r} is not over, another process is at it; "
                "wait for it or stop it"
            ) from None
        except (OSError, NotImplementedError):  # a file system without locks
            pass

    def reopen(self, last_round: int) -> list[RoundRecord]:
        """Continue after `last_round`: later lines are dropped; return the records before."""
        self.lock()
        try:
            return self._reopen(last_round)
        except Exception:
            self.close()
            raise

    def _reopen(self, last_round: int) -> list[RoundRecord]:
        place = str(self.path / ROUNDS)
        try:
            lines = (self.path / ROUNDS).read_text(encoding="utf-8").splitlines()
            records = [_record(line) for line in lines if line.endswith("}")]
        except (OSError, ValueError) as error:  # ValueError: not UTF-8, not JSON, not a record
            raise ConfigError(
                f"--resume: {place!r} cannot be read: {error}; put it back or start a new run"
            ) from error
        kept = [record for record in records if record.round <= last_round]
        rounds = [record.round for record in kept]
        if rounds not in (list(range(last_round + 1)), list(range(1, last_round + 1))):
            raise ConfigError(
                f"--resume: {place!r} holds rounds {rounds}, not all up to that of the checkpoint "
                f"({last_round}); put it back or start a new run"
            )
        with self._writing("records"):
            with replacing(self.path / ROUNDS) as unfinished:
                unfinished.write_text("".join(_line(r) for r in kept), encoding="utf-8")
            self._rounds = (self.path / ROUNDS).open("a", encoding="utf-8")
        return kept

    def add(self, record: RoundRecord) -> None:
        """Append one round and flush it."""
        if self._rounds is not None:
            try:
                self._require_in_place(self._rounds)
                self._rounds.write(_line(record))
                self._rounds.flush()
            except OSError as error:
                self.close()
                raise RunError(
                    f"{self.path / ROUNDS}: round {record.round} cannot be written: {error}; "
                    f"{self._remedy(error)}"
                ) from error

    def _require_in_place(self, rounds: TextIO) -> None:
        """Raise FileNotFoundError if this path has become another run's, or nobody's."""
        if not self._is_in_place(rounds):
            raise FileNotFoundError(errno.ENOENT, "the run's folder was moved or removed")

    def _is_in_place(self, rounds: TextIO) -> bool:
        try:
            return os.path.samestat((self.path / ROUNDS).stat(), os.fstat(rounds.fileno()))
        except OSError:
            return False

    def close(self) -> None:
        is_ours = self._rounds is None or self._is_in_place(self._rounds)
        if self._rounds is not None:
            with contextlib.suppress(OSError):  # unwritten text was reported by `add`
                self._rounds.close()
            self._rounds = None
        if self._lock.is_locked:
            if is_ours:
                with contextlib.suppress(OSError):
                    (self.path / _LOCK).unlink()
            self._lock.release()

    def discard(self) -> None:
        """Remove what `open` made."""
        for name in (ROUNDS, CONFIG):
            (self.path / name).unlink(missing_ok=True)
        self._remove_made()

    def _remove_made(self) -> None:
        for folder in self._made:
            with contextlib.suppress(OSError):  # other things are in it, or it was never made
                folder.rmdir()

    def write_results(self, summary: Mapping[str, Any], model: Mapping[str, Tensor]) -> None:
        """Write the summary and the model; neither holds a time, an engine or a version's name."""
        with self._writing("results"):
            if self._rounds is not None:
                self._require_in_place(self._rounds)
        with self._writing("results"), replacing(self.path / SUMMARY) as unfinished:
            unfinished.write_text(json.dumps(as_json(summary), indent=2) + "\n", encoding="utf-8")
        with self._writing("results"), replacing(self.path / MODEL) as unfinished:
            save_tensors(model, unfinished)

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Replace the last checkpoint by this one; at any moment one whole checkpoint exists."""
        with self._writing("checkpoint"):
            if self._rounds is not None:  # which the checkpoint counts on
                self._require_in_place(self._rounds)
                os.fsync(self._rounds.fileno())
            write_checkpoint(self.path, checkpoint)

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise RunError(
                f"{self.path}: its {what} cannot be written: {error}; {self._remedy(error)}"
            ) from error

    def _remedy(self, error: Exception) -> str:
        code = getattr(error, "errno", None) or 0
        if code == errno.ENOENT:
            return (
                "put the folder back; if it holds a checkpoint, continue with --resume and its path"
            )
        advice = _REMEDIES.get(code, "make room")
        if not has_checkpoint(self.path):
            return f"{advice} and start again"
        return f"{advice}, then continue with --resume {self.path}"

    def read_checkpoint(self) -> Checkpoint:
        """Return the last checkpoint; ConfigError says what to do when there is none, or when the
        run is not over."""
        if self.path.is_dir():
            self.lock()
            self.close()
        return read_checkpoint(self.path)


def _record(line: str) -> RoundRecord:
    values = json.loads(line)
    chosen = values.get("chosen") if isinstance(values, dict) else None
    if isinstance(chosen, dict):  # numbers that are not finite were written as null
        values["chosen"] = {k: math.nan if v is None else v for k, v in chosen.items()}
    try:
        record = _RECORD.validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "a line"
        raise ValueError(f"{where}: {first['msg']}") from None
    if not all({"client", "phase", "error"} <= item.keys() for item in record.errors):
        raise ValueError("errors: each must have a client, a phase and an error")
    return record


def _line(record: RoundRecord) -> str:
    return json.dumps(as_json(record.to_dict())) + "\n"

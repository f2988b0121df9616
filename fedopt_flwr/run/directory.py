"""The files of a run: written as it goes, read again to resume it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, TextIO

import filelock
import tomli_w
from torch import Tensor, nn

from ..errors import ConfigError, RunError
from ..files import remove_rests, replacing, tensor_bytes
from ..flower.open_federation import FOLDER
from ..models.weights import plain_state
from ..rounds.record import RoundRecord, as_json
from .checkpoints import (
    Checkpoint,
    has_checkpoint,
    read_checkpoint,
    remove_checkpoints_after,
    write_checkpoint,
)
from .pretrained import PRETRAINED, write_pretrained
from .reading import CONFIG, ROUNDS, SUMMARY, record_of_line
from .trackers import IDENTITIES, TENSORBOARD
from .versions import VERSIONS, versions

MODEL = "model.safetensors"
BEST = "model_best.safetensors"
CURVES = "curves.png"
_LOCK = ".lock"  # there while a process writes to the folder
_PATIENCE_SECONDS = 60.0
_PAUSE_SECONDS = 0.5


class RunDirectory:
    """One run's folder. Nothing is created before `open`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rounds: TextIO | None = None
        self._lock = filelock.FileLock(path / _LOCK, blocking=False, fallback_to_soft=False)
        self._made: list[Path] = []  # folders that were not there, the innermost first

    def open(self, config: Mapping[str, Any]) -> None:
        """Create the folder and start a run in it.

        ConfigError if it cannot be written, or holds another run's results: they stay as they are.
        """
        try:
            self._require_unused()
            self._made = [p for p in (self.path, *self.path.parents) if not p.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            self._rounds = (self.path / ROUNDS).open("x", encoding="utf-8")  # the only run here
            self._take_lock()
            with replacing(self.path / CONFIG) as file:
                file.write(tomli_w.dumps(config).encode())
            with replacing(self.path / VERSIONS) as file:
                file.write(json.dumps(versions(), indent=2).encode() + b"\n")
        except (OSError, ValueError) as error:  # ValueError: text that no path or file can hold
            self.close()
            raise ConfigError(
                f"output.directory: cannot write {str(self.path)!r}: {error}; name another folder"
            ) from error

    def _require_unused(self) -> None:
        if (self.path / ROUNDS).exists():
            more = f", or continue it: --resume {self.path}" if has_checkpoint(self.path) else ""
            raise ConfigError(
                f"output.directory: {str(self.path)!r} already holds a run; name another folder or "
                f"remove this one{more}"
            )
        names = (CONFIG, SUMMARY, MODEL, BEST, CURVES, FOLDER, PRETRAINED, TENSORBOARD, IDENTITIES)
        patterns = (*names, VERSIONS, "checkpoint-*.safetensors")
        present = [path.name for name in patterns for path in self.path.glob(name)]
        if present:
            raise ConfigError(
                f"output.directory: {str(self.path)!r} holds a {present[0]!r}, which a run would "
                "write over; name a new or empty folder"
            )

    def _take_lock(self) -> None:
        """Keep other processes from continuing this run until `close`; the system unlocks it
        however this process ends. ConfigError if another has it."""
        if not self.path.is_dir():  # which locking would make
            return
        try:
            self._lock.acquire()
        except filelock.Timeout:
            raise ConfigError(
                f"--resume: the run in {str(self.path)!r} is not over, another process is at it; "
                "wait for it or stop it"
            ) from None
        except (OSError, NotImplementedError):  # a file system without locks
            pass

    def forget_unbegun(self) -> None:
        """Remove the files of a run that ended before round 1 and left no checkpoint.

        ConfigError if another process is at it.
        """
        rounds = self.path / ROUNDS
        if has_checkpoint(self.path) or not rounds.exists():
            return
        if len(rounds.read_bytes().splitlines()) > 1:  # of round 0 and more
            return
        self._take_lock()
        try:
            for name in (FOLDER, TENSORBOARD):
                shutil.rmtree(self.path / name, ignore_errors=True)
            for name in (ROUNDS, CONFIG, IDENTITIES, VERSIONS):
                (self.path / name).unlink(missing_ok=True)
        finally:
            self._lock.release()

    def remove_run(self) -> None:
        """Remove the files of a run that did not come to its end, for another attempt.

        ConfigError if another process is at it.
        """
        self._take_lock()
        try:
            for name in (PRETRAINED, TENSORBOARD):
                shutil.rmtree(self.path / name, ignore_errors=True)
            results = (SUMMARY, MODEL, BEST, CURVES)
            for name in (ROUNDS, *results, CONFIG, IDENTITIES, VERSIONS):
                (self.path / name).unlink(missing_ok=True)
        finally:
            self._lock.release()

    def reopen(self, done: range) -> list[RoundRecord]:
        """Continue after the rounds that are `done` and return their records.

        All that is later is dropped unread: lines, also half of one, and checkpoints.
        """
        self._take_lock()
        rounds = self.path / ROUNDS
        try:
            records = [
                record_of_line(line) for line in rounds.read_bytes().splitlines()[: len(done)]
            ]
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"--resume: {str(rounds)!r} cannot be read: {error}; put it back or start a new run"
            ) from error
        numbers = [record.round for record in records]
        lost = next((n for n, found in zip_longest(done, numbers) if n != found), None)
        if lost is not None:
            raise ConfigError(
                f"--resume: {str(rounds)!r} lacks round {lost}; all up to that of the checkpoint "
                f"({done.stop - 1}) must be there; put it back or start a new run"
            )
        with self._writing("records"):
            remove_rests(self.path)
            remove_checkpoints_after(self.path, done.stop - 1)
            shutil.rmtree(self.path / PRETRAINED, ignore_errors=True)
            for name in (SUMMARY, MODEL, CURVES):  # of a run that had stopped
                (self.path / name).unlink(missing_ok=True)
            with replacing(rounds) as file:
                file.writelines(_line(record).encode() for record in records)
            self._rounds = rounds.open("a", encoding="utf-8")
        return records

    def add(self, record: RoundRecord) -> None:
        """Append one round and flush it."""
        if self._rounds is not None:
            with self._writing(f"record of round {record.round}"):
                self._rounds.write(_line(record))
                self._rounds.flush()

    def _is_in_place(self) -> bool:
        """Whether this path is still the run's, and has not become another's or nobody's."""
        if self._rounds is None:
            return True
        try:
            return os.path.samestat((self.path / ROUNDS).stat(), os.fstat(self._rounds.fileno()))
        except OSError:
            return False

    def close(self) -> None:
        """End the run here; one without a record leaves its folder free for another attempt."""
        is_in_place = self._is_in_place()
        if self._rounds is not None:
            is_empty = os.fstat(self._rounds.fileno()).st_size == 0
            with contextlib.suppress(OSError):  # unwritten text was reported by `add`
                self._rounds.close()
            self._rounds = None
            if is_in_place and is_empty and not has_checkpoint(self.path):
                for name in (ROUNDS, CONFIG, IDENTITIES, VERSIONS):
                    (self.path / name).unlink(missing_ok=True)
                shutil.rmtree(self.path / TENSORBOARD, ignore_errors=True)
        if self._lock.is_locked:
            if is_in_place:
                with contextlib.suppress(OSError):
                    (self.path / _LOCK).unlink()
            self._lock.release()
        for folder in self._made:
            with contextlib.suppress(OSError, ValueError):  # things are in it, or it was not made
                folder.rmdir()

    def write_results(self, summary: Mapping[str, Any], model: nn.Module) -> None:
        """Write the summary and the model; neither holds a time, an engine or a version's name."""

        def write() -> None:
            with replacing(self.path / MODEL) as file:
                file.write(tensor_bytes(plain_state(model)))
            write_pretrained(model, self.path)
            with replacing(self.path / SUMMARY) as file:  # last: it says that all is there
                file.write(json.dumps(as_json(summary), indent=2).encode() + b"\n")

        with self._writing("results"):
            _while_files_are_short(write)

    def write_best(self, model: Mapping[str, Tensor], number: int) -> None:
        """Write the best model so far, with its round among the file's metadata."""
        with self._writing("best model"), replacing(self.path / BEST) as file:
            file.write(tensor_bytes(model, {"round": str(number)}))

    def write_checkpoint(self, checkpoint: Checkpoint, keep: int) -> None:
        """Add a checkpoint and keep the last few; those that are there are whole at any moment."""
        with self._writing("checkpoint"):
            if self._rounds is not None:  # which the checkpoint counts on
                os.fsync(self._rounds.fileno())
            _while_files_are_short(lambda: write_checkpoint(self.path, checkpoint, keep))

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """Raise RunError where that cannot be written; it says how the run may be saved."""
        failed = f"{self.path}: its {what} cannot be written"
        if not self._is_in_place():
            raise RunError(
                f"{failed}: the run's folder was moved or removed; put the folder back; if it "
                "holds a checkpoint, continue with --resume and its path"
            )
        try:
            yield
        except OSError as error:
            on = (
                f"continue with --resume {self.path}"
                if has_checkpoint(self.path)
                else "start again"
            )
            raise RunError(
                f"{failed}: {error}; make room or make the folder writable, then {on}"
            ) from error

    def read_checkpoint(self) -> Checkpoint:
        """Return the newest whole checkpoint; ConfigError says what to do when there is none, or
        when the run is not over."""
        self._take_lock()
        self.close()
        return read_checkpoint(self.path)


def _while_files_are_short(write: Callable[[], None]) -> None:
    """Write; try again for a while where this process has too many files open. Strangers'
    connections to a server are such files, and those that say nothing are closed."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return write()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE_SECONDS)


def _line(record: RoundRecord) -> str:
    return json.dumps(as_json(record.to_dict())) + "\n"

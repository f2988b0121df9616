"""The files of a run: written as it goes, read again to resume it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import tomli_w
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .algorithm import ClientId
from .config import RunConfig
from .errors import ConfigError, RunError
from .metrics import RoundRecord, as_json

CONFIG, ROUNDS, SUMMARY, MODEL = "config.toml", "rounds.jsonl", "summary.json", "model.safetensors"
CURVES, CHECKPOINT = "curves.png", "checkpoint"


@dataclass(frozen=True)
class Snapshot:
    """All that the server needs to go on after `round` as if it had never stopped."""

    run: str  # names the run for clients that keep its state
    round: int
    vectors: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    versions: Mapping[ClientId, int]  # round of each client's last counted reply


@dataclass(frozen=True)
class Checkpoint:
    """A run after a round: the server, every client's counted state, and what it was made from."""

    server: Snapshot
    client_states: Mapping[ClientId, Mapping[str, Tensor]]
    given: list[str]  # what came as Python objects, by the names of simulate()'s parameters
    folder: str  # where module:attribute names are looked up
    config: Mapping[str, Any]  # as in config.toml, which a user may have changed since


class RunDirectory:
    """One run's folder. Nothing is created before `open`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rounds: TextIO | None = None
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
            raise ConfigError(
                f"output.directory: {str(self.path)!r} already holds a run; name another folder, "
                f"remove this one, or go on with it: --resume {self.path}"
            )
        for name in (CONFIG, SUMMARY, MODEL, CURVES, CHECKPOINT):
            if (self.path / name).exists():
                raise ConfigError(
                    f"output.directory: {str(self.path)!r} holds a {name!r}, which a run would "
                    "write over; name a new or empty folder"
                )

    def open(self, config: Mapping[str, Any]) -> None:
        """Create the folder and start a run in it."""
        with self._usable():
            self._made = [p for p in (self.path, *self.path.parents) if not p.exists()]
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                self._rounds = (self.path / ROUNDS).open("x", encoding="utf-8")  # the only run here
                with _replacing(self.path / CONFIG) as unfinished:
                    unfinished.write_text(tomli_w.dumps(config), encoding="utf-8")
            except OSError:
                self._remove_made()
                raise

    def reopen(self, last_round: int) -> list[RoundRecord]:
        """Go on after `last_round`: later lines are dropped; return the records before."""
        try:
            lines = (self.path / ROUNDS).read_text(encoding="utf-8").splitlines()
            records = [RoundRecord(**json.loads(line)) for line in lines if line.endswith("}")]
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"--resume: {str(self.path / ROUNDS)!r} cannot be read: {error}; put it back or "
                "start a new run"
            ) from error
        kept = [record for record in records if record.round <= last_round]
        rounds = [record.round for record in kept]
        if rounds not in (list(range(last_round + 1)), list(range(1, last_round + 1))):
            raise ConfigError(
                f"--resume: {str(self.path / ROUNDS)!r} holds rounds {rounds}, not all up to that "
                f"of the checkpoint ({last_round}); put it back or start a new run"
            )
        with self._writing("records"), _replacing(self.path / ROUNDS) as unfinished:
            unfinished.write_text("".join(_line(record) for record in kept), encoding="utf-8")
        with self._writing("records"):
            self._rounds = (self.path / ROUNDS).open("a", encoding="utf-8")
        return kept

    def add(self, record: RoundRecord) -> None:
        """Append one round and flush it."""
        if self._rounds is not None:
            try:
                self._rounds.write(_line(record))
                self._rounds.flush()
            except OSError as error:
                self.close()
                raise RunError(
                    f"{self.path / ROUNDS}: round {record.round} cannot be written: {error}; make "
                    "room, then go on with --resume where checkpoints were kept"
                ) from error

    def close(self) -> None:
        file, self._rounds = self._rounds, None
        if file is not None:
            with contextlib.suppress(OSError):  # unwritten text was reported by `add`
                file.close()

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
        with self._writing("results"), _replacing(self.path / SUMMARY) as unfinished:
            unfinished.write_text(json.dumps(as_json(summary), indent=2) + "\n", encoding="utf-8")
        with self._writing("results"), _replacing(self.path / MODEL) as unfinished:
            _save(model, unfinished)

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Replace the last checkpoint by this one; at any moment one whole checkpoint is there."""
        with self._writing("checkpoint"):
            self._replace_checkpoint(checkpoint)

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            shutil.rmtree(self.path / f"{CHECKPOINT}.unfinished", ignore_errors=True)
            raise RunError(
                f"{self.path}: its {what} cannot be written: {error}; make room, then go on with "
                "--resume where checkpoints were kept"
            ) from error

    def _replace_checkpoint(self, checkpoint: Checkpoint) -> None:
        fresh = self.path / f"{CHECKPOINT}.unfinished"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        _save(
            _tagged("vectors", checkpoint.server.vectors)
            | _tagged("buffers", checkpoint.server.buffers),
            fresh / "server.safetensors",
        )
        clients: dict[str, Tensor] = {}
        for client_id, state in checkpoint.client_states.items():
            clients |= _tagged(json.dumps(client_id), state)
        _save(clients, fresh / "clients.safetensors")
        meta = {
            "run": checkpoint.server.run,
            "round": checkpoint.server.round,
            "versions": list(checkpoint.server.versions.items()),
            "given": checkpoint.given,
            "folder": checkpoint.folder,
            "config": checkpoint.config,
        }
        (fresh / "checkpoint.json").write_text(json.dumps(meta), encoding="utf-8")
        for path in (*fresh.iterdir(), fresh):
            _to_disk(path)
        final, old = self.path / CHECKPOINT, self.path / f"{CHECKPOINT}.old"
        if final.exists():  # else `old` is the only whole one, left by a process that was killed
            shutil.rmtree(old, ignore_errors=True)
            os.replace(final, old)
        os.replace(fresh, final)
        _to_disk(self.path)
        shutil.rmtree(old, ignore_errors=True)

    def read_checkpoint(self) -> Checkpoint:
        """Return the last checkpoint; ConfigError says what to do when there is none."""
        if not self.path.is_dir():
            raise ConfigError(f"--resume: {str(self.path)!r} is not a folder; name a run's folder")
        places = [self.path / CHECKPOINT, self.path / f"{CHECKPOINT}.old"]
        folder = next((p for p in places if (p / "checkpoint.json").is_file()), None)
        if folder is None:
            raise ConfigError(
                f"--resume: {str(self.path)!r} holds no checkpoint; runs write them when "
                "output.checkpoint_every is above 0"
            )
        try:
            meta = json.loads((folder / "checkpoint.json").read_text(encoding="utf-8"))
            server = load_file(folder / "server.safetensors")
            clients = load_file(folder / "clients.safetensors")
            states: dict[ClientId, dict[str, Tensor]] = {}
            for key, tensor in clients.items():
                owner, _, name = key.rpartition("/")
                states.setdefault(json.loads(owner), {})[name] = tensor
            snapshot = Snapshot(
                run=meta["run"],
                round=meta["round"],
                vectors=_untagged("vectors", server),
                buffers=_untagged("buffers", server),
                versions=dict(meta["versions"]),
            )
            return Checkpoint(snapshot, states, meta["given"], meta["folder"], meta["config"])
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ConfigError(
                f"--resume: the checkpoint in {str(folder)!r} is broken: {error}"
            ) from error

    def read_config(self, checkpoint: Checkpoint) -> RunConfig:
        """Return the configuration of the run in this folder, wherever the folder lies by now."""
        config = RunConfig.from_file(
            self.path / CONFIG, [f"output.directory={json.dumps(str(self.path))}"]
        )
        return config.looking_in(Path(checkpoint.folder))


def _line(record: RoundRecord) -> str:
    return json.dumps(as_json(record.to_dict())) + "\n"


def _tagged(tag: str, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{tag}/{name}": array for name, array in arrays.items()}


def _untagged(tag: str, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(f"{tag}/"): v for k, v in arrays.items() if k.startswith(f"{tag}/")}


def _save(arrays: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: array.detach().cpu().clone() for name, array in arrays.items()}, path)


def _to_disk(path: Path) -> None:
    """Have the system write a file or folder now: a power cut must not leave half a checkpoint."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _replacing:
    """A path to write to that takes the place of `target` at the end, or leaves nothing behind."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._unfinished = target.with_name(target.name + ".unfinished")

    def __enter__(self) -> Path:
        return self._unfinished

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            os.replace(self._unfinished, self._target)
        else:
            self._unfinished.unlink(missing_ok=True)

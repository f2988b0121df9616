"""Checkpoints: all that a run needs to go on, in a folder that is whole at every moment."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from .algorithm import ClientId
from .errors import ConfigError

CHECKPOINT = "checkpoint"
_META, _SERVER, _CLIENTS = "checkpoint.json", "server.safetensors", "clients.safetensors"
_DIGEST = "checkpoint.json"  # in the metadata of both files of tensors: what they belong to


@dataclass(frozen=True)
class Snapshot:
    """All that the server needs to go on after `round` as if it had never stopped."""

    run: str  # names the run for clients that keep its state
    round: int
    vectors: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    versions: Mapping[ClientId, int]  # round of each client's last counted reply


@dataclass(frozen=True)
class Origin:
    """What a run was made from, beside its configuration, to be compared when it goes on."""

    given: list[str]  # what came as Python objects, by the names of simulate()'s parameters
    data: Mapping[str, str]  # digest of each part that this process has
    code: Mapping[str, str]  # digest of the file of each module:attribute
    num_examples: list[tuple[ClientId, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Checkpoint:
    """A run after a round: the server, every client's counted state, and what it was made from."""

    server: Snapshot
    client_states: Mapping[ClientId, Mapping[str, Tensor]]
    clients_keep_state: bool  # the states that count are with clients of other processes
    initial_loss: float | None  # on the test data, of the untrained model
    origin: Origin
    folder: str  # where module:attribute names are looked up
    config: Mapping[str, Any]  # as in config.toml, which a user may have changed since


def write_checkpoint(run: Path, checkpoint: Checkpoint) -> None:
    """Replace the last checkpoint in a run's folder; at any moment one whole one is there."""
    fresh = run / f"{CHECKPOINT}.unfinished"
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        fresh.mkdir()
        _write_files(fresh, checkpoint)
        _put_in_place(run, fresh)
    except BaseException:  # Ctrl-C too
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def _write_files(fresh: Path, checkpoint: Checkpoint) -> None:
    text = json.dumps(_meta(checkpoint))
    (fresh / _META).write_text(text, encoding="utf-8")
    vectors = _tagged("vectors", checkpoint.server.vectors)
    _save({**vectors, **_tagged("buffers", checkpoint.server.buffers)}, fresh / _SERVER, text)
    clients: dict[str, Tensor] = {}
    for client_id, state in checkpoint.client_states.items():
        clients |= {json.dumps([client_id, name]): array for name, array in state.items()}
    _save(clients, fresh / _CLIENTS, text)
    for path in (*fresh.iterdir(), fresh):
        _to_disk(path)


def _put_in_place(run: Path, fresh: Path) -> None:
    final, old = run / CHECKPOINT, run / f"{CHECKPOINT}.old"
    if final.exists():  # else `old` is the only whole one, left by a process that was killed
        shutil.rmtree(old, ignore_errors=True)
        os.replace(final, old)
    os.replace(fresh, final)
    _to_disk(run)
    shutil.rmtree(old, ignore_errors=True)


def has_checkpoint(run: Path) -> bool:
    return _place(run) is not None


def read_checkpoint(run: Path) -> Checkpoint:
    """Return the last checkpoint; ConfigError says what to do when there is none."""
    if not run.is_dir():
        raise ConfigError(f"--resume: {str(run)!r} is not a folder; name a run's folder")
    place = _place(run)
    if place is None:
        raise ConfigError(
            f"--resume: {str(run)!r} holds no checkpoint; runs write them when "
            "output.checkpoint_every is above 0"
        )
    try:
        text = (place / _META).read_text(encoding="utf-8")
        server, clients = _load(place / _SERVER, text), _load(place / _CLIENTS, text)
        return _checkpoint(json.loads(text), server, clients)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ConfigError(
            f"--resume: the checkpoint in {str(place)!r} is broken: {error}; put back the files as "
            "they were written, or start a new run"
        ) from error


def _place(run: Path) -> Path | None:
    places = [run / CHECKPOINT, run / f"{CHECKPOINT}.old"]
    return next((place for place in places if (place / _META).is_file()), None)


def _meta(checkpoint: Checkpoint) -> dict[str, Any]:
    server, origin = checkpoint.server, checkpoint.origin
    return {
        "run": server.run,
        "round": server.round,
        "versions": list(server.versions.items()),
        "clients_keep_state": checkpoint.clients_keep_state,
        "initial_loss": checkpoint.initial_loss,
        "origin": {
            "given": origin.given,
            "data": origin.data,
            "code": origin.code,
            "num_examples": origin.num_examples,
        },
        "folder": checkpoint.folder,
        "config": checkpoint.config,
    }


def _checkpoint(
    meta: dict[str, Any], server: Mapping[str, Tensor], clients: Mapping[str, Tensor]
) -> Checkpoint:
    states: dict[ClientId, dict[str, Tensor]] = {}
    for key, tensor in clients.items():
        client_id, name = json.loads(key)
        states.setdefault(client_id, {})[name] = tensor
    vectors, buffers = _untagged("vectors", server), _untagged("buffers", server)
    versions = dict(meta["versions"])
    origin = dict(meta["origin"])
    origin["num_examples"] = [(client_id, count) for client_id, count in origin["num_examples"]]
    return Checkpoint(
        Snapshot(meta["run"], meta["round"], vectors, buffers, versions),
        states,
        meta["clients_keep_state"],
        meta["initial_loss"],
        Origin(**origin),
        meta["folder"],
        meta["config"],
    )


def _tagged(tag: str, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{tag}/{name}": array for name, array in arrays.items()}


def _untagged(tag: str, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(f"{tag}/"): v for k, v in arrays.items() if k.startswith(f"{tag}/")}


def save_tensors(
    arrays: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file of tensors on any device, in any strides, which may share memory."""
    contiguous = torch.contiguous_format
    owned = {n: a.detach().cpu().clone(memory_format=contiguous) for n, a in arrays.items()}
    save_file(owned, path, metadata)


def _save(arrays: Mapping[str, Tensor], path: Path, meta: str) -> None:
    save_tensors(arrays, path, {_DIGEST: _digest(meta)})


def _load(path: Path, meta: str) -> dict[str, Tensor]:
    """Return tensors that were written together with this text of checkpoint.json."""
    with safe_open(path, "pt") as file:
        digest = (file.metadata() or {}).get(_DIGEST)
    if digest != _digest(meta):
        raise ValueError(f"{path.name} and {_META} do not belong together; one was changed")
    return load_file(path)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _to_disk(path: Path) -> None:
    """Have the system write a file or folder now: a power cut must not leave half a checkpoint."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

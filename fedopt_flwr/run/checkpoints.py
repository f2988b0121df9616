"""Checkpoints: all that a run needs to continue, in one file that is whole at every moment."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..algorithm import ClientId
from ..errors import ConfigError
from ..files import replacing
from ..rounds.record import Snapshot

LAYOUT = 2  # of the file; 1 was a folder of three files
_NAME = re.compile(r"checkpoint-(\d{6,})\.safetensors")


@dataclass(frozen=True)
class Origin:
    """What a run was made from, beside its configuration, to be compared when it is resumed."""

    given: list[str]  # what came as Python objects, by the names of simulate()'s parameters
    data: Mapping[str, str]  # digest of each part that this process has
    code: Mapping[str, str]  # digest of the file of each module:attribute
    num_examples: Sequence[tuple[ClientId, int]] = ()


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
    """Write checkpoint-ROUND.safetensors into a run's folder, then remove the one before."""
    text = json.dumps(_text_of(checkpoint))
    arrays = {f"vectors/{n}": array for n, array in checkpoint.server.vectors.items()}
    arrays |= {f"buffers/{n}": array for n, array in checkpoint.server.buffers.items()}
    for client_id, state in checkpoint.client_states.items():
        arrays |= {f"clients/{json.dumps([client_id, n])}": array for n, array in state.items()}
    arrays = _contiguous(arrays)
    metadata = {"layout": str(LAYOUT), "fedopt": text, "digest": _digest(text, arrays)}
    target = run / f"checkpoint-{checkpoint.server.round:06d}.safetensors"
    with replacing(target, durable=True) as unfinished:
        save_file(arrays, unfinished, metadata)
    for other in _files(run):
        if other != target:
            other.unlink()


def has_checkpoint(run: Path) -> bool:
    """Whether a run's folder holds a checkpoint that this version can read."""
    return bool(_files(run))


def read_checkpoint(run: Path) -> Checkpoint:
    """Return the last checkpoint; ConfigError says what to do when there is none."""
    if not run.is_dir():
        raise ConfigError(f"--resume: {str(run)!r} is not a folder; name a run's folder")
    files = _files(run)
    if not files and (run / "checkpoint").is_dir():
        raise _other_layout(run / "checkpoint", "1")
    if not files:
        raise ConfigError(
            f"--resume: {str(run)!r} holds no checkpoint; runs write them when "
            "output.checkpoint_every is above 0"
        )
    place = files[-1]
    try:
        with safe_open(place, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("layout") != str(LAYOUT):
                raise _other_layout(place, metadata.get("layout"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        text = metadata["fedopt"]
        if metadata["digest"] != _digest(text, arrays):
            raise ValueError("it is not as it was written")
        return _checkpoint(json.loads(text), arrays)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ConfigError(
            f"--resume: the checkpoint {str(place)!r} is broken: {error}; put back the file as "
            "it was written, or start a new run"
        ) from error


def _other_layout(place: Path, layout: str | None) -> ConfigError:
    return ConfigError(
        f"--resume: the checkpoint {str(place)!r} has layout {layout}, of another version of "
        f"fedopt-flwr; this one reads layout {LAYOUT}; resume with that version, or start a new run"
    )


def _files(run: Path) -> list[Path]:
    """Return the checkpoints of a run, the newest last."""
    found = {int(m[1]): path for path in run.glob("*") if (m := _NAME.fullmatch(path.name))}
    return [found[number] for number in sorted(found)]


def _text_of(checkpoint: Checkpoint) -> dict[str, Any]:
    server = checkpoint.server
    return {
        "run": server.run,
        "round": server.round,
        "versions": list(server.versions.items()),  # JSON's keys are text, an id may be a number
        "clients_keep_state": checkpoint.clients_keep_state,
        "initial_loss": checkpoint.initial_loss,
        "origin": asdict(checkpoint.origin),
        "folder": checkpoint.folder,
        "config": checkpoint.config,
    }


def _checkpoint(text: dict[str, Any], arrays: Mapping[str, Tensor]) -> Checkpoint:
    groups: dict[str, dict[str, Tensor]] = {"vectors": {}, "buffers": {}, "clients": {}}
    for key, array in arrays.items():
        group, _, name = key.partition("/")
        groups[group][name] = array
    states: dict[ClientId, dict[str, Tensor]] = {}
    for key, array in groups.pop("clients").items():
        client_id, name = json.loads(key)
        states.setdefault(client_id, {})[name] = array
    versions = dict(text.pop("versions"))
    server = Snapshot(run=text.pop("run"), round=text.pop("round"), versions=versions, **groups)
    origin = Origin(**text.pop("origin"))
    return Checkpoint(server=server, client_states=states, origin=origin, **text)


def save_tensors(arrays: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file of tensors on any device, in any strides, which may share memory."""
    save_file(_contiguous(arrays), path)


def _contiguous(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    layout = torch.contiguous_format
    return {n: a.detach().cpu().clone(memory_format=layout) for n, a in arrays.items()}


def _digest(text: str, arrays: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=32)
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype} {list(array.shape)}".encode())
        digest.update(array.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()

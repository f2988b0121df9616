"""Checkpoints: all that a run needs to continue, in one file each; the last few are kept."""

from __future__ import annotations

import contextlib
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..algorithm import ClientId
from ..errors import ConfigError, FedoptWarning
from ..files import SEAL, read_sealed, replacing, sealed
from ..problems import validation_problems
from ..rounds.record import Snapshot

LAYOUT = 3  # of the file; 1 was a folder of three files, 2 had a digest of its contents alone
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
    best: Mapping[str, Tensor] = field(default_factory=dict)  # by stop.metric: its state_dict


_Versions = list[tuple[ClientId, int]]  # JSON's keys are text, an id may be a number


class _Text(BaseModel):
    """What a checkpoint holds beside arrays, as JSON."""

    model_config = ConfigDict(strict=True, extra="forbid")

    run: str
    round: int = Field(ge=0)
    versions: _Versions
    earlier: list[_Versions]
    seen: _Versions = []
    first: _Versions = []
    clients_keep_state: bool
    initial_loss: float | None
    origin: Origin
    folder: str
    config: dict[str, Any]


def write_checkpoint(run: Path, checkpoint: Checkpoint, keep: int) -> None:
    """Write checkpoint-ROUND.safetensors into a run's folder, then remove all but the last few."""
    arrays = {f"vectors/{n}": array for n, array in checkpoint.server.vectors.items()}
    arrays |= {f"buffers/{n}": array for n, array in checkpoint.server.buffers.items()}
    arrays |= {f"diagnosed/{n}": array for n, array in checkpoint.server.diagnosed.items()}
    arrays |= {f"best/{n}": array for n, array in checkpoint.best.items()}
    for client_id, state in checkpoint.client_states.items():
        arrays |= {f"clients/{json.dumps([client_id, n])}": array for n, array in state.items()}
    metadata = {"layout": str(LAYOUT), "fedopt": json.dumps(_text_of(checkpoint))}
    target = _path(run, checkpoint.server.round)
    private = bool(checkpoint.client_states)
    with replacing(target, durable=True, private=private) as file:
        file.writelines(sealed(arrays, metadata))
    for other in list(_files(run).values())[:-keep]:
        other.unlink()


def remove_checkpoints_after(run: Path, last_round: int) -> None:
    """Remove the checkpoints of rounds that are done again."""
    for number, path in _files(run).items():
        if number > last_round:
            path.unlink()


def has_checkpoint(run: Path) -> bool:
    """Whether a run's folder holds a checkpoint that this version can read."""
    return bool(_files(run))


def newest_checkpoint(run: Path) -> float | None:
    """Return when the newest one was written, in seconds since 1970; None if there is none."""
    with contextlib.suppress(OSError):  # removed just now: the next time
        return max((path.stat().st_mtime for path in _files(run).values()), default=None)
    return None


def read_checkpoint(run: Path) -> Checkpoint:
    """Return the newest whole checkpoint, with a FedoptWarning if it is not the newest.

    ConfigError says what to do when there is none.
    """
    if not run.is_dir():
        raise ConfigError(f"--resume: {str(run)!r} is not a folder; name a run's folder")
    files = list(_files(run).values())
    if not files and (run / "checkpoint").is_dir():
        raise _other_layout(run / "checkpoint", "1")
    if not files:
        raise ConfigError(
            f"--resume: {str(run)!r} holds no checkpoint; runs write them when "
            "output.checkpoint_every is above 0"
        )
    broken: list[str] = []
    for place in reversed(files):
        try:
            checkpoint = _read(place)
        except OSError as error:
            raise ConfigError(
                f"--resume: the checkpoint {str(place)!r} cannot be read: {error}; make it "
                "readable, or move it away to continue from the one before"
            ) from error
        except (ValueError, KeyError, TypeError, SafetensorError) as error:
            broken.append(f"--resume: the checkpoint {str(place)!r} is broken: {error}")
            continue
        if broken:
            warnings.warn(
                f"{broken[0]}; the run continues from {str(place)!r}, the newest whole one",
                FedoptWarning,
                stacklevel=2,
            )
        return checkpoint
    raise ConfigError(f"{broken[0]}; put back the file as it was written, or start a new run")


def _read(place: Path) -> Checkpoint:
    with safe_open(place, "pt") as file:
        metadata = file.metadata() or {}
    layout = metadata.get("layout")
    if layout != str(LAYOUT) and SEAL not in metadata:
        raise _other_layout(place, layout)
    arrays, metadata = read_sealed(place)
    if layout != str(LAYOUT):
        raise _other_layout(place, layout)
    try:
        text = _Text.model_validate_json(metadata["fedopt"])
    except ValidationError as error:
        raise ValueError("; ".join(validation_problems(error, _Text))) from None
    if place != _path(place.parent, text.round):
        raise ValueError(f"it is of round {text.round}")
    return _checkpoint(text, arrays)


def _path(run: Path, number: int) -> Path:
    return run / f"checkpoint-{number:06d}.safetensors"


def _other_layout(place: Path, layout: str | None) -> ConfigError:
    return ConfigError(
        f"--resume: the checkpoint {str(place)!r} has layout {layout}, of another version of "
        f"fedopt-flwr; this one reads layout {LAYOUT}; resume with that version, or start a new run"
    )


def _files(run: Path) -> dict[int, Path]:
    """Return the checkpoints of a run by their rounds, the newest last."""
    found = {int(m[1]): path for path in run.glob("*") if (m := _NAME.fullmatch(path.name))}
    return {number: found[number] for number in sorted(found)}


def _text_of(checkpoint: Checkpoint) -> dict[str, Any]:
    server = checkpoint.server
    return {
        "run": server.run,
        "round": server.round,
        "versions": list(server.versions.items()),
        "earlier": [list(versions.items()) for versions in server.earlier],
        "seen": list(server.seen.items()),
        "first": list(server.first.items()),
        "clients_keep_state": checkpoint.clients_keep_state,
        "initial_loss": checkpoint.initial_loss,
        "origin": asdict(checkpoint.origin),
        "folder": checkpoint.folder,
        "config": checkpoint.config,
    }


def _checkpoint(text: _Text, arrays: Mapping[str, Tensor]) -> Checkpoint:
    names = ("vectors", "buffers", "diagnosed", "clients", "best")
    groups: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for key, array in arrays.items():
        group, _, name = key.partition("/")
        groups[group][name] = array
    states: dict[ClientId, dict[str, Tensor]] = {}
    for key, array in groups.pop("clients").items():
        client_id, name = from_json(key)
        states.setdefault(client_id, {})[name] = array
    best = groups.pop("best")
    return Checkpoint(
        server=Snapshot(
            text.run,
            text.round,
            groups["vectors"],
            groups["buffers"],
            versions=dict(text.versions),
            earlier=[dict(pairs) for pairs in text.earlier],
            seen=dict(text.seen),
            first=dict(text.first),
            diagnosed=groups["diagnosed"],
        ),
        client_states=states,
        clients_keep_state=text.clients_keep_state,
        initial_loss=text.initial_loss,
        origin=text.origin,
        folder=text.folder,
        config=text.config,
        best=best,
    )

"""Client state in versions by round, so that both sides agree on which one counts.

A client saves its state after every round it trains in; the server's next instruction names the
round whose reply it took in last. A lost reply, a timeout or a restart therefore never makes the
client's c_i and the server's c drift apart.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import torch
from flwr.app import Array, ArrayRecord, RecordDict
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from ..algorithm import ClientId, ClientState
from ..errors import MessageError
from ..files import replacing

STATE_LOST = "the client lost its state"  # in the error of such a client


class ClientStates(Protocol):
    """Where clients keep their state between rounds."""

    def load(self, client_id: ClientId, version: int) -> ClientState:
        """Return the state saved in that round; MessageError if it is not there."""

    def save(self, client_id: ClientId, version: int, state: ClientState) -> None:
        """Keep a state under its round."""

    def prune(self, client_id: ClientId, keep: Collection[int]) -> None:
        """Drop all other versions: those that the server will not ask for again."""


class MemoryStates:
    """States of all clients of one process, for as long as it lives, in the host's memory.

    Tensors of pruned versions are written to again: the allocator would not find them a second use
    between longer-lived neighbours, and memory would grow from round to round.
    """

    def __init__(self) -> None:
        self._states: dict[ClientId, dict[int, ClientState]] = {}
        self._spare: list[ClientState] = []

    def load(self, client_id: ClientId, version: int) -> ClientState:
        versions = self._states.get(client_id, {})
        if version not in versions:
            raise _lost(client_id, version, sorted(versions))
        return versions[version]

    def save(self, client_id: ClientId, version: int, state: ClientState) -> None:
        versions = self._states.setdefault(client_id, {})
        state = {name: array.cpu() for name, array in state.items()}
        if self._spare:
            spare = self._spare.pop()
            state = {name: spare[name].copy_(array) for name, array in state.items()}
        kept = {array.data_ptr() for other in versions.values() for array in other.values()}
        # a tensor that a rule left as it was must not be written to when the older version goes
        state = {n: a.clone() if a.data_ptr() in kept else a for n, a in state.items()}
        versions[version] = state

    def prune(self, client_id: ClientId, keep: Collection[int]) -> None:
        versions = self._states.get(client_id, {})
        for version in [v for v in versions if v not in keep]:
            self._spare.append(versions.pop(version))


class DiskStates:
    """States as files, so that a client that is killed and started again continues where it was.

    `directory`/client-<id>/round-<version>.safetensors; a file is whole and on the disk before it
    has its name, so a power cut or a full disk leaves the earlier versions as they were.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def load(self, client_id: ClientId, version: int) -> ClientState:
        path = self._path(client_id, version)
        if not path.is_file():
            raise _lost(client_id, version, self._versions(client_id))
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise MessageError(
                f"client {client_id}: state of round {version} in {str(path)!r} is broken: {error}"
            ) from error

    def save(self, client_id: ClientId, version: int, state: ClientState) -> None:
        path = self._path(client_id, version)
        path.parent.mkdir(parents=True, exist_ok=True)
        contents = save({name: array.detach().cpu() for name, array in state.items()})
        with replacing(path, durable=True) as unfinished:
            unfinished.write_bytes(contents)

    def prune(self, client_id: ClientId, keep: Collection[int]) -> None:
        for version in self._versions(client_id):
            if version not in keep:
                self._path(client_id, version).unlink(missing_ok=True)

    def _path(self, client_id: ClientId, version: int) -> Path:
        folder = f"client-{quote(str(client_id), safe='')}"
        return self._directory / folder / f"round-{version}.safetensors"

    def _versions(self, client_id: ClientId) -> list[int]:
        found = self._path(client_id, 0).parent.glob("round-*.safetensors")
        return sorted(int(path.stem.removeprefix("round-")) for path in found)


class ContextStates:
    """States in Flower's `context.state`, which its runtimes keep for a node between messages."""

    def __init__(self, records: RecordDict, run: str) -> None:
        self._records = records
        self._prefix = f"fedopt-{run}"

    def load(self, client_id: ClientId, version: int) -> ClientState:
        key = self._key(client_id, version)
        if key not in self._records.array_records:
            raise _lost(client_id, version, self._versions(client_id))
        arrays = self._records.array_records[key]
        return {name: torch.tensor(array.numpy()) for name, array in arrays.items()}

    def save(self, client_id: ClientId, version: int, state: ClientState) -> None:
        arrays = {name: Array(array.detach().cpu().numpy()) for name, array in state.items()}
        self._records[self._key(client_id, version)] = ArrayRecord(arrays)

    def prune(self, client_id: ClientId, keep: Collection[int]) -> None:
        for version in self._versions(client_id):
            if version not in keep:
                del self._records[self._key(client_id, version)]

    def _key(self, client_id: ClientId, version: int) -> str:
        return f"{self._prefix}/{client_id}/{version}"

    def _versions(self, client_id: ClientId) -> list[int]:
        own = f"{self._prefix}/{client_id}/"
        return sorted(int(key.removeprefix(own)) for key in self._records if key.startswith(own))


def _lost(client_id: ClientId, version: int, found: list[int]) -> MessageError:
    return MessageError(
        f"client {client_id}: state of round {version} is asked for; has {found}; {STATE_LOST}, "
        "so the run cannot continue with it"
    )

"""Client state in versions by round, so that both sides agree on which one counts.

A client saves its state after every round it trains in; the server's next instruction names the
round whose reply it took in last. A lost reply, a timeout or a restart therefore never makes the
client's c_i and the server's c drift apart.
"""

from __future__ import annotations

import contextlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Set
from pathlib import Path
from urllib.parse import quote

import torch
from flwr.app import Array, ArrayRecord, RecordDict
from safetensors import SafetensorError

from ..algorithm import ClientId, ClientState
from ..config.client_ids import is_client_id
from ..errors import MessageError
from ..files import read_sealed, remove, remove_rests, replacing, sealed

STATE_LOST = "the client lost its state"  # in the error of such a client
BEGINS_ANEW = "it begins anew"  # beside that, of a client that is to do so in open federations
_NAME = re.compile(r"round-(0|[1-9][0-9]*)\.safetensors")


class ClientStates(ABC):
    """Where clients keep their state between rounds."""

    def load(self, client_id: ClientId, version: int) -> ClientState:
        """Return the state saved in that round; MessageError if it is not there."""
        found = self._versions(client_id)
        if version not in found:
            raise MessageError(
                f"client {client_id}: state of round {version} is asked for; has {found}; "
                f"{STATE_LOST}, so the run cannot continue with it"
            )
        return self._read(client_id, version)

    def prune(self, client_id: ClientId, keep: Collection[int]) -> None:
        """Drop all other versions: those that the server will not ask for again."""
        for version in self._versions(client_id):
            if version not in keep:
                self._drop(client_id, version)

    @abstractmethod
    def save(self, client_id: ClientId, version: int, state: ClientState) -> None:
        """Keep a state under its round."""

    @abstractmethod
    def _versions(self, client_id: ClientId) -> list[int]: ...

    @abstractmethod
    def _read(self, client_id: ClientId, version: int) -> ClientState: ...

    @abstractmethod
    def _drop(self, client_id: ClientId, version: int) -> None: ...


class MemoryStates(ClientStates):
    """States of all clients of one process, for as long as it lives, in the host's memory.

    Tensors of pruned versions are written to again: the allocator would not find them a second use
    between longer-lived neighbours, and memory would grow from round to round.
    """

    def __init__(self) -> None:
        self._states: dict[ClientId, dict[int, ClientState]] = {}
        self._spare: list[ClientState] = []

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

    def keep_only(self, kept: Set[tuple[ClientId, int]]) -> None:
        """Drop all states but these, by client and version."""
        for client_id, versions in self._states.items():
            self.prune(client_id, [v for v in versions if (client_id, v) in kept])

    def _versions(self, client_id: ClientId) -> list[int]:
        return sorted(self._states.get(client_id, {}))

    def _read(self, client_id: ClientId, version: int) -> ClientState:
        return self._states[client_id][version]

    def _drop(self, client_id: ClientId, version: int) -> None:
        self._spare.append(self._states[client_id].pop(version))


class DiskStates(ClientStates):
    """States as files, so that a client that is killed and started again continues where it was.

    `directory`/client-<id>/round-<version>.safetensors; a file is whole and on the disk before it
    has its name, so a power cut or a full disk leaves the earlier versions as they were. Nobody but
    the user may read what is made here: c_i is a gradient of private data. A file holds a digest of
    its client, version and arrays; one that is not as it was written is refused.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def _read(self, client_id: ClientId, version: int) -> ClientState:
        path = self._path(client_id, version)
        try:
            state, owner = read_sealed(path)
            if _owner(client_id, version).items() - owner.items():
                raise ValueError(f"it is of {owner}")
        except (OSError, ValueError, SafetensorError) as error:
            raise MessageError(
                f"client {client_id}: state of round {version} in {path!r} is broken: {error}"
            ) from error
        return state

    def save(self, client_id: ClientId, version: int, state: ClientState) -> None:
        path = self._path(client_id, version)
        _make_private(folder := os.path.dirname(path))
        remove_rests(folder)
        state = {name: array.detach().cpu() for name, array in state.items()}
        with replacing(path, durable=True, private=True) as file:
            file.writelines(sealed(state, _owner(client_id, version)))

    def keep_only(self, kept: Set[tuple[ClientId, int]]) -> None:
        """Drop all states but these, by client and version, also those of earlier processes."""
        paths = {self._path(client_id, version) for client_id, version in kept}
        for folder in self._directory.glob("client-*"):
            for file in folder.iterdir():
                if str(file) not in paths:
                    remove(str(file))
            with contextlib.suppress(OSError):  # it still holds something
                folder.rmdir()

    def _drop(self, client_id: ClientId, version: int) -> None:
        remove(self._path(client_id, version))

    def _path(self, client_id: ClientId, version: int) -> str:
        """Return where a state lies, or MessageError for what could name another place.

        Text, as CPython interns what a `Path` is made of: that table grew by 4 MB at round 2,500.
        """
        if not is_client_id(client_id) or type(version) is not int or version < 0:
            raise MessageError(
                f"client state: got client {client_id!r} and round {version!r}; must be an id and "
                "a round's number"
            )
        home, name = str(self._directory), f"round-{version}.safetensors"
        path = os.path.join(home, f"client-{quote(str(client_id), safe='')}", name)
        place = os.path.realpath(path)
        if not place.startswith(os.path.join(os.path.realpath(home), "")):
            raise MessageError(
                f"client state: {path!r} leads to {place!r}, outside of {home!r}; remove that link"
            )
        return path

    def _versions(self, client_id: ClientId) -> list[int]:
        folder = os.path.dirname(self._path(client_id, 0))
        names = os.listdir(folder) if os.path.isdir(folder) else []
        return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def _owner(client_id: ClientId, version: int) -> dict[str, str]:
    return {"client": repr(client_id), "round": str(version)}


def _make_private(folder: str) -> None:
    """Make a folder, and those above it that are missing, for the user alone."""
    if not os.path.isdir(folder):
        _make_private(os.path.dirname(folder) or ".")
        os.makedirs(folder, 0o700, exist_ok=True)


class ContextStates(ClientStates):
    """States in Flower's `context.state`, which its runtimes keep for a node between messages."""

    def __init__(self, records: RecordDict, run: str) -> None:
        self._records = records
        self._prefix = f"fedopt-{run}"

    def _read(self, client_id: ClientId, version: int) -> ClientState:
        arrays = self._records.array_records[self._key(client_id, version)]
        return {name: torch.tensor(array.numpy()) for name, array in arrays.items()}

    def save(self, client_id: ClientId, version: int, state: ClientState) -> None:
        arrays = {name: Array(array.detach().cpu().numpy()) for name, array in state.items()}
        self._records[self._key(client_id, version)] = ArrayRecord(arrays)

    def _drop(self, client_id: ClientId, version: int) -> None:
        del self._records[self._key(client_id, version)]

    def _key(self, client_id: ClientId, version: int) -> str:
        return f"{self._prefix}/{client_id}/{version}"

    def _versions(self, client_id: ClientId) -> list[int]:
        own = f"{self._prefix}/{client_id}/"
        return sorted(int(key.removeprefix(own)) for key in self._records if key.startswith(own))

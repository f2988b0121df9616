"""Client state in versions by round, so that both sides agree on which one counts.

A client saves its state after every round it trains in; the server's next instruction names the
round whose reply it took in last. A lost reply, a timeout or a restart therefore never makes the
client's c_i and the server's c drift apart.
"""

from __future__ import annotations

from typing import Protocol

from ..algorithm import ClientId, ClientState
from ..errors import MessageError


class ClientStates(Protocol):
    """Where clients keep their state between rounds."""

    def load(self, client_id: ClientId, version: int) -> ClientState:
        """Return the state saved in that round; MessageError if it is not there."""

    def save(self, client_id: ClientId, version: int, state: ClientState) -> None:
        """Keep a state under its round."""

    def prune(self, client_id: ClientId, oldest: int, newest: int) -> None:
        """Drop versions outside [oldest, newest]: those the server will not ask for again."""


class MemoryStates:
    """States of all clients of one process, for as long as it lives.

    Tensors of pruned versions are written to again: the allocator would not find them a second use
    between longer-lived neighbours, and memory would grow from round to round.
    """

    def __init__(self) -> None:
        self._states: dict[ClientId, dict[int, ClientState]] = {}
        self._spare: list[ClientState] = []

    def load(self, client_id: ClientId, version: int) -> ClientState:
        versions = self._states.get(client_id, {})
        if version not in versions:
            raise MessageError(
                f"client {client_id}: state of round {version} is asked for; has "
                f"{sorted(versions)}; the client lost its state, so the run cannot go on with it"
            )
        return versions[version]

    def save(self, client_id: ClientId, version: int, state: ClientState) -> None:
        if self._spare:
            spare = self._spare.pop()
            state = {name: spare[name].copy_(array) for name, array in state.items()}
        self._states.setdefault(client_id, {})[version] = state

    def prune(self, client_id: ClientId, oldest: int, newest: int) -> None:
        versions = self._states.get(client_id, {})
        for version in [v for v in versions if not oldest <= v <= newest]:
            self._spare.append(versions.pop(version))

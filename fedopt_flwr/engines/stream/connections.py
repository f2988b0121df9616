"""What the clients of one process do: their streams write it, health and metrics read it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...algorithm import ClientId


@dataclass(frozen=True)
class Connection:
    """One client as its own process sees it."""

    is_open: bool = False
    num_examples: int | None = None  # once it has introduced itself


class Connections:
    """A client's `Connection` by its id. `on_training` hears how long each training took."""

    def __init__(self, client_ids: Sequence[ClientId]) -> None:
        self.on_training: Callable[[float], None] = lambda seconds: None
        self._lock = threading.Lock()
        self._clients = {client_id: Connection() for client_id in client_ids}

    def clients(self) -> dict[ClientId, Connection]:
        """Return a copy."""
        with self._lock:
            return dict(self._clients)

    def are_open(self) -> bool:
        return all(client.is_open for client in self.clients().values())

    def opened(self, client_id: ClientId, *, is_open: bool) -> None:
        self._change(client_id, is_open=is_open)

    def introduced(self, client_id: ClientId, num_examples: object) -> None:
        """Note what it said of itself; a client of one's own may say anything."""
        known = num_examples if isinstance(num_examples, int) else None
        self._change(client_id, num_examples=known)

    def _change(self, client_id: ClientId, **changes: object) -> None:
        with self._lock:
            known = self._clients.get(client_id, Connection())
            self._clients[client_id] = replace(known, **changes)  # type: ignore[arg-type]

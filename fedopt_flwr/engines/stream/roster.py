"""Which clients are connected and what each does: the stream server writes it, the CLI shows it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...algorithm import ClientId

_NAMED = 10  # clients of a line


@dataclass(frozen=True)
class Presence:
    """One client as the server sees it."""

    state: str = "away"  # away, joining, ready, training
    peer: str = ""
    num_examples: int | None = None
    round: int | None = None  # in which it was last asked
    seconds: float | None = None  # of its last answer, from the question on
    note: str = ""  # what went wrong last


class Roster:
    """A client's `Presence` by its id. Every change of weight is also said as a line of text."""

    def __init__(self, say: Callable[[str], None] = lambda line: None) -> None:
        self._say = say
        self._lock = threading.Lock()
        self._clients: dict[ClientId, Presence] = {}

    def clients(self) -> dict[ClientId, Presence]:
        """Return a copy, in the order of ids."""
        with self._lock:
            return dict(sorted(self._clients.items(), key=lambda item: item[0]))

    def joining(self, client_id: ClientId, peer: str) -> None:
        self._change(client_id, state="joining", peer=peer, note="")

    def ready(self, client_id: ClientId, num_examples: int) -> None:
        self._change(client_id, state="ready", num_examples=num_examples)
        self._say(f"client {client_id}: joined with {num_examples} examples")

    def away(self, client_id: ClientId, reason: str = "") -> None:
        self._change(client_id, state="away")
        self._say(f"client {client_id}: left{reason and ': '}{reason}")

    def asked(self, client_id: ClientId, round_number: int) -> None:
        self._change(client_id, state="training", round=round_number, seconds=None)

    def answered(self, client_id: ClientId, seconds: float, note: str) -> None:
        state = "ready" if self._clients[client_id].state == "training" else "away"
        self._change(client_id, state=state, seconds=seconds, note=note)

    def waiting(self, round_number: int, client_ids: Sequence[ClientId], seconds: float) -> None:
        names = ", ".join(map(str, client_ids[:_NAMED]))
        more = f" and {len(client_ids) - _NAMED} more" if len(client_ids) > _NAMED else ""
        who = f"client{'s' if len(client_ids) > 1 else ''} {names}{more}"
        self._say(f"round {round_number}: waiting for {who} for {seconds:.0f} s")

    def refused(self, who: str, reason: str) -> None:
        self._say(f"{who}: refused: {reason}")

    def _change(self, client_id: ClientId, **changes: object) -> None:
        with self._lock:
            known = self._clients.get(client_id, Presence())
            self._clients[client_id] = replace(known, **changes)  # type: ignore[arg-type]

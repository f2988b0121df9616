"""Which clients are connected and what each does: the stream server writes it, the CLI shows it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from ...algorithm import ClientId
from .tls import FEW_DAYS, days_left

_LOG = logging.getLogger(__name__)
_MINUTE = 60.0
_REFUSALS = 10  # lines a minute; anyone who reaches the port can cause them
_MOVES = 1000  # lines a minute about clients that joined or left
_NAMED = 10  # clients of a line


@dataclass(frozen=True)
class Presence:
    """One client as the server sees it."""

    state: str = "away"  # away, joining, ready, training
    peer: str = ""
    certificate_ends: datetime | None = None  # of its last connection
    num_examples: int | None = None
    round: int | None = None  # in which it was last asked
    seconds: float | None = None  # of its last answer, from the question on
    note: str = ""  # what went wrong last

    @property
    def is_here(self) -> bool:
        return self.state in ("ready", "training")


class Roster:
    """A client's `Presence` by its id. Every change of weight is also said as a line of text.

    What `say` raises is logged and goes no further: nothing that is shown decides who is here.
    """

    def __init__(self, say: Callable[[str], None] = lambda line: None) -> None:
        self.is_open = False  # the server takes clients in
        self.on_answer: Callable[[float], None] = lambda seconds: None  # hears how long each took
        self._say = say
        self._is_lost = False  # the last line
        self._lock = threading.Lock()
        self._clients: dict[ClientId, Presence] = {}
        self._refusals = _Few(self._tell, _REFUSALS, "refused")
        self._moves = _Few(self._tell, _MOVES, "joined or left")

    def clients(self) -> dict[ClientId, Presence]:
        """Return a copy, in the order of ids."""
        with self._lock:
            clients = dict(self._clients)
        return dict(sorted(clients.items(), key=lambda item: (isinstance(item[0], str), item[0])))

    def joining(self, client_id: ClientId, peer: str, certificate_ends: datetime | None) -> None:
        facts = {"peer": peer, "certificate_ends": certificate_ends}
        self._change(client_id, state="joining", note="", **facts)
        if certificate_ends is not None and (left := days_left(certificate_ends)) < FEW_DAYS:
            when = f"on {certificate_ends:%Y-%m-%d}, {left} days from now"
            self._moves.say(
                f"client {client_id}: its certificate ends {when}; make it another with "
                f"`fedopt certs client {client_id}`"
            )

    def ready(self, client_id: ClientId, num_examples: int) -> None:
        self._change(client_id, state="ready", num_examples=num_examples)
        self._moves.say(f"client {client_id}: joined with {num_examples} examples")

    def away(self, client_id: ClientId, reason: str = "", *, forget: bool = False) -> None:
        """Note that a client left; `forget` one that may never come back, and has no part yet."""
        before = self._change(client_id, state="away")
        if forget:
            with self._lock:
                self._clients.pop(client_id, None)
        lines = self._moves if before.is_here else self._refusals
        lines.say(f"client {client_id}: left{reason and ': '}{reason}")

    def asked(self, client_id: ClientId, round_number: int) -> None:
        if self._change(client_id).is_here:  # else it left meanwhile
            self._change(client_id, state="training", round=round_number, seconds=None)

    def answered(self, client_id: ClientId, seconds: float, note: str) -> None:
        self.on_answer(seconds)
        with self._lock:
            known = self._clients.get(client_id, Presence())
            state = "ready" if known.state == "training" else known.state  # it may have left
            self._clients[client_id] = replace(known, state=state, seconds=seconds, note=note)

    def waiting(self, round_number: int, client_ids: Sequence[ClientId], seconds: float) -> None:
        names = ", ".join(map(str, client_ids[:_NAMED]))
        more = f" and {len(client_ids) - _NAMED} more" if len(client_ids) > _NAMED else ""
        who = f"client{'s' if len(client_ids) > 1 else ''} {names}{more}"
        self._say(f"round {round_number}: waiting for {who} for {seconds:.0f} s")

    def refused(self, who: str, reason: str) -> None:
        self._refusals.say(f"{who}: refused: {reason}")

    def _change(self, client_id: ClientId, **changes: object) -> Presence:
        """Return what was known before."""
        for lines in (self._refusals, self._moves):
            lines.catch_up()
        with self._lock:
            known = self._clients.get(client_id, Presence())
            self._clients[client_id] = replace(known, **changes)  # type: ignore[arg-type]
        return known

    def _tell(self, line: str) -> None:
        try:
            self._say(line)
            self._is_lost = False
        except Exception as error:
            if not self._is_lost:
                _LOG.warning("lines about clients cannot be shown: %s", error)
            self._is_lost = True


class _Few:
    """Says at most so many lines a minute, and afterwards how many more there were."""

    def __init__(self, say: Callable[[str], None], lines: int, what: str) -> None:
        self._say = say
        self._lines = lines
        self._what = what
        self._lock = threading.Lock()
        self._count = 0  # since the minute began
        self._ends = 0.0

    def say(self, line: str) -> None:
        self.catch_up()
        with self._lock:
            self._count += 1
            is_shown = self._count <= self._lines
        if is_shown:
            self._say(line)

    def catch_up(self) -> None:
        """Begin another minute if this one is over."""
        now = time.monotonic()
        with self._lock:
            if now < self._ends:
                return
            more = self._count - self._lines
            self._count = 0
            self._ends = now + _MINUTE
        if more > 0:
            self._say(f"… {more:,} more {self._what} in the last minute")

"""How long a round waits for replies, and who it is waiting for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...algorithm import ClientId
from ...config.sections import FederationSection

_TICK_SECONDS = 1.0
_SAY_SECONDS = 60.0
_LEAST_SECONDS = 600.0
_FACTOR = 20
_GRACE_SECONDS = 10.0  # for a question to arrive, beside a timeout in seconds


@dataclass(eq=False)
class Question:
    """One that a client has not answered yet."""

    client_id: ClientId
    round: int
    phase: str
    give_up: Callable[[str], None]  # hears why
    started: float
    times_said: int = 0


class Patience:
    """Watches what was asked of clients.

    `say` hears once a minute who is waited for: round, clients, seconds. With
    `federation.round_timeout` = "auto" a client is given up, and its stream ended, when it takes 20
    times as long as the slowest reply of the run to an instruction of the same phase, and at least
    600 s. Before there is one, nobody knows what is long, except that no phase is longer than
    training but "diagnose", which is a pass over all data. A number of seconds is Flower's to keep,
    from when the question has arrived; one that is not taken in ends some seconds after that time.
    """

    def __init__(
        self, federation: FederationSection, say: Callable[[int, list[ClientId], float], None]
    ) -> None:
        self._is_automatic = federation.round_timeout == "auto"
        self._seconds = federation.timeout_seconds
        self._say = say
        self._lock = threading.Lock()
        self._open: list[Question] = []
        self._slowest: dict[str, float] = {}  # seconds of a reply, by phase
        self._over = threading.Event()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Do all of this meanwhile."""
        thread = threading.Thread(target=self._watch, name="patience", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    @contextlib.contextmanager
    def waiting(
        self, client_id: ClientId, round_number: int, phase: str, give_up: Callable[[str], None]
    ) -> Iterator[None]:
        """Count a client as asked meanwhile."""
        question = Question(client_id, round_number, phase, give_up, time.monotonic())
        with self._lock:
            self._open.append(question)
        try:
            yield
        finally:
            with self._lock:
                self._open.remove(question)

    def heard(self, phase: str, seconds: float) -> None:
        """Learn from a reply that is of use how long one takes."""
        with self._lock:
            self._slowest[phase] = max(self._slowest.get(phase, 0.0), seconds)

    def _watch(self) -> None:
        while not self._over.wait(_TICK_SECONDS):
            now = time.monotonic()
            due = []
            with self._lock:
                for question in self._open:
                    waited = now - question.started
                    limit = self._limit(question.phase)
                    if waited > limit:
                        question.give_up(self._why(limit))
                    elif waited > _SAY_SECONDS * (question.times_said + 1):
                        question.times_said += 1
                        due.append(question)
            if due:
                seconds = _SAY_SECONDS * max(q.times_said for q in due)
                self._say(due[0].round, [q.client_id for q in due], seconds)

    def _why(self, limit: float) -> str:
        why = (
            f"federation.round_timeout = auto: {_FACTOR} times the slowest reply, at least "
            f"{_LEAST_SECONDS:g} s"
        )
        if self._seconds is not None:
            why = f"federation.round_timeout = {self._seconds:g}, and it takes nothing in"
        return f"no answer within {limit:.0f} s ({why}); connection closed"

    def _limit(self, phase: str) -> float:
        if self._seconds is not None:
            return self._seconds + _GRACE_SECONDS
        other = None if phase == "diagnose" else self._slowest.get("train")
        known = self._slowest.get(phase, other)
        if not self._is_automatic or known is None:
            return float("inf")
        return max(_FACTOR * known, _LEAST_SECONDS)

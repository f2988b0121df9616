"""What several engines need: Flower's server kept lean and quiet."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections.abc import Iterator
from typing import NoReturn

from flwr.server import History, Server

from ..errors import EndOfRun

# parameters of glibc's mallopt
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_ARENA_MAX = -8
_LARGEST_MMAP_THRESHOLD = 32 << 20  # bytes; glibc's own limit


class LeanServer(Server):
    """Flower's loop, except that a round's replies are let go when it ends, not one round later,
    that `EndOfRun` ends it, and that a round of which no client is here is one of no replies."""

    def fit(self, num_rounds: int, timeout: float | None) -> tuple[History, float]:
        try:
            return super().fit(num_rounds, timeout)
        except EndOfRun:
            return History(), 0.0

    def fit_round(self, server_round: int, timeout: float | None):  # type: ignore[no-untyped-def]
        result = super().fit_round(server_round, timeout)
        found = result[:2] if result else self.strategy.aggregate_fit(server_round, [], [])
        return (*found, ([], []))


class NeverAsked:
    """Methods of Flower's ClientProxy that our strategy does not use."""

    def _not_asked(self, *arguments: object, **options: object) -> NoReturn:
        raise RuntimeError("the strategy never asks this of a client")

    get_parameters = evaluate = reconnect = _not_asked


@contextlib.contextmanager
def quiet(level: int = logging.ERROR) -> Iterator[None]:
    """Raise the level of Flower's logger meanwhile."""
    log = logging.getLogger("flwr")
    before = log.level
    log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(before)


def keep_freed_memory() -> None:
    """Let all threads share one heap that keeps what is freed, from now on.

    By default each of a server's many threads has a heap of its own, whose free part no other
    thread can use, and large blocks go back to the system at once and are fetched again page by
    page: with a hundred clients memory grows for many rounds, and a round takes twice as long.
    Does nothing where the C library is not glibc.
    """
    mallopt = None if os.name == "nt" else getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_ARENA_MAX, 1)
        mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)

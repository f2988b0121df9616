"""Flower's server, which here keeps no reply longer than its round."""

from __future__ import annotations

from flwr.server import Server


class LeanServer(Server):
    """Flower's loop, except that a round's replies are let go when it ends, not one round later."""

    def fit_round(self, server_round: int, timeout: float | None):  # type: ignore[no-untyped-def]
        result = super().fit_round(server_round, timeout)
        return None if result is None else (*result[:2], ([], []))

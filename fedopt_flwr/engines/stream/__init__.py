"""Flower's bidirectional gRPC stream: long-lived processes on one machine or many."""

from __future__ import annotations

from .client import ServerAddress, StreamClient
from .protocol import JOIN_TOKEN
from .roster import Presence, Roster
from .server import run_on_streams
from .tls import ClientTls, ServerTls

__all__ = [
    "JOIN_TOKEN",
    "ClientTls",
    "Presence",
    "Roster",
    "ServerAddress",
    "ServerTls",
    "StreamClient",
    "run_on_streams",
]

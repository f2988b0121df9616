"""Flower's bidirectional gRPC stream: long-lived processes on one machine or many."""

from __future__ import annotations

from .address import ServerAddress
from .client import StreamClient
from .connections import Connections
from .health import answering_health
from .protocol import JOIN_TOKEN, PACKAGE
from .roster import Presence, Roster
from .server import run_on_streams
from .tls import ClientTls, ServerTls

__all__ = [
    "JOIN_TOKEN",
    "PACKAGE",
    "ClientTls",
    "Connections",
    "Presence",
    "Roster",
    "ServerAddress",
    "ServerTls",
    "StreamClient",
    "answering_health",
    "run_on_streams",
]

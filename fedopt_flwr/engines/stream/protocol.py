"""What both ends of a gRPC stream agree on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Self

import grpc
from flwr.proto import transport_pb2

from ...algorithm import ClientId

SERVICE = transport_pb2.DESCRIPTOR.services_by_name["FlowerService"].full_name
CLAIM_KEY = "fedopt-claim-bin"  # metadata of a Join call
RUN_IS_OVER = grpc.StatusCode.FAILED_PRECONDITION  # ends a stream whose client may go home
MIB = 1 << 20
LARGEST_MESSAGE = 2**31 - 1  # bytes; gRPC's own limit


@dataclass(frozen=True)
class Claim:
    """Who a client says it is when it opens a stream."""

    client_id: ClientId

    def to_bytes(self) -> bytes:
        return json.dumps({"client_id": self.client_id}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a claim; ValueError says what is wrong with it."""
        try:
            client_id = json.loads(data)["client_id"]
        except (ValueError, KeyError, TypeError):
            raise ValueError("this server speaks to `fedopt client`; no client id came") from None
        if isinstance(client_id, bool) or not isinstance(client_id, (int, str)):
            raise ValueError(f"client id: got {client_id!r}; must be a number or a name")
        return cls(client_id)


def channel_options(
    keep_alive_seconds: float, largest_received: int
) -> list[tuple[str, int | float]]:
    """Return gRPC's options for either end: message sizes, and pings that notice a dead peer.

    A ping goes out after half of `keep_alive_seconds` without traffic and may stay unanswered for
    the other half. gRPC answers pings by itself, so a client that trains for hours is not dead.
    """
    half = int(500 * keep_alive_seconds)
    return [
        ("grpc.max_receive_message_length", largest_received),
        ("grpc.max_send_message_length", LARGEST_MESSAGE),
        ("grpc.keepalive_time_ms", half),
        ("grpc.keepalive_timeout_ms", half),
        ("grpc.http2.ping_timeout_ms", half),  # of which gRPC waits a minute otherwise
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", min(half, 1000)),
        ("grpc.so_reuseport", 0),
    ]

"""What both ends of a gRPC stream agree on, and how a client reaches the server."""

from __future__ import annotations

import ipaddress
import os

import grpc
from flwr.proto import transport_pb2
from pydantic import StrictInt, StrictStr, TypeAdapter
from pydantic.dataclasses import dataclass

SERVICE = transport_pb2.DESCRIPTOR.services_by_name["FlowerService"].full_name
CLAIM_KEY = "fedopt-claim-bin"  # metadata of a Join call
LARGEST_REPLY_KEY = "fedopt-largest-reply"  # metadata of its answer: bytes that the server takes
RUN_IS_OVER = grpc.StatusCode.FAILED_PRECONDITION  # ends a stream whose client may go home
LONGEST_PAUSE_SECONDS = 10.0  # of a client before its next attempt, give or take half
MIB = 1 << 20
LARGEST_MESSAGE = 2**31 - 1  # bytes; gRPC's own limit


@dataclass(frozen=True)
class Claim:
    """Who a client says it is when it opens a stream.

    `instance` stays the same for one process's client over all its connections, and no other's.
    """

    client_id: StrictInt | StrictStr
    instance: str = ""


CLAIM = TypeAdapter(Claim)  # to JSON and back


def channel_options(
    keep_alive_seconds: float, largest_received: int, ping_seconds: float | None = None
) -> list[tuple[str, int | str]]:
    """Return gRPC's options for either end: message sizes, and pings that notice a dead peer.

    A ping goes out after `ping_seconds` (half of `keep_alive_seconds`) without traffic and may stay
    unanswered for half of `keep_alive_seconds`. gRPC answers pings by itself, so a client that
    trains for hours is not dead.
    """
    half = int(500 * keep_alive_seconds)
    pause = half if ping_seconds is None else int(1000 * ping_seconds)
    return [
        ("grpc.max_receive_message_length", largest_received),
        ("grpc.max_send_message_length", LARGEST_MESSAGE),
        ("grpc.keepalive_time_ms", pause),
        ("grpc.keepalive_timeout_ms", half),
        ("grpc.http2.ping_timeout_ms", half),  # of which gRPC waits a minute otherwise
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", min(half, 1000)),
        ("grpc.so_reuseport", 0),
    ]


def proxy_for(address: str, proxy: str | None) -> str | None:
    """Return the proxy to reach `address` through: never one for this machine or for a host that
    the environment variable no_proxy names."""
    host = address.rpartition(":")[0].strip("[]")
    given = [os.environ[name] for name in ("no_grpc_proxy", "no_proxy") if os.environ.get(name)]
    exempt = [entry.strip() for entry in given[0].split(",")] if given else []  # as gRPC reads it
    if _is_loopback(host) or any(entry and host.endswith(entry) for entry in exempt):
        return None
    return proxy


def _is_loopback(host: str) -> bool:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return host.rstrip(".").lower().rpartition(".")[2] == "localhost"
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return ip.is_loopback or ip.is_unspecified

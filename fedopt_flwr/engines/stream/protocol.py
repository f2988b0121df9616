"""What both ends of a gRPC stream agree on."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import grpc
from flwr.proto import transport_pb2
from pydantic import AfterValidator, Field, StrictInt, StrictStr, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import from_json

from ...algorithm import ClientId
from ...config.client_ids import is_name
from ...problems import foreign_text

SERVICE = transport_pb2.DESCRIPTOR.services_by_name["FlowerService"].full_name
PROTOCOL = 3  # raised when one end no longer understands what the other sends
PACKAGE = version("fedopt-flwr")
JOIN_TOKEN = "FEDOPT_JOIN_TOKEN"  # nosec B105  # the variable of the environment that holds it
CLAIM_KEY = "fedopt-claim-bin"  # metadata of a Join call
_LONGEST_CLAIM = 4096  # bytes
LARGEST_REPLY_KEY = "fedopt-largest-reply"  # metadata of its answer: bytes that the server takes
MODEL_KEY = "fedopt-model-bin"  # metadata of a refusal: an instruction, from which the size follows
RUN_IS_OVER = grpc.StatusCode.FAILED_PRECONDITION  # ends a stream whose client may go home
LONGEST_PAUSE_SECONDS = 10.0  # of a client before its next attempt, give or take half
MIB = 1 << 20
LARGEST_MESSAGE = 2**31 - 1  # bytes; gRPC's own limit
UNKNOWN_MODEL_BYTES = 4 * MIB  # of a message to a client that knows no model yet


def _name(text: str) -> str:
    if not is_name(text):
        raise ValueError("is no name")
    return text


_Number = Annotated[StrictInt, Field(ge=0, le=10**9)]
_Word = Annotated[StrictStr, Field(max_length=64)]


@dataclass(frozen=True)
class Claim:
    """Who a client says it is when it opens a stream.

    `instance` stays the same for one process's client over all its connections, and no other's.
    `token` is what `fedopt launch` gave to its own clients. `takes` is how large a message it
    reads, in bytes.
    """

    client_id: _Number | Annotated[StrictStr, AfterValidator(_name)]
    instance: _Word = ""
    token: _Word = ""
    protocol: StrictInt = PROTOCOL
    package: _Word = PACKAGE
    takes: Annotated[StrictInt, Field(ge=1, le=LARGEST_MESSAGE)] = LARGEST_MESSAGE

    @property
    def who(self) -> tuple[ClientId, str]:
        return self.client_id, self.instance


CLAIM = TypeAdapter(Claim)  # to JSON


def read_claim(contents: bytes) -> Claim:
    """Read the JSON of a claim; ValueError says to its sender why it cannot be used."""
    if not contents or len(contents) > _LONGEST_CLAIM:
        what = f"a claim of {len(contents)} bytes" if contents else "no client id"
        raise ValueError(f"this server speaks to `fedopt client`; {what} came")
    try:
        said = from_json(contents)
        # one of another version may hold other things: this comes before all else
        protocol = said.get("protocol", PROTOCOL)
    except Exception:  # a stranger's bytes: no JSON, too deep, no object
        raise ValueError("this server speaks to `fedopt client`; its claim is unreadable") from None
    if type(protocol) is not int or protocol != PROTOCOL:
        theirs, package = foreign_text(protocol, 20), foreign_text(said.get("package", "?"), 20)
        raise ValueError(
            f"this client speaks protocol {theirs} (fedopt-flwr {package}) and the server protocol "
            f"{PROTOCOL} (fedopt-flwr {PACKAGE}); install the same version on both sides"
        )
    try:
        return CLAIM.validate_python(said)
    except ValidationError as error:
        field = str(error.errors()[0]["loc"][0])
        got = foreign_text(repr(said.get(field)), 80)
        raise ValueError(
            f"{foreign_text(field, 20)}: got {got}; ids are whole numbers, or names of 1 to 64 "
            "printable characters; other texts have at most 64 characters, and takes is a number "
            "of bytes"
        ) from None


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

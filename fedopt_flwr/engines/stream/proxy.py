"""One connected client as Flower's loop sees it."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field

from flwr.common import (
    Code,
    FitIns,
    FitRes,
    GetPropertiesIns,
    GetPropertiesRes,
    Parameters,
    ReconnectIns,
    Status,
)
from flwr.common.serde import (
    fit_res_from_proto,
    get_properties_ins_to_proto,
    get_properties_res_from_proto,
    metrics_to_proto,
    parameters_to_proto,
    reconnect_ins_to_proto,
)
from flwr.proto.transport_pb2 import ClientMessage, ServerMessage
from flwr.server.client_proxy import ClientProxy
from flwr.server.superlink.fleet.grpc_bidi.grpc_bridge import (
    GrpcBridge,
    GrpcBridgeClosed,
    InsWrapper,
)

from ...algorithm import ClientId
from ...flower import STATE_LOST
from ...flower.messages import ROUND, require_few
from ...problems import foreign_text
from ..common import NeverAsked
from .roster import Roster


@dataclass
class Letter:
    """A serialised message, taken out once.

    gRPC and Flower's servicer refer to what they carried last until the next message comes. Of an
    empty letter that costs nothing; of a hundred clients' models it would be most of the memory.
    """

    contents: bytes

    def take(self) -> bytes:
        contents = self.contents
        self.contents = b""
        return contents


@dataclass
class Seat:
    """A connection whose claim to an id was accepted."""

    client_id: ClientId
    peer: str
    instance: str = ""  # the same in all connections of one process's client
    serial: int | None = None  # of its certificate
    proxy: StreamProxy | None = None
    left: bool = False
    ended_because: str = ""  # what the client hears, if the server ended it for a reason
    has_lost_state: bool = False  # according to its last answer
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


class SharedArrays:
    """Serialises a round's arrays once for all its clients.

    Protocol buffers merge a message that is split in two: bytes with the arrays, the same for all,
    followed by bytes with one client's instruction, are one valid message.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parameters: Parameters | None = None
        self._bytes = b""

    def message(self, ins: FitIns) -> bytes:
        with self._lock:
            if ins.parameters is not self._parameters:
                arrays = ServerMessage.FitIns(parameters=parameters_to_proto(ins.parameters))
                self._bytes = ServerMessage(fit_ins=arrays).SerializeToString()
                self._parameters = ins.parameters
            shared = self._bytes
        own = ServerMessage.FitIns(config=metrics_to_proto(ins.config))
        return shared + bytes(ServerMessage(fit_ins=own).SerializeToString())


class StreamProxy(NeverAsked, ClientProxy):
    """Flower's view of one connected client."""

    def __init__(
        self, cid: str, bridge: GrpcBridge, seat: Seat, arrays: SharedArrays, roster: Roster
    ) -> None:
        super().__init__(cid)
        self.bridge = bridge
        self.seat = seat
        self._arrays = arrays
        self._roster = roster
        self._properties: GetPropertiesRes | None = None

    def _request(self, message: bytes, timeout: float | None) -> ClientMessage:
        """Send one message and wait for its answer; Flower's servicer carries both as letters."""
        self.seat.turn.release()
        letter = InsWrapper(Letter(message), timeout)  # type: ignore[arg-type]
        answer = self.bridge.request(letter).client_message.take()
        parsed: ClientMessage = ClientMessage.FromString(answer)
        return parsed

    def get_properties(
        self, ins: GetPropertiesIns, timeout: float | None, group_id: int | None
    ) -> GetPropertiesRes:
        """Ask the client who it is when it joins; return the same answer from then on."""
        if self._properties is None:
            message = ServerMessage(get_properties_ins=get_properties_ins_to_proto(ins))
            answer = self._request(message.SerializeToString(), timeout)
            require_few((), answer.get_properties_res.properties)
            code = answer.get_properties_res.status.code
            if code not in {known.value for known in Code}:  # which Flower takes for OK
                raise ValueError(f"status code {code} is unknown")
            self._properties = get_properties_res_from_proto(answer.get_properties_res)
        return self._properties

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        client_id = self.seat.client_id
        started = time.monotonic()
        self._roster.asked(client_id, int(ins.config[ROUND]))
        try:
            answer = self._request(self._arrays.message(ins), timeout)
            require_few(answer.fit_res.parameters.tensors, answer.fit_res.metrics)
            result = fit_res_from_proto(answer.fit_res)
        except GrpcBridgeClosed:
            result = _failed(_loss(time.monotonic() - started, timeout))
        except Exception as error:  # the library of protocol buffers and Flower raise many kinds
            result = _failed(f"sent a message that cannot be read: {error}")
        note = foreign_text(result.metrics.get("error", "")) or foreign_text(result.status.message)
        self.seat.has_lost_state = STATE_LOST in note
        self._roster.answered(client_id, time.monotonic() - started, note)
        return result

    def leave(self, timeout: float) -> None:
        """Tell the client that it is no longer needed."""
        ins = reconnect_ins_to_proto(ReconnectIns(seconds=None))
        with contextlib.suppress(GrpcBridgeClosed, ValueError):  # gone, or still at work
            self._request(ServerMessage(reconnect_ins=ins).SerializeToString(), timeout)


def _loss(seconds: float, timeout: float | None) -> str:
    if timeout is not None and seconds >= timeout:
        return f"no answer within {timeout:g} s (federation.round_timeout); connection closed"
    return f"connection lost {seconds:.1f} s after it was asked"


def _failed(text: str) -> FitRes:
    return FitRes(Status(Code.FIT_NOT_IMPLEMENTED, text), Parameters([], ""), 0, {})

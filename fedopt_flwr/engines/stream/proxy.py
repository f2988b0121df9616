"""One connected client as Flower's loop sees it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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
from ...errors import MessageError
from ...flower import STATE_LOST
from ...flower.messages import PHASE, ROUND, repeated, require_answers
from ...problems import foreign_text
from ..common import NeverAsked
from .parts import parse
from .patience import Patience
from .roster import Roster
from .system import is_established

LARGEST_INTRODUCTION = 64 << 10  # bytes
_UNSURE_SECONDS = 0.2  # until the system knows that a connection is lost


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
    is_to_return: bool = False  # the stream was ended so that the client opens another
    has_lost_state: bool = False  # according to its last answer that needed it
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    hang_up: Callable[[], None] = lambda: None  # wakes whoever waits for a message

    def end(self, reason: str) -> None:
        """Close the stream, so that the client opens another and begins in step."""
        self.ended_because = reason
        self.is_to_return = True
        if self.proxy is not None:
            self.proxy.bridge.close()

    def give_up(self, reason: str) -> None:
        """Close the stream although an answer is awaited; the client hears no reason."""
        self.end(reason)
        self.hang_up()


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
    """Flower's view of one connected client.

    Whatever a client's message holds, or raises where it is read, is that client's failure.
    """

    def __init__(
        self,
        cid: str,
        bridge: GrpcBridge,
        seat: Seat,
        arrays: SharedArrays,
        roster: Roster,
        patience: Patience,
        largest_message: int,
    ) -> None:
        super().__init__(cid)
        self.bridge = bridge
        self.seat = seat
        self._arrays = arrays
        self._roster = roster
        self._patience = patience
        self._largest_message = largest_message
        self._properties: GetPropertiesRes | None = None
        self.is_busy = False  # also after its round closed without it

    def _request(self, message: bytes, timeout: float | None) -> bytes:
        """Send one message and wait for its answer; Flower's servicer carries both as letters."""
        self.seat.turn.release()
        letter = InsWrapper(Letter(message), timeout)  # type: ignore[arg-type]
        answer: bytes = self.bridge.request(letter).client_message.take()
        return answer

    def get_properties(
        self, ins: GetPropertiesIns, timeout: float | None, group_id: int | None
    ) -> GetPropertiesRes:
        """Ask the client who it is when it joins; return the same answer from then on."""
        if self._properties is None:
            message = ServerMessage(get_properties_ins=get_properties_ins_to_proto(ins))
            answer = self._request(message.SerializeToString(), timeout)
            try:
                self._properties = _introduction(answer)
            except Exception as error:  # as in `fit`
                text = f"its introduction cannot be read: {foreign_text(error)}"
                status = Status(Code.GET_PROPERTIES_NOT_IMPLEMENTED, text)
                return GetPropertiesRes(status, {})
        return self._properties

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        seat = self.seat
        number, phase = int(ins.config[ROUND]), str(ins.config[PHASE])
        started = time.monotonic()
        self._roster.asked(seat.client_id, number)
        self.is_busy = True
        try:
            with self._patience.waiting(seat.client_id, number, phase, seat.give_up):
                answer = self._request(self._arrays.message(ins), timeout)
            result = self._result(answer, ins)
        except GrpcBridgeClosed:
            seconds = time.monotonic() - started
            result = _failed(seat.ended_because or self._loss(seconds, timeout))
        except Exception as error:  # the library of protocol buffers and Flower raise many kinds
            result = _failed(f"sent a message that cannot be read: {foreign_text(error)}")
        finally:
            self.is_busy = False
        seconds = time.monotonic() - started
        note = str(result.metrics.get("error", "")) or foreign_text(result.status.message)
        if not note:
            self._patience.heard(phase, seconds)
        if phase == "train" or STATE_LOST in note:  # other work may be done without the state
            seat.has_lost_state = STATE_LOST in note
        self._roster.answered(seat.client_id, seconds, note)
        return result

    def _result(self, answer: bytes, ins: FitIns) -> FitRes:
        """Read a reply. One to another instruction ends the stream: those after it may be, too."""
        result = fit_res_from_proto(_answer(answer, "fit_res").fit_res)
        own = str(result.metrics.get("error", "")) or result.status.message
        if result.status.code != Code.OK or "error" in result.metrics:
            result.metrics["error"] = foreign_text(own or "it failed and did not say why")
        try:
            require_answers(result.metrics, repeated(ins.config))
        except MessageError as error:
            self.seat.end(str(error))
            return _failed(str(result.metrics.get("error", error)))
        return result

    def _loss(self, seconds: float, timeout: float | None) -> str:
        """Say why no answer came. gRPC ends a stream whose message is over the limit by itself, and
        tells its server nothing more than of a lost connection."""
        if timeout is not None and seconds >= timeout:
            return f"no answer within {timeout:g} s (federation.round_timeout); connection closed"
        if is_established(self.seat.peer):
            time.sleep(_UNSURE_SECONDS)
        if is_established(self.seat.peer):
            return (
                f"it hung up {seconds:.1f} s after it was asked, or its reply was too large: the "
                f"server takes {self._largest_message:,} bytes"
            )
        return f"connection lost {seconds:.1f} s after it was asked"

    def leave(self, timeout: float) -> None:
        """Tell the client that it is no longer needed."""
        ins = reconnect_ins_to_proto(ReconnectIns(seconds=None))
        with contextlib.suppress(GrpcBridgeClosed, ValueError):  # gone, or still at work
            self._request(ServerMessage(reconnect_ins=ins).SerializeToString(), timeout)


def _introduction(answer: bytes) -> GetPropertiesRes:
    if len(answer) > LARGEST_INTRODUCTION:
        raise MessageError(
            f"it has {len(answer):,} bytes; must have at most {LARGEST_INTRODUCTION:,}"
        )
    result = get_properties_res_from_proto(_answer(answer, "get_properties_res").get_properties_res)
    result.status.message = foreign_text(result.status.message)
    return result


def _answer(data: bytes, kind: str) -> Any:
    """Parse an answer; MessageError if it is of another kind or has a status that Flower does not
    know and would take for OK."""
    message = parse(data, ClientMessage)
    came = message.WhichOneof("msg")
    if came != kind:
        raise MessageError(f"it is {came or 'empty'}; asked was {kind}")
    status = getattr(message, kind).status
    if status.code not in [code.value for code in Code]:
        raise MessageError(f"its status is {status.code}, which is none: {status.message!r}")
    return message


def _failed(text: str) -> FitRes:
    return FitRes(Status(Code.FIT_NOT_IMPLEMENTED, text), Parameters([], ""), 0, {})

"""The client end: one stream to the server, opened again whenever it is lost.

Flower's `start_client` ends at the first exception, timed-out round or lost connection. This loop
answers an exception with its text and comes back after everything else, except what no waiting can
fix: a refused id or certificate.
"""

from __future__ import annotations

import json
import logging
import queue
import random
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import grpc
from flwr.client import NumPyClient
from flwr.common import (
    Code,
    FitRes,
    GetPropertiesRes,
    Parameters,
    Status,
    ndarrays_to_parameters,
)
from flwr.common.serde import (
    fit_ins_from_proto,
    fit_res_to_proto,
    get_properties_ins_from_proto,
    get_properties_res_to_proto,
)
from flwr.proto.transport_pb2 import ClientMessage, Reason, ServerMessage

from ...algorithm import ClientId
from ...errors import ConfigError, FedoptError, MessageError, RunError
from ...flower.messages import ROUND, repeated, to_arrays
from ...problems import foreign_text
from ...randomness import derive
from .address import ServerAddress
from .connections import Connections
from .parts import parse
from .protocol import (
    CLAIM,
    CLAIM_KEY,
    LARGEST_MESSAGE,
    LARGEST_REPLY_KEY,
    LONGEST_PAUSE_SECONDS,
    MIB,
    MODEL_KEY,
    RUN_IS_OVER,
    SERVICE,
    UNKNOWN_MODEL_BYTES,
    Claim,
)
from .tls import explain

_FIRST_PAUSE_SECONDS = 0.5
_TOLERATED_PING_SECONDS = 330.0  # gRPC's servers allow one in 300 s, unless told otherwise
_FINAL = {  # refusals that stay the same however often one asks
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
}
_SLACK_BYTES = 64 << 10  # of a message, for what instructions grow by
_TOO_LARGE = re.compile(r"larger than max \((\d+) vs\. (\d+)\)")  # as gRPC says it
_LOG = logging.getLogger(__name__)
_OK = Status(Code.OK, "")


class StreamClient:
    """Serves one client id until the server sends it home or `stop` is called.

    A Flower client without `bytes_of_instructions` has no part in runs of large messages.
    """

    def __init__(
        self,
        client_id: ClientId,
        client: NumPyClient,
        server: ServerAddress,
        say: Callable[[str], None],
        connections: Connections | None = None,
    ) -> None:
        self._client_id = client_id
        self._connections = connections or Connections([client_id])
        self._client = client
        self._server = server
        self._say = lambda text: say(f"client {client_id}: {text}")
        self._stopped = threading.Event()
        self._call: grpc.Call | None = None
        self._credentials: grpc.ChannelCredentials | None = None
        self._was_connected = False
        self._own_error: FedoptError | None = None
        self._ping_seconds = server.keep_alive_seconds / 2
        self._largest_reply = LARGEST_MESSAGE  # bytes that the server takes
        takes = min(UNKNOWN_MODEL_BYTES, server.max_message_mb * MIB)
        self._claim = Claim(client_id, uuid.uuid4().hex, server.token, takes=takes)

    def stop(self) -> None:
        """Leave at once; a training that is under way ends unheard."""
        self._stopped.set()
        if self._call is not None:
            self._call.cancel()

    def run(self) -> None:
        """Serve; FedoptError says why another attempt is of no use."""
        jitter = random.Random(derive(0, "reconnect", self._client_id))  # nosec B311  # no secret
        pause = _FIRST_PAUSE_SECONDS
        while not self._stopped.is_set():
            self._was_connected = False
            try:
                if self._serve_once():
                    return
                reason = "the stream ended"
            except grpc.RpcError as error:
                if error.code() == RUN_IS_OVER:
                    self._say(foreign_text(error.details()))
                    return
                if self._takes_more(error):
                    continue
                reason = self._reason(error)
                self._ping_less(error)
            except MessageError as error:
                reason = f"the server sent what cannot be read: {error}"
            if self._own_error is not None:
                raise self._own_error
            if self._was_connected:
                pause = _FIRST_PAUSE_SECONDS
            seconds = pause * (0.5 + jitter.random())  # so that a crowd does not return as one
            if not self._stopped.is_set():
                self._say(f"{reason}; next attempt in {seconds:.1f} s")
            self._stopped.wait(seconds)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _serve_once(self) -> bool:
        """Open one stream and answer until it ends; return whether the server said goodbye."""
        channel = self._open_channel()
        answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        metadata = ((CLAIM_KEY, CLAIM.dump_json(self._claim)),)
        with channel:
            try:
                join = channel.stream_stream(f"/{SERVICE}/Join")  # bytes: not parsed before checked
                call = join(iter(answers.get, None), metadata=metadata)
                self._call = call
                if self._stopped.is_set():
                    return True
                return self._answer_all(call, answers)
            finally:
                self._call = None
                self._connections.opened(self._client_id, is_open=False)
                answers.put(None)  # ends gRPC's thread that waits for the next answer

    def _open_channel(self) -> grpc.Channel:
        server = self._server
        options = server.channel_options(self._claim.takes, self._ping_seconds)
        if server.tls is None:
            return grpc.insecure_channel(server.address, options)
        try:
            self._credentials = server.tls.credentials()
        except ConfigError as error:  # such as a new certificate whose key is not there yet
            if self._credentials is None:
                raise
            self._say(f"{error}; what was read before stays in force")
        return grpc.secure_channel(server.address, self._credentials, options)

    def _answer_all(self, call: Any, answers: queue.SimpleQueue[bytes | None]) -> bool:
        largest: int | None = None  # bytes of an instruction for the model that was built
        for data in call:
            if not self._was_connected:
                self._was_connected = True
                self._largest_reply = _number(dict(call.initial_metadata()).get(LARGEST_REPLY_KEY))
                self._connections.opened(self._client_id, is_open=True)
                self._say(f"connected to {self._server}")
            if largest is not None and len(data) > largest:
                raise MessageError(
                    f"a message of {len(data):,} bytes, where one with this run's model has at "
                    f"most {largest:,}"
                )
            message = parse(data, ServerMessage)
            del data  # as large as the model
            answers.put(self._answer(message).SerializeToString())
            largest = self._largest(message) or largest
            if message.WhichOneof("msg") == "reconnect_ins":
                for _ in call:  # until the answer has arrived and the server ends the stream
                    pass
                return True
        return False

    def _largest(self, message: ServerMessage) -> int | None:
        """Return how large the server's messages may be, once the client knows the model."""
        arrays: int | None = getattr(self._client, "largest_instruction", None)
        if arrays is None or message.WhichOneof("msg") != "fit_ins":
            return None
        texts = message.ByteSize() - message.fit_ins.parameters.ByteSize()
        return arrays + int(texts) + _SLACK_BYTES

    def _answer(self, message: ServerMessage) -> ClientMessage:
        kind = message.WhichOneof("msg")
        if kind == "fit_ins":
            return self._fit(message)
        if kind == "get_properties_ins":
            reply = get_properties_res_to_proto(self._introduce(message))
            return ClientMessage(get_properties_res=reply)
        return ClientMessage(disconnect_res=ClientMessage.DisconnectRes(reason=Reason.ACK))

    def _introduce(self, message: ServerMessage) -> GetPropertiesRes:
        try:
            config = get_properties_ins_from_proto(message.get_properties_ins).config
        except Exception as error:  # Flower raises many kinds
            raise MessageError(f"{type(error).__name__}: {foreign_text(error)}") from error
        try:
            facts = self._client.get_properties(config)
            self._connections.introduced(self._client_id, facts.get("num_examples"))
            return GetPropertiesRes(_OK, facts)
        except Exception as error:
            _LOG.debug("client %s: its introduction failed", self._client_id, exc_info=True)
            text = f"{type(error).__name__}: {error}"
            self._own_error = error if isinstance(error, FedoptError) else RunError(text)
            return GetPropertiesRes(
                Status(Code.GET_PROPERTIES_NOT_IMPLEMENTED, foreign_text(text)), {}
            )

    def _fit(self, message: ServerMessage) -> ClientMessage:
        asked: Mapping[str, Any] = {}
        started = time.monotonic()
        try:
            ins = fit_ins_from_proto(message.fit_ins)
            asked = ins.config
            arrays, count, report = self._client.fit(to_arrays(ins.parameters), ins.config)
            if "error" in report:
                reply = _failure(asked, str(report["error"]))
            else:
                parameters = ndarrays_to_parameters(arrays)
                reply = fit_res_to_proto(FitRes(_OK, parameters, count, report))
            outcome = f"{count} examples"
            size = ClientMessage(fit_res=reply).ByteSize()
            if size > self._largest_reply:
                raise MessageError(
                    f"its reply is too large: {size:,} bytes; the server takes "
                    f"{self._largest_reply:,}"
                )
        except Exception as error:  # of the server's message, or of anyone's code
            _LOG.debug("client %s: its training failed", self._client_id, exc_info=True)
            reply = _failure(asked, f"{type(error).__name__}: {error}")
        if "error" in reply.metrics:
            outcome = f"failed: {reply.metrics['error'].string}"
        self._connections.on_training(time.monotonic() - started)
        self._say(f"round {foreign_text(asked.get(ROUND))}: {outcome}")
        return ClientMessage(fit_res=reply)

    def _takes_more(self, error: grpc.RpcError) -> bool:
        """Build the model of a run whose messages are too large for a client that knows none;
        return whether another attempt is of use now. Another size is never believed."""
        told = dict(error.trailing_metadata() or ()).get(MODEL_KEY)
        measure = getattr(self._client, "bytes_of_instructions", None)
        if told is None or measure is None:
            return False
        try:
            needed = measure(json.loads(told))
        except Exception as problem:  # of the server's words, or of anyone's code
            kind = "" if isinstance(problem, FedoptError) else f"{type(problem).__name__}: "
            text = foreign_text(f"{kind}{problem}")
            raise ConfigError(f"{self._who}: this run cannot be joined: {text}") from problem
        before = self._claim.takes
        takes = min(needed + _SLACK_BYTES, self._server.max_message_mb * MIB)
        self._claim = replace(self._claim, takes=max(takes, before))
        return bool(takes > before)

    @property
    def _who(self) -> str:
        return f"client {self._client_id}: the server at {self._server}"

    def _reason(self, error: grpc.RpcError) -> str:
        """Say why a stream was lost; raise where coming back is of no use."""
        code = error.code()
        details = error.details() or ""
        too_large = _TOO_LARGE.search(details)
        if code == grpc.StatusCode.RESOURCE_EXHAUSTED and too_large:
            return self._too_large(int(too_large[1]), int(too_large[2]), details)
        if code == grpc.StatusCode.CANCELLED:
            return "the server hung up, as it does where an answer takes too long"
        if code in _FINAL:
            raise ConfigError(f"{self._who} refuses it: {foreign_text(details)}")
        if code == grpc.StatusCode.UNAVAILABLE and not self._was_connected:
            problem = explain(self._server.address, self._server.tls, self._server.proxy_in_use)
            if problem is not None:
                raise ConfigError(f"{self._who} cannot be used: {problem}")
        cause = details.partition("\n")[0].rpartition("last error: ")[2]
        proxy = self._server.proxy_in_use
        way = f" (through the proxy {proxy})" if proxy and not self._was_connected else ""
        return f"{code.name.lower().replace('_', ' ')}: {foreign_text(cause)}{way}"

    def _too_large(self, size: int, limit: int, details: str) -> str:
        if limit != self._claim.takes or details.startswith("SERVER"):
            return f"its reply was too large: {size:,} bytes; the server takes {limit:,}"
        return (
            f"the server's message is too large: {size:,} bytes; this client said that it takes "
            f"{limit:,}"
        )

    def _ping_less(self, error: grpc.RpcError) -> None:
        """After a peer hung up because of too many pings, send fewer from now on.

        A proxy between client and server may speak HTTP/2 itself and allow fewer pings than our
        server does. Doubling alone would lose a reply each time, so the first step is a long one.
        """
        if "too_many_pings" not in (error.details() or "").lower().replace(" ", "_"):
            return
        self._ping_seconds = max(2 * self._ping_seconds, _TOLERATED_PING_SECONDS)
        self._say(
            "something between here and the server allows fewer pings than transport."
            f"keep_alive_seconds = {self._server.keep_alive_seconds:g} makes; from now on one in "
            f"{self._ping_seconds:g} s (set transport.keep_alive_seconds = "
            f"{2 * self._ping_seconds:g} on this client to begin so)"
        )


def _failure(asked: Mapping[str, Any], text: str) -> ClientMessage.FitRes:
    """Say that the work failed. Flower lets nothing else travel beside a status that is not OK, and
    the server must know which instruction this answers."""
    report = {key: value for key, value in repeated(asked).items() if value is not None}
    report["error"] = foreign_text(text)
    return fit_res_to_proto(FitRes(_OK, Parameters([], ""), 0, report))


def _number(text: str | bytes | None) -> int:
    """Return how many bytes of a reply the server says it takes."""
    return (
        int(text)
        if isinstance(text, str) and re.fullmatch("[0-9]{1,10}", text)
        else LARGEST_MESSAGE
    )

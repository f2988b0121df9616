"""The client end: one stream to the server, opened again whenever it is lost.

Flower's `start_client` ends at the first exception, timed-out round or lost connection. This loop
answers an exception with its text and comes back after everything else, except what no waiting can
fix: a refused id or certificate.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

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
from flwr.proto.transport_pb2_grpc import FlowerServiceStub

from ...algorithm import ClientId
from ...errors import ConfigError, FedoptError, RunError
from ...flower.messages import ROUND, require_few, to_arrays
from ...randomness import derive
from .protocol import (
    CLAIM,
    CLAIM_KEY,
    LARGEST_MESSAGE,
    LONGEST_PAUSE_SECONDS,
    RUN_IS_OVER,
    Claim,
    channel_options,
    proxy_for,
)
from .tls import ClientTls, explain

_FIRST_PAUSE_SECONDS = 0.5
_TOLERATED_PING_SECONDS = 330.0  # gRPC's servers allow one in 300 s, unless told otherwise
_FINAL = {  # refusals that stay the same however often one asks
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
}
_LOG = logging.getLogger(__name__)
_OK = Status(Code.OK, "")


@dataclass(frozen=True)
class ServerAddress:
    """Where the server is and how to speak to it; `tls` None is plain text.

    `proxy` is http://host:port, and counts only for an address outside this machine. `token` is
    what a server demands that `fedopt launch` started.
    """

    address: str
    tls: ClientTls | None
    keep_alive_seconds: float
    proxy: str | None = None
    token: str = field(default="", repr=False)

    @property
    def proxy_in_use(self) -> str | None:
        return proxy_for(self.address, self.proxy)

    def __str__(self) -> str:
        proxy = self.proxy_in_use
        return self.address if proxy is None else f"{self.address} through the proxy {proxy}"


class StreamClient:
    """Serves one client id until the server sends it home or `stop` is called."""

    def __init__(
        self,
        client_id: ClientId,
        client: NumPyClient,
        server: ServerAddress,
        say: Callable[[str], None],
    ) -> None:
        self._client_id = client_id
        self._client = client
        self._server = server
        self._say = lambda text: say(f"client {client_id}: {text}")
        self._stopped = threading.Event()
        self._call: grpc.Call | None = None
        self._was_connected = False
        self._own_error: FedoptError | None = None
        self._ping_seconds = server.keep_alive_seconds / 2
        self._claim = Claim(client_id, uuid.uuid4().hex, server.token)

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
                    self._say(error.details())
                    return
                reason = self._reason(error)
                self._ping_less(error)
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
        answers: queue.SimpleQueue[ClientMessage | None] = queue.SimpleQueue()
        metadata = ((CLAIM_KEY, CLAIM.dump_json(self._claim)),)
        with channel:
            try:
                call = FlowerServiceStub(channel).Join(iter(answers.get, None), metadata=metadata)
                self._call = call
                if self._stopped.is_set():
                    return True
                return self._answer_all(call, answers)
            finally:
                self._call = None
                answers.put(None)  # ends gRPC's thread that waits for the next answer

    def _open_channel(self) -> grpc.Channel:
        server = self._server
        options = channel_options(server.keep_alive_seconds, LARGEST_MESSAGE, self._ping_seconds)
        proxy = server.proxy_in_use
        # by itself gRPC would obey http_proxy and the like, which are often set for a browser and
        # end at a proxy that lets no stream through
        options.append(("grpc.enable_http_proxy", int(proxy is not None)))
        if proxy is not None:
            options.append(("grpc.http_proxy", proxy))
        if server.tls is None:
            return grpc.insecure_channel(server.address, options)
        return grpc.secure_channel(server.address, server.tls.credentials(), options)

    def _answer_all(
        self, call: Iterator[ServerMessage], answers: queue.SimpleQueue[ClientMessage | None]
    ) -> bool:
        for message in call:
            if not self._was_connected:
                self._was_connected = True
                self._say(f"connected to {self._server}")
            answers.put(self._answer(message))
            if message.WhichOneof("msg") == "reconnect_ins":
                for _ in call:  # until the answer has arrived and the server ends the stream
                    pass
                return True
        return False

    def _answer(self, message: ServerMessage) -> ClientMessage:
        kind = message.WhichOneof("msg")
        if kind == "fit_ins":
            return ClientMessage(fit_res=fit_res_to_proto(self._fit(message)))
        if kind == "get_properties_ins":
            reply = get_properties_res_to_proto(self._introduce(message))
            return ClientMessage(get_properties_res=reply)
        return ClientMessage(disconnect_res=ClientMessage.DisconnectRes(reason=Reason.ACK))

    def _introduce(self, message: ServerMessage) -> GetPropertiesRes:
        try:
            require_few((), message.get_properties_ins.config)
            config = get_properties_ins_from_proto(message.get_properties_ins).config
            return GetPropertiesRes(_OK, self._client.get_properties(config))
        except Exception as error:
            _LOG.debug("client %s: its introduction failed", self._client_id, exc_info=True)
            text = f"{type(error).__name__}: {error}"
            self._own_error = error if isinstance(error, FedoptError) else RunError(text)
            return GetPropertiesRes(Status(Code.GET_PROPERTIES_NOT_IMPLEMENTED, text), {})

    def _fit(self, message: ServerMessage) -> FitRes:
        try:
            require_few(message.fit_ins.parameters.tensors, message.fit_ins.config)
            ins = fit_ins_from_proto(message.fit_ins)
            arrays, count, report = self._client.fit(to_arrays(ins.parameters), ins.config)
            result = FitRes(_OK, ndarrays_to_parameters(arrays), count, report)
        except Exception as error:
            _LOG.debug("client %s: its training failed", self._client_id, exc_info=True)
            status = Status(Code.FIT_NOT_IMPLEMENTED, f"{type(error).__name__}: {error}")
            return FitRes(status, Parameters([], ""), 0, {})
        outcome = f"failed: {report['error']!s}" if "error" in report else f"{count} examples"
        self._say(f"round {ins.config.get(ROUND)!s}: {outcome}")
        return result

    def _reason(self, error: grpc.RpcError) -> str:
        """Say why a stream was lost; raise where coming back is of no use."""
        code = error.code()
        details = error.details() or ""
        who = f"client {self._client_id}: the server at {self._server}"
        if code in _FINAL:
            raise ConfigError(f"{who} refuses it: {details}")
        if code == grpc.StatusCode.UNAVAILABLE and not self._was_connected:
            problem = explain(self._server.address, self._server.tls, self._server.proxy_in_use)
            if problem is not None:
                raise ConfigError(f"{who} cannot be used: {problem}")
        cause = details.partition("\n")[0].rpartition("last error: ")[2]
        proxy = self._server.proxy_in_use
        way = f" (through the proxy {proxy})" if proxy and not self._was_connected else ""
        return f"{code.name.lower().replace('_', ' ')}: {cause}{way}"

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

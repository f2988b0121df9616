"""The server end of Flower's gRPC stream: Flower's loop over the clients that joined.

Flower's servicer carries the messages. Around it stands what its own `start_server` lacks: client
ids tied to certificates, a second client of the same id kept out, keep-alive that notices a client
that vanished, arrays serialised once a round, as many requests at a time as there are clients.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent import futures

import grpc
from flwr.server.superlink.fleet.grpc_bidi.flower_service_servicer import FlowerServiceServicer
from flwr.server.superlink.fleet.grpc_bidi.grpc_bridge import GrpcBridgeClosed

from ...config.run_config import RunConfig
from ...errors import ConfigError, Terminated
from ...flower import FederatedStrategy
from ..common import LeanServer, intra_op_threads, quiet
from .desk import Desk, Refused
from .protocol import MIB, RUN_IS_OVER, SERVICE, channel_options
from .proxy import Letter, Seat, SharedArrays, StreamProxy
from .revoked import REVOKED, RevokedList
from .roster import Roster
from .tls import ServerTls

_SPARE_STREAMS = 32  # for clients that are refused while all others are connected
_GRACE_SECONDS = 2.0


def run_on_streams(
    strategy: FederatedStrategy,
    config: RunConfig,
    address: str,
    *,
    num_rounds: int,
    tls: ServerTls | None,
    roster: Roster,
    token: str = "",
    on_listening: Callable[[int], None] = lambda port: None,
) -> None:
    """Listen at `address`, run `num_rounds` rounds over the clients that join, send them home.

    With a `token`, only clients that know it may join. `on_listening` hears the port, which is free
    and chosen by the system if the address says 0. Raises ConfigError if the address or a
    certificate cannot be used, and what Flower's loop raises. Whatever ends the run, no stream
    stays open.
    """
    certified = tls is not None and tls.client_ca is not None
    revoked = None
    if tls is not None and tls.client_ca is not None and tls.revoked is not None:
        revoked = RevokedList(tls.revoked, tls.client_ca, roster.refused)
    desk = Desk(config, roster, strategy.members, certified=certified, revoked=revoked, token=token)
    server, port = _listen(_Servicer(desk, roster), config, address, tls)
    with _stopping_on_signals(desk):
        server.start()
        try:
            with quiet(), intra_op_threads(config.training.threads):
                on_listening(port)
                loop = LeanServer(client_manager=desk, strategy=strategy)
                loop.set_max_workers(config.federation.num_clients)
                loop.fit(num_rounds, config.federation.timeout_seconds)
                desk.dismiss()
        finally:
            desk.abandon()
            server.stop(_GRACE_SECONDS).wait()


@contextlib.contextmanager
def _stopping_on_signals(desk: Desk) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the wait for clients that are at work."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        threading.Thread(target=desk.abandon, daemon=True).start()
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listen(
    servicer: _Servicer, config: RunConfig, address: str, tls: ServerTls | None
) -> tuple[grpc.Server, int]:
    streams = config.federation.num_clients + _SPARE_STREAMS
    transport = config.transport
    server = grpc.server(
        futures.ThreadPoolExecutor(streams, thread_name_prefix="stream"),
        handlers=(
            grpc.method_handlers_generic_handler(
                SERVICE,
                {"Join": grpc.stream_stream_rpc_method_handler(servicer.join, Letter, Letter.take)},
            ),
        ),
        options=channel_options(transport.keep_alive_seconds, transport.max_message_mb * MIB),
        maximum_concurrent_rpcs=streams,
    )
    try:
        if tls is None:
            return server, server.add_insecure_port(address)
        return server, server.add_secure_port(address, tls.credentials())
    except RuntimeError as error:
        raise ConfigError(
            f"--address: cannot listen at {address!r}: {error}; must be HOST:PORT of this machine, "
            "with a port that no other program uses"
        ) from None


class _Servicer:
    """Flower's servicer behind the desk."""

    def __init__(self, desk: Desk, roster: Roster) -> None:
        self._desk = desk
        self._roster = roster
        self._arrays = SharedArrays()

    def join(self, messages: Iterator[Letter], context: grpc.ServicerContext) -> Iterator[Letter]:
        try:
            seat = self._desk.seat(context)
        except Refused as refusal:
            if refusal.code != RUN_IS_OVER:
                self._roster.refused(context.peer(), refusal.for_log)
            context.abort(refusal.code, str(refusal))
        if not context.add_callback(lambda: self._desk.free(seat)):
            self._desk.free(seat)  # the stream ended before it began
            return
        flower = FlowerServiceServicer(
            self._desk,
            grpc_client_proxy_factory=lambda cid, bridge: StreamProxy(  # type: ignore[arg-type,return-value]
                cid, bridge, seat, self._arrays, self._roster
            ),
        )
        with contextlib.suppress(GrpcBridgeClosed):  # the connection is lost, or closed by the desk
            yield from flower.Join(_in_turn(messages, seat), context)  # type: ignore[arg-type]
        if self._desk.finished:
            context.abort(RUN_IS_OVER, "the run is over")
        if seat.ended_because == REVOKED:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, REVOKED)
        if seat.ended_because:
            context.abort(grpc.StatusCode.ABORTED, seat.ended_because)


def _in_turn(messages: Iterator[Letter], seat: Seat) -> Iterator[Letter]:
    """Take one message a question: what a client sends unasked stays in the network's buffers."""
    while True:
        seat.turn.acquire()
        message = None if seat.left else next(messages, None)
        if message is None:
            return
        yield message

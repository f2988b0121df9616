"""The server end of Flower's gRPC stream: Flower's loop over the clients that joined.

Flower's servicer carries the messages. Around it stands what its own `start_server` lacks: client
ids tied to certificates, a second client of the same id kept out, keep-alive that notices a client
that vanished, arrays serialised once a round, as many requests at a time as there are clients.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Self

import grpc
from flwr.common import FitRes
from flwr.server.client_proxy import ClientProxy
from flwr.server.superlink.fleet.grpc_bidi.flower_service_servicer import FlowerServiceServicer
from flwr.server.superlink.fleet.grpc_bidi.grpc_bridge import GrpcBridgeClosed

from ...config.run_config import RunConfig
from ...errors import ConfigError, Terminated
from ...flower import FederatedStrategy
from ...flower.sizes import largest_instruction, largest_reply
from ...flower.threads import intra_op_threads
from ..common import LeanServer, quiet
from .desk import Desk, Refused, TakesTooLittle
from .health import open_health_handler
from .patience import Patience
from .protocol import LARGEST_REPLY_KEY, MIB, MODEL_KEY, RUN_IS_OVER, SERVICE, channel_options
from .proxy import Letter, Seat, SharedArrays, StreamProxy
from .revoked import REVOKED
from .roster import Roster
from .system import allow_many_files
from .tls import ServerTls

_SPARE_STREAMS = 32  # for clients that are refused while all others are connected
_GRACE_SECONDS = 2.0
_HANDSHAKE_SECONDS = 10.0
_IDLE_SECONDS = 5.0  # of a connection without a stream; our clients open one at once
_SLACK_BYTES = 64 << 10  # of a reply, for errors and what users add to reports


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
    with_buffers = config.federation.buffers == "average"
    desk = Desk(
        config,
        roster,
        strategy.members,
        largest=largest_instruction(strategy.rule, strategy.model, with_buffers=with_buffers),
        tls=tls,
        token=token,
    )
    patience = Patience(config.federation, roster.waiting)
    largest = largest_reply(strategy.rule, strategy.model, config) + _SLACK_BYTES
    largest = min(largest, config.transport.max_message_mb * MIB)
    allow_many_files()
    model = json.dumps(strategy.announcement().to_config()).encode()
    servicer = _Servicer(desk, roster, patience, largest, model)
    server, port = _listen(servicer, roster, config, address, tls, largest)
    with _stopping_on_signals(desk), patience.watching():
        server.start()
        roster.is_open = True
        try:
            with quiet(), intra_op_threads(config.training.threads):
                on_listening(port)
                with _ClosingServer(desk, strategy, config.federation.most_clients) as loop:
                    loop.fit(num_rounds, config.federation.timeout_seconds)
                    desk.dismiss(awaits_all=num_rounds == 0)
        finally:
            roster.is_open = False
            desk.abandon()
            server.stop(_GRACE_SECONDS).wait()


class _ClosingServer(LeanServer):
    """Closes a round with the first replies, as many as the strategy's quota says, if it has one.

    Those that are late finish their work, and nobody takes what they send; meanwhile they are busy.
    """

    def __init__(self, desk: Desk, strategy: FederatedStrategy, num_clients: int) -> None:
        super().__init__(client_manager=desk, strategy=strategy)
        self.set_max_workers(num_clients)
        self._federated = strategy
        self._pool = futures.ThreadPoolExecutor(num_clients, thread_name_prefix="question")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False)

    def fit_round(self, server_round: int, timeout: float | None):  # type: ignore[no-untyped-def]
        quota = self._federated.quota
        if quota is None:
            return super().fit_round(server_round, timeout)
        asked = self.strategy.configure_fit(server_round, self.parameters, self._client_manager)
        for proxy, _ in asked:
            proxy.is_busy = True  # type: ignore[attr-defined]  # also until its thread begins
        questions = {
            self._pool.submit(proxy.fit, ins, timeout, server_round): proxy for proxy, ins in asked
        }
        results: list[tuple[ClientProxy, FitRes]] = []
        usable = 0
        for question in futures.as_completed(questions):
            answer = question.result()
            results.append((questions[question], answer))
            usable += self._federated.would_count(questions[question], answer)
            if usable == quota:
                break
        return *self.strategy.aggregate_fit(server_round, results, []), ([], [])


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
    servicer: _Servicer,
    roster: Roster,
    config: RunConfig,
    address: str,
    tls: ServerTls | None,
    largest: int,
) -> tuple[grpc.Server, int]:
    streams = config.federation.most_clients + _SPARE_STREAMS
    options = [
        *channel_options(config.transport.keep_alive_seconds, largest),
        # strangers must not use up the files that this process may open
        ("grpc.max_allowed_incoming_connections", streams),
        ("grpc.server_handshake_timeout_ms", int(1000 * _HANDSHAKE_SECONDS)),
        ("grpc.max_connection_idle_ms", int(1000 * _IDLE_SECONDS)),
    ]
    server = grpc.server(
        futures.ThreadPoolExecutor(streams, thread_name_prefix="stream"),
        handlers=(
            grpc.method_handlers_generic_handler(
                SERVICE,
                {"Join": grpc.stream_stream_rpc_method_handler(servicer.join, Letter, Letter.take)},
            ),
            open_health_handler(lambda: roster.is_open),
        ),
        options=options,
        maximum_concurrent_rpcs=streams,
    )
    try:
        if tls is None:
            return server, server.add_insecure_port(address)
        return server, server.add_secure_port(address, tls.credentials(roster.refused))
    except RuntimeError as error:
        raise ConfigError(
            f"--address: cannot listen at {address!r}: {error}; must be HOST:PORT of this machine, "
            "with a port that no other program uses"
        ) from None


class _Servicer:
    """Flower's servicer behind the desk."""

    def __init__(
        self, desk: Desk, roster: Roster, patience: Patience, largest: int, model: bytes
    ) -> None:
        self._desk = desk
        self._roster = roster
        self._patience = patience
        self._largest = largest  # bytes of a reply
        self._model = model  # an instruction, as JSON
        self._arrays = SharedArrays()

    def join(self, messages: Iterator[Letter], context: grpc.ServicerContext) -> Iterator[Letter]:
        try:
            seat = self._desk.seat(context)
        except Refused as refusal:
            if isinstance(refusal, TakesTooLittle):
                context.set_trailing_metadata(((MODEL_KEY, self._model),))
            if not refusal.is_expected:
                self._roster.refused(context.peer(), refusal.for_log)
            context.abort(refusal.code, str(refusal))
        seat.hang_up = context.cancel
        if not context.add_callback(lambda: self._desk.free(seat)):
            self._desk.free(seat)  # the stream ended before it began
            return
        context.send_initial_metadata(((LARGEST_REPLY_KEY, str(self._largest)),))
        flower = FlowerServiceServicer(
            self._desk,
            grpc_client_proxy_factory=lambda cid, bridge: StreamProxy(  # type: ignore[arg-type,return-value]
                cid, bridge, seat, self._arrays, self._roster, self._patience, self._largest
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

"""Who may join: one connection for each client id, tied to its certificate."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent import futures

import grpc
from flwr.server import SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.superlink.fleet.grpc_bidi.grpc_bridge import GrpcBridgeClosed

from ...algorithm import ClientId
from ...config.client_ids import certificate_covers
from ...config.run_config import RunConfig
from ...errors import RunError
from ...flower.members import Members
from ...problems import foreign_text
from .protocol import CLAIM, CLAIM_KEY, LONGEST_PAUSE_SECONDS, RUN_IS_OVER, Claim
from .proxy import Seat, StreamProxy
from .roster import Roster

_FAREWELL_SECONDS = 5.0
_POLL_SECONDS = 0.1
_RETRY_SECONDS = 1.5 * LONGEST_PAUSE_SECONDS  # after which a refused client has asked again


class Refused(Exception):
    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Desk(SimpleClientManager):
    """Lets clients in. Flower sees a client only once it has said who it is and what it holds."""

    def __init__(
        self, config: RunConfig, roster: Roster, members: Members, *, certified: bool
    ) -> None:
        super().__init__()
        self._federation = config.federation
        self._keep_alive = config.transport.keep_alive_seconds
        self._roster = roster
        self._certified = certified
        self._members = members
        self._lock_seats = threading.Lock()
        self._seats: dict[ClientId, Seat] = {}
        self._stateless: set[Claim] = set()  # clients that lost their state while connected
        self._waiting: dict[Claim, float] = {}  # when a client was last refused that asks again
        self.closed = False  # takes in no more
        self.finished = False  # because the run is over

    def seat(self, context: grpc.ServicerContext) -> Seat:
        """Give the caller the id that it claims, or raise Refused."""
        claimed = dict(context.invocation_metadata()).get(CLAIM_KEY, b"")
        try:
            claim = CLAIM.validate_json(claimed)
        except ValueError:
            reason = "this server speaks to `fedopt client`; no client id came"
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, reason) from None
        client_id = claim.client_id
        names = [n.decode() for n in context.auth_context().get("x509_common_name", [])]
        if self._certified and not any(certificate_covers(name, client_id) for name in names):
            reason = (
                f"client {client_id}: this certificate is for {', '.join(names) or 'nobody'}; use "
                f"the one made by `fedopt certs client {client_id}`"
            )
            raise Refused(grpc.StatusCode.PERMISSION_DENIED, reason)
        with self._lock_seats:
            earlier = self._seat_to_give_up(claim)
        if earlier is not None:
            self.free(earlier)
        with self._lock_seats:
            self._require_place(claim)
            seat = Seat(client_id, context.peer(), claim.instance)
            self._seats[client_id] = seat
            self._waiting.pop(claim, None)
        self._roster.joining(client_id, seat.peer)
        return seat

    def _seat_to_give_up(self, claim: Claim) -> Seat | None:
        """Return the connection with this id if it has lost its state and the caller may have it.

        The caller has not if it lost its own while it was connected. So each process takes the
        place of another at most once, and two without the state do not take turns for ever.
        """
        seat = self._seats.get(claim.client_id)
        if self.closed or seat is None or not seat.has_lost_state or claim in self._stateless:
            return None
        seat.ended_because = (
            "it lost its state, and another connection with this id, "
            "which may have it, took its place; stop one of the two"
        )
        return seat

    def _require_place(self, claim: Claim) -> None:
        client_id = claim.client_id
        count = self._federation.num_clients
        if self.finished:
            self._waiting.pop(claim, None)
            raise Refused(RUN_IS_OVER, "the run is over")
        if self.closed:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "the server is about to end")
        if client_id in self._seats:
            self._note_waiting(claim)
            reason = (
                f"client {client_id}: is connected from {self._seats[client_id].peer}; a second "
                f"one of that id must wait until the first is gone or was silent for "
                f"{self._keep_alive:g} s"
            )
            raise Refused(grpc.StatusCode.ALREADY_EXISTS, reason)
        if isinstance(client_id, int) and not 0 <= client_id < count:
            reason = f"client {client_id}: must be between 0 and {count - 1}; the run has {count}"
            raise Refused(grpc.StatusCode.OUT_OF_RANGE, reason)
        if self._members.ids and client_id not in self._members.ids:
            reason = f"client {client_id}: the run began without it, with {self._members.ids}"
            raise Refused(grpc.StatusCode.OUT_OF_RANGE, reason)
        kinds = {type(i) for i in self._seats}
        if kinds and type(client_id) not in kinds:
            reason = (
                f"client {client_id}: numbers and names do not mix; others are {[*self._seats]}"
            )
            raise Refused(grpc.StatusCode.OUT_OF_RANGE, reason)
        if len(self._seats) >= count:
            self._note_waiting(claim)
            reason = f"client {client_id}: all {count} places are taken by {[*self._seats]}"
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)

    def _note_waiting(self, claim: Claim) -> None:
        now = time.monotonic()
        recent = {c: at for c, at in self._waiting.items() if now < at + _RETRY_SECONDS}
        self._waiting = recent | {claim: now}

    def register(self, client: ClientProxy) -> bool:
        """Flower's servicer calls this when a stream is open: now the client introduces itself."""
        if isinstance(client, StreamProxy):
            client.seat.proxy = client
            threading.Thread(target=self._introduce, args=(client,), daemon=True).start()
        return True

    def _introduce(self, proxy: StreamProxy) -> None:
        client_id = proxy.seat.client_id
        try:
            own_id, count = self._members.introduction(proxy)
            problem = None if own_id == client_id else f"it then called itself {own_id!r}"
        except GrpcBridgeClosed:
            return
        except RunError as error:
            problem = str(error)
            proxy.seat.ended_because = foreign_text(problem)
        except Exception as error:  # bytes that are no answer
            problem = f"its introduction cannot be read: {type(error).__name__}: {error}"
        if problem is not None:
            self._roster.refused(f"client {client_id}", problem)
            proxy.bridge.close()
            return
        self._roster.ready(client_id, count)
        super().register(proxy)
        if proxy.seat.left:  # while it was introduced
            super().unregister(proxy)

    def unregister(self, client: ClientProxy) -> None:
        """Flower's servicer calls this when a stream ends; `free` has done the work by then."""

    def free(self, seat: Seat) -> None:
        """Forget a connection that is over."""
        with self._lock_seats:
            if seat.left:
                return
            seat.left = True
            del self._seats[seat.client_id]
            if seat.has_lost_state:
                self._stateless.add(Claim(seat.client_id, seat.instance))
        seat.turn.release()
        if seat.proxy is not None:
            seat.proxy.bridge.close()
            super().unregister(seat.proxy)
        if not self.closed:
            self._roster.away(seat.client_id, seat.ended_because)

    def dismiss(self) -> None:
        """Tell all clients to leave, and take in no more; those that were refused and ask again
        hear of it when they do."""
        self.closed = self.finished = True
        with self._lock_seats:
            proxies = [seat.proxy for seat in self._seats.values() if seat.proxy is not None]
        if proxies:
            with futures.ThreadPoolExecutor(len(proxies)) as pool:
                list(pool.map(lambda proxy: proxy.leave(_FAREWELL_SECONDS), proxies))
        with contextlib.suppress(KeyboardInterrupt):  # the run is over; its results come next
            while self._expects_refused_clients():
                time.sleep(_POLL_SECONDS)

    def _expects_refused_clients(self) -> bool:
        now = time.monotonic()
        with self._lock_seats:
            return any(now < refused + _RETRY_SECONDS for refused in self._waiting.values())

    def abandon(self) -> None:
        """Close all connections, whatever they are doing; who waits for an answer hears of it."""
        self.closed = True
        with self._lock_seats:
            proxies = [seat.proxy for seat in self._seats.values() if seat.proxy is not None]
        for proxy in proxies:
            proxy.bridge.close()

"""Who may join: one connection for each client id, tied to its certificate."""

from __future__ import annotations

import contextlib
import hmac
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
from .protocol import (
    CLAIM_KEY,
    LONGEST_PAUSE_SECONDS,
    MIB,
    RUN_IS_OVER,
    UNKNOWN_MODEL_BYTES,
    Claim,
    read_claim,
)
from .proxy import Seat, StreamProxy
from .revoked import REVOKED, RevokedList, peer_certificate
from .roster import Roster
from .tls import ServerTls

_FAREWELL_SECONDS = 5.0
_BUSY_SECONDS = 30.0  # for clients whose round closed without them, to hear that the run is over
_POLL_SECONDS = 0.1
_RETRY_SECONDS = 1.5 * LONGEST_PAUSE_SECONDS  # after which a refused client has asked again
_COMMON_NAME = "x509_common_name"
_NO_SUCH_KIND = grpc.StatusCode.NOT_FOUND  # not final: a client comes back from it


class Refused(Exception):
    """Its text is for the caller, who may be anyone; `details` are for the server's log alone."""

    def __init__(self, code: grpc.StatusCode, reason: str, details: str = "") -> None:
        super().__init__(reason)
        self.code = code
        self.for_log = f"{reason} ({details})" if details else reason
        self.is_expected = code == RUN_IS_OVER  # and so not logged


class TakesTooLittle(Refused):
    """The caller returns once it has built the model, and so knows how large messages may be."""

    def __init__(self, reason: str, *, knows_no_model: bool) -> None:
        super().__init__(grpc.StatusCode.OUT_OF_RANGE, reason)
        self.is_expected = knows_no_model


class Desk(SimpleClientManager):
    """Lets clients in. Flower sees a client only once it has said who it is and what it holds.

    Its clients must take messages of `largest` bytes.
    """

    def __init__(
        self,
        config: RunConfig,
        roster: Roster,
        members: Members,
        *,
        largest: int,
        tls: ServerTls | None,
        token: str,
    ) -> None:
        super().__init__()
        self._largest = largest
        self._federation = config.federation
        self._keep_alive = config.transport.keep_alive_seconds
        self._roster = roster
        self._certified = tls is not None and tls.client_ca is not None
        self._revoked: RevokedList | None = None
        if tls is not None and tls.client_ca is not None and tls.revoked is not None:
            self._revoked = RevokedList(tls.revoked, tls.client_ca, roster.refused)
        self._token = token
        self._members = members
        self._lock_seats = threading.Lock()
        self._seats: dict[ClientId, Seat] = {}
        # `who` of clients that lost their state while connected
        self._stateless: set[tuple[ClientId, str]] = set()
        # when one was last refused that asks again
        self._waiting: dict[tuple[ClientId, str], float] = {}
        self.closed = False  # takes in no more
        self.finished = False  # because the run is over

    def seat(self, context: grpc.ServicerContext) -> Seat:
        """Give the caller the id that it claims, or raise Refused."""
        certificate = peer_certificate(context)
        serial = None if certificate is None else certificate.serial_number
        claim = self._credible_claim(context, serial)
        with self._lock_seats:
            earlier = self._seat_to_give_up(claim)
        if earlier is not None:
            self.free(earlier)
        with self._lock_seats:
            self._require_place(claim)
            self._require_room(claim)
            seat = Seat(claim.client_id, context.peer(), claim.instance, serial)
            self._seats[claim.client_id] = seat
            self._waiting.pop(claim.who, None)
        ends = None if certificate is None else certificate.not_valid_after_utc
        self._roster.joining(claim.client_id, seat.peer, ends)
        return seat

    def _credible_claim(self, context: grpc.ServicerContext, serial: int | None) -> Claim:
        """Return who the caller says it is if its token and certificate allow that."""
        try:
            claim = read_claim(dict(context.invocation_metadata()).get(CLAIM_KEY, b""))
        except ValueError as error:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
        known = hmac.compare_digest(claim.token.encode(), self._token.encode())
        if self._token and not known:
            reason = "this server takes only the clients that its own `fedopt launch` started"
            raise Refused(grpc.StatusCode.PERMISSION_DENIED, reason)
        client_id = claim.client_id
        names = [n.decode(errors="replace") for n in context.auth_context().get(_COMMON_NAME, [])]
        if self._certified and not any(certificate_covers(name, client_id) for name in names):
            reason = (
                f"client {client_id}: this certificate is for "
                f"{foreign_text(', '.join(names)) or 'nobody'}; use the one made by "
                f"`fedopt certs client {client_id}`"
            )
            raise Refused(grpc.StatusCode.PERMISSION_DENIED, reason)
        if self._is_revoked(serial):
            raise Refused(grpc.StatusCode.PERMISSION_DENIED, f"client {client_id}: {REVOKED}")
        return claim

    def _seat_to_give_up(self, claim: Claim) -> Seat | None:
        """Return the connection with this id if it has lost its state and the caller may have it.

        The caller has not if it lost its own while it was connected. So each process takes the
        place of another at most once, and two without the state do not take turns for ever.
        """
        seat = self._seats.get(claim.client_id)
        if self.closed or seat is None or not seat.has_lost_state:
            return None
        if claim.who in self._stateless:
            return None
        seat.ended_because = (
            "it lost its state, and another connection with this id, "
            "which may have it, took its place; stop one of the two"
        )
        return seat

    def _require_place(self, claim: Claim) -> None:
        client_id, who = claim.client_id, f"client {claim.client_id}"
        count, kind = self._federation.most_clients, self._federation.client_ids
        is_open = self._federation.is_open
        if self.finished:
            self._waiting.pop(claim.who, None)
            raise Refused(RUN_IS_OVER, "the run is over")
        if self.closed:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "the server is about to end")
        if isinstance(client_id, int) is not (kind == "numbers"):
            self._note_waiting(claim.who)
            reason = f"{who}: ids are {kind} in this federation (federation.client_ids)"
            raise Refused(_NO_SUCH_KIND, reason)
        if isinstance(client_id, int) and client_id >= count and not is_open:
            reason = f"{who}: must be between 0 and {count - 1}; the run has {count}"
            raise Refused(grpc.StatusCode.OUT_OF_RANGE, reason)
        if self._members.ids and client_id not in self._members.ids and not is_open:
            details = f"with {self._members.ids}"
            reason = f"{who}: the run began without it"
            raise Refused(grpc.StatusCode.OUT_OF_RANGE, reason, details)
        if client_id in self._seats:
            self._note_waiting(claim.who)
            reason = (
                f"{who}: is connected; a second one of that id must wait until the first is gone "
                f"or was silent for {self._keep_alive:g} s"
            )
            details = f"the first is at {self._seats[client_id].peer}"
            raise Refused(grpc.StatusCode.ALREADY_EXISTS, reason, details)
        if len(self._seats) >= count:
            self._note_waiting(claim.who)
            details = f"by {[*self._seats]}"
            reason = f"{who}: all {count} places are taken"
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, reason, details)

    def _require_room(self, claim: Claim) -> None:
        """Send away who could not read this run's messages; it returns once it can."""
        if claim.takes < self._largest:
            reason = (
                f"client {claim.client_id}: messages of this run have up to {self._largest:,} "
                f"bytes; it takes {claim.takes:,}; set transport.max_message_mb to "
                f"{-(-self._largest // MIB)} or more on it, or give it the server's model"
            )
            raise TakesTooLittle(reason, knows_no_model=claim.takes == UNKNOWN_MODEL_BYTES)

    def _note_waiting(self, who: tuple[ClientId, str]) -> None:
        """Remember who will ask again, the oldest first, and forget the oldest in time."""
        now = time.monotonic()
        self._waiting.pop(who, None)
        self._waiting[who] = now
        oldest = next(iter(self._waiting))
        if now >= self._waiting[oldest] + _RETRY_SECONDS:
            del self._waiting[oldest]

    def _is_revoked(self, serial: int | None) -> bool:
        return self._revoked is not None and self._revoked.refuses(serial)

    def num_available(self) -> int:
        """Count the clients that can be asked; those revoked since they joined leave before it, and
        so do those whose stream was ended, which gRPC may not yet have noticed."""
        with self._lock_seats:
            seats = [*self._seats.values()]
        for seat in seats:
            if self._is_revoked(seat.serial):
                seat.ended_because = REVOKED
                self.free(seat)
            elif seat.is_to_return:
                self.free(seat)
        return super().num_available()

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
            same = type(own_id) is type(client_id) and own_id == client_id  # True is no 1
            problem = None if same else f"it then called itself {own_id!r}"
        except GrpcBridgeClosed:
            return
        except RunError as error:
            problem = str(error)
            proxy.seat.ended_because = foreign_text(problem)
        except Exception as error:  # bytes that are no answer
            problem = f"its introduction cannot be read: {type(error).__name__}: {error}"
        if problem is not None:
            problem = foreign_text(problem)
            self._roster.refused(f"client {client_id}", problem)
            proxy.bridge.close()
            return
        super().register(proxy)  # before anything is shown
        self._roster.ready(client_id, count)
        if proxy.seat.left:  # while it was introduced
            super().unregister(proxy)
            self._note_leaving(proxy.seat)

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
                self._stateless.add((seat.client_id, seat.instance))
            if seat.is_to_return:  # it must hear it if the run is over by then
                self._note_waiting((seat.client_id, seat.instance))
        seat.turn.release()
        if seat.proxy is not None:
            seat.proxy.bridge.close()
            super().unregister(seat.proxy)
        if not self.closed:
            self._note_leaving(seat)

    def _note_leaving(self, seat: Seat) -> None:
        is_member = seat.client_id in self._members.ids
        self._roster.away(seat.client_id, seat.ended_because, forget=not is_member)

    def dismiss(self, *, awaits_all: bool) -> None:
        """Tell all clients to leave, and take in no more; those that were refused and ask again
        hear of it when they do. With `awaits_all`, wait for those that may not have been here."""
        self.closed = self.finished = True
        late = time.monotonic() + (_RETRY_SECONDS if awaits_all else 0.0)
        with self._lock_seats:
            proxies = [seat.proxy for seat in self._seats.values() if seat.proxy is not None]
        patience = time.monotonic() + _BUSY_SECONDS
        with contextlib.suppress(KeyboardInterrupt):  # the run is over; its results come next
            while any(proxy.is_busy for proxy in proxies) and time.monotonic() < patience:
                time.sleep(_POLL_SECONDS)
        if proxies:
            with futures.ThreadPoolExecutor(len(proxies)) as pool:
                said = [pool.submit(proxy.leave, _FAREWELL_SECONDS) for proxy in proxies]
                if futures.wait(said, 2 * _FAREWELL_SECONDS).not_done:  # one takes nothing in
                    self.abandon()
                for farewell in said:
                    farewell.result()
        with contextlib.suppress(KeyboardInterrupt):  # the run is over; its results come next
            while time.monotonic() < late or self._expects_refused_clients():
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

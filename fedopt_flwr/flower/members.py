"""Who is in the federation: Flower's connections, known by the ids that clients give themselves."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from flwr.common import Code, GetPropertiesIns
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy

from ..algorithm import ClientId
from ..config.sections import FederationSection
from ..errors import FedoptWarning, RunError
from ..rounds.sampling import sorted_ids
from .messages import Scalar

_POLL_SECONDS = 0.05
_Answer = TypeVar("_Answer")


class Members:
    """Connections by client id. Each connection is asked once for its id and example count."""

    def __init__(
        self, federation: FederationSection, while_waiting: Callable[[], None] = lambda: None
    ) -> None:
        self._patience = federation.start_timeout  # s that a connection has to say who it is
        # what a client must know before it can say how many examples it has
        self.facts: dict[str, Scalar] = {
            "num_clients": federation.num_clients,
            "seed": federation.seed,
        }
        self.max_workers: int | None = None  # connections asked at the same time; None: all
        self._while_waiting = while_waiting  # may raise, to end the wait
        self._ids: dict[str, ClientId] = {}  # Flower's connection id -> client id
        self._proxies: dict[ClientId, ClientProxy] = {}
        self._ask_again: dict[str, float] = {}  # when those that did not say who they are
        self.num_examples: dict[ClientId, int] = {}
        self.ids: list[ClientId] = []  # all N, in the order of `sorted_ids`

    def discover(self, manager: ClientManager, num_clients: int, timeout: float) -> None:
        """Wait until N clients are connected; ask who they are. RunError names the missing."""
        self.gather(manager, num_clients, timeout, "federation.num_clients")
        self.ids = sorted_ids(list(self._proxies))
        if len(self.ids) != num_clients:
            raise RunError(
                f"federation.num_clients: got {num_clients}; {len(self.ids)} clients with "
                f"different ids are connected: {self.ids}; give each its own id"
            )

    def gather(self, manager: ClientManager, needed: int, timeout: float, field: str) -> None:
        """Wait until so many clients are connected; RunError names `field`, which wants them."""
        deadline = time.monotonic() + timeout
        while manager.num_available() < needed:
            self._while_waiting()
            if time.monotonic() > deadline:
                self.refresh(manager)
                raise RunError(
                    f"{field}: only {len(self._proxies)} of {needed} clients were connected within "
                    f"{timeout:g} s: {sorted(map(str, self._proxies))}"
                    f"{_missing(self._proxies, self.ids or range(needed))}; start those, "
                    "ask for fewer or raise federation.start_timeout"
                )
            time.sleep(_POLL_SECONDS)
        self.refresh(manager)

    def refresh(self, manager: ClientManager) -> None:
        """Ask connections that are new; forget those that are gone.

        Once all N are known, one that does not say who it is counts as away, and is asked again
        after `start_timeout`; before, it is a RunError.
        """
        connected = dict(manager.all())
        now = time.monotonic()
        new = {
            cid: proxy
            for cid, proxy in connected.items()
            if cid not in self._ids and now >= self._ask_again.get(cid, now)
        }
        for cid, answer in ask_all(new.items(), self._ask, self.max_workers).items():
            if isinstance(answer, Exception):
                text = f"connection {cid}: did not tell its client id: {answer}"
                if not self.ids:
                    raise RunError(
                        f"{text}; fix that client, start without it, or raise "
                        "federation.start_timeout"
                    )
                self._ask_again[cid] = time.monotonic() + self._patience
                warnings.warn(f"{text}; the run continues without it", FedoptWarning, stacklevel=2)
                continue
            self._ids[cid] = answer[0]
            self.num_examples[answer[0]] = answer[1]
        self._ids = {cid: client_id for cid, client_id in self._ids.items() if cid in connected}
        self._proxies = {client_id: connected[cid] for cid, client_id in self._ids.items()}

    def _ask(self, proxy: ClientProxy) -> tuple[ClientId, int]:
        reply = proxy.get_properties(GetPropertiesIns(self.facts), self._patience, group_id=0)
        if reply.status.code != Code.OK:
            raise RunError(reply.status.message)
        client_id = reply.properties.get("client_id")
        count = reply.properties.get("num_examples")
        if not isinstance(client_id, (int, str)) or not isinstance(count, int) or count < 1:
            raise RunError(
                f"it answered client_id {client_id!r} and num_examples {count!r}; the id must be a "
                "number or a name, and every client needs at least one example"
            )
        return client_id, count

    def id_of(self, proxy: ClientProxy) -> ClientId:
        """Return the client id behind a connection."""
        return self._ids[proxy.cid]

    def connected(self, client_id: ClientId) -> ClientProxy | None:
        """Return the connection of a client, or None while it is away."""
        return self._proxies.get(client_id)


def _missing(present: Iterable[ClientId], wanted: Iterable[ClientId]) -> str:
    ids = set(present)
    missing = [str(i) for i in wanted if i not in ids]
    return f", missing {', '.join(missing)}" if all(isinstance(i, int) for i in ids) else ""


def ask_all(
    proxies: Iterable[tuple[str, ClientProxy]],
    question: Callable[[ClientProxy], _Answer],
    max_workers: int | None = None,
) -> dict[str, _Answer | Exception]:
    """Ask all connections, at once unless limited; what one raises is its answer."""
    pending = list(proxies)

    def ask(item: tuple[str, ClientProxy]) -> _Answer | Exception:
        try:
            return question(item[1])
        except Exception as error:
            return error

    if max_workers == 1 or not pending:
        return {item[0]: ask(item) for item in pending}
    with ThreadPoolExecutor(max_workers=max_workers or len(pending)) as pool:
        return {
            cid: answer for (cid, _), answer in zip(pending, pool.map(ask, pending), strict=True)
        }

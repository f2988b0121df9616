"""Who is in the federation: Flower's connections, known by the ids that clients give themselves."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal, TypeVar

from flwr.common import Code, GetPropertiesIns
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy

from ..algorithm import ClientId
from ..config.sections import FederationSection
from ..errors import FedoptWarning, RunError
from ..rounds.sampling import sorted_ids

_POLL_SECONDS = 0.05
_Key = TypeVar("_Key", str, ClientId)
_Answer = TypeVar("_Answer")


class Members:
    """Connections by client id. Each connection is asked once for its id and example count.

    `known` are all clients of a run that is resumed, with the examples that they had: no other may
    join, and none with another number.
    """

    def __init__(
        self,
        federation: FederationSection,
        while_waiting: Callable[[], None],
        known: Mapping[ClientId, int],
    ) -> None:
        self._federation = federation
        # what a client must know before it can say how many examples it has
        self._facts = GetPropertiesIns(
            {"num_clients": federation.num_clients, "seed": federation.seed}
        )
        self.max_workers: int | None = None  # connections asked at the same time; None: all
        self._while_waiting = while_waiting  # may raise, to end the wait
        self._ids: dict[str, ClientId] = {}  # Flower's connection id -> client id
        self._proxies: dict[ClientId, ClientProxy] = {}
        self._ask_again: dict[str, float] = {}  # when those that did not say who they are
        self._known = known
        self.num_examples: dict[ClientId, int] = dict(known)
        self.ids: list[ClientId] = list(known)  # all N, in the order of `sorted_ids`

    def discover(self, manager: ClientManager) -> None:
        """Wait until N clients are connected; ask who they are. RunError names the missing.

        A run that is resumed goes on without those that have not come within `start_timeout`, if
        `min_replies` are there.
        """
        if self._known:
            self._find_again(manager)
            return
        self.gather(manager, "num_clients")
        self.ids = sorted_ids(list(self._proxies))
        if len(self.ids) != self._federation.num_clients:
            raise RunError(
                f"federation.num_clients: got {self._federation.num_clients}; {len(self.ids)} "
                f"clients with different ids are connected: {self.ids}; give each its own id"
            )

    def _find_again(self, manager: ClientManager) -> None:
        federation = self._federation
        deadline = time.monotonic() + federation.start_timeout
        self.refresh(manager)
        while len(self._proxies) < len(self.ids) and time.monotonic() < deadline:
            self._while_waiting()
            time.sleep(_POLL_SECONDS)
            self.refresh(manager)
        missing = ", ".join(str(i) for i in self.ids if i not in self._proxies)
        here = f"{len(self._proxies)} of the run's {len(self.ids)} clients"
        if len(self._proxies) < federation.min_replies:
            raise RunError(
                f"--resume: only {here} were connected within {federation.start_timeout:g} s, "
                f"missing {missing}; federation.min_replies is {federation.min_replies}; start "
                "those, ask for fewer or raise federation.start_timeout"
            )
        if missing:
            text = (
                f"--resume: the run goes on with {here}, without {missing}, which may come later; "
                "from here on its bits may differ from those of an undisturbed run"
            )
            warnings.warn(text, FedoptWarning, stacklevel=2)

    def gather(self, manager: ClientManager, field: Literal["num_clients", "min_replies"]) -> None:
        """Wait until as many clients are connected as this field says; RunError names it."""
        needed: int = getattr(self._federation, field)
        timeout = self._federation.start_timeout
        deadline = time.monotonic() + timeout
        while manager.num_available() < needed:
            self._while_waiting()
            if time.monotonic() > deadline:
                self.refresh(manager)
                missing = ""
                if all(isinstance(i, int) for i in self._proxies):
                    ids = [str(i) for i in self.ids or range(needed) if i not in self._proxies]
                    missing = f", missing {', '.join(ids)}"
                raise RunError(
                    f"federation.{field}: only {len(self._proxies)} of {needed} clients were "
                    f"connected within {timeout:g} s: {sorted(map(str, self._proxies))}"
                    f"{missing}; start those, ask for fewer or raise federation.start_timeout"
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
            cid: partial(self.introduction, proxy)
            for cid, proxy in connected.items()
            if cid not in self._ids and now >= self._ask_again.get(cid, now)
        }
        for cid, answer in ask_all(new, self.max_workers).items():
            if isinstance(answer, Exception):
                text = f"connection {cid}: did not tell its client id: {answer}"
                if not self.ids:
                    raise RunError(
                        f"{text}; fix that client, start without it, or raise "
                        "federation.start_timeout"
                    )
                self._ask_again[cid] = time.monotonic() + self._federation.start_timeout
                warnings.warn(f"{text}; the run continues without it", FedoptWarning, stacklevel=2)
                continue
            self._ids[cid] = answer[0]
            self.num_examples[answer[0]] = answer[1]
        self._ids = {cid: client_id for cid, client_id in self._ids.items() if cid in connected}
        self._proxies = {client_id: connected[cid] for cid, client_id in self._ids.items()}

    def introduction(self, proxy: ClientProxy) -> tuple[ClientId, int]:
        """Ask a connection for its id and number of examples; RunError if they are of no use."""
        reply = proxy.get_properties(self._facts, self._federation.start_timeout, group_id=0)
        if reply.status.code != Code.OK:
            raise RunError(reply.status.message)
        client_id = reply.properties.get("client_id")
        count = reply.properties.get("num_examples")
        if not isinstance(client_id, (int, str)) or not isinstance(count, int) or count < 1:
            raise RunError(
                f"it answered client_id {client_id!r} and num_examples {count!r}; the id must be a "
                "number or a name, and every client needs at least one example"
            )
        before = self._known.get(client_id, count)
        if count != before:
            raise RunError(
                f"client {client_id} holds {count} examples and held {before} when the checkpoint "
                "was made; give it the same data, or start a new run"
            )
        return client_id, count

    def id_of(self, proxy: ClientProxy) -> ClientId:
        """Return the client id behind a connection."""
        return self._ids[proxy.cid]

    def connected(self, client_id: ClientId) -> ClientProxy | None:
        """Return the connection of a client, or None while it is away."""
        return self._proxies.get(client_id)


def ask_all(
    questions: Mapping[_Key, Callable[[], _Answer]], max_workers: int | None
) -> dict[_Key, _Answer | Exception]:
    """Ask all at once, unless limited; what a question raises is its answer."""

    def ask(question: Callable[[], _Answer]) -> _Answer | Exception:
        try:
            return question()
        except Exception as error:
            return error

    if max_workers == 1 or not questions:
        return {key: ask(question) for key, question in questions.items()}
    with ThreadPoolExecutor(max_workers or len(questions)) as pool:
        return dict(zip(questions, pool.map(ask, questions.values()), strict=True))

"""Who is in the federation: Flower's connections, known by the ids that clients give themselves."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, TypeVar

from flwr.common import Code, FitIns, FitRes, GetPropertiesIns
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy

from ..algorithm import ClientId
from ..config.client_ids import is_client_id
from ..config.run_config import RunConfig
from ..config.sections import Facts
from ..errors import FedoptWarning, RunError
from ..problems import foreign_text
from ..rounds.sampling import sorted_ids

_POLL_SECONDS = 0.05
_ASK_AGAIN_SECONDS = 5.0  # after a connection did not say who it is


class NeverIntroducedError(RunError):
    """A client cannot say who it is, however often it is asked."""


_Key = TypeVar("_Key", str, ClientId)
_Answer = TypeVar("_Answer")


class Members:
    """Connections by client id. Each connection is asked once for its id and example count.

    `known` are all clients of a run that is resumed, with the examples that they had: no other may
    join, and none with another number, unless the federation is open.
    """

    def __init__(
        self,
        config: RunConfig,
        while_waiting: Callable[[], None],
        known: Mapping[ClientId, int],
    ) -> None:
        self._federation = config.federation
        self._most_examples = config.limits.examples
        # what a client must know before it can say how many examples it has
        facts = config.federation.model_dump(include=set(Facts.model_fields))
        self._facts = GetPropertiesIns(facts)
        self.max_workers: int | None = None  # connections asked at the same time; None: all
        self._while_waiting = while_waiting  # may raise, to end the wait
        self._ids: dict[str, ClientId] = {}  # Flower's connection id -> client id
        self._proxies: dict[ClientId, ClientProxy] = {}
        self._ask_again: dict[str, float] = {}  # when those that did not say who they are
        self._mute: dict[str, NeverIntroducedError] = {}  # connections of which none ever will
        self._known = known
        self.num_examples: dict[ClientId, int] = dict(known)
        self.ids: list[ClientId] = list(known)  # all N, in the order of `sorted_ids`

    @property
    def here(self) -> list[ClientId]:
        """Who is connected, in the order of `sorted_ids`."""
        return sorted_ids(list(self._proxies))

    def discover(
        self, manager: ClientManager, expected: Collection[ClientId] | None = None
    ) -> None:
        """Wait until N clients are connected (`min_clients` of an open federation); ask who they
        are. RunError names the missing.

        A run that is resumed waits for those `expected` (all), and continues without them after
        `start_timeout` if `min_replies` are there.
        """
        if self._known:
            self._find_again(manager, self.ids if expected is None else expected)
            return
        self.gather(manager, "min_clients" if self._federation.is_open else "num_clients")
        self.ids = self.here
        self._known = {i: self.num_examples[i] for i in self.ids}

    def _find_again(self, manager: ClientManager, expected: Collection[ClientId]) -> None:
        federation = self._federation
        deadline = time.monotonic() + federation.start_timeout
        self.refresh(manager)
        while not self._proxies.keys() >= set(expected) and time.monotonic() < deadline:
            self._while_waiting()
            time.sleep(_POLL_SECONDS)
            self.refresh(manager)
        missing = ", ".join(str(i) for i in expected if i not in self._proxies)
        here = f"{len(self._proxies)} of the run's {len(self.ids)} clients"
        if len(self._proxies) < federation.min_replies:
            raise RunError(
                f"--resume: only {here} were connected within {federation.start_timeout:g} s, "
                f"missing {missing}; federation.min_replies is {federation.min_replies}; start "
                "those, ask for fewer or raise federation.start_timeout"
            )
        if missing:
            text = (
                f"--resume: the run continues with {here}, without {missing}, which may come "
                "later; from here on its bits may differ from those of an undisturbed run"
            )
            warnings.warn(text, FedoptWarning, stacklevel=2)

    def gather(
        self,
        manager: ClientManager,
        field: Literal["num_clients", "min_clients", "min_replies"],
    ) -> None:
        """Wait until as many clients as this field says are connected and have said who they are;
        RunError names it."""
        federation = self._federation
        is_round = field == "min_replies"
        needed = federation.min_replies if is_round else federation.clients_to_start
        timeout = self._federation.start_timeout
        deadline = time.monotonic() + timeout
        while not self._are_here(manager, needed, field):
            self._while_waiting()
            if time.monotonic() > deadline:
                self.refresh(manager)
                if len(self._proxies) >= needed:
                    return
                raise RunError(
                    f"federation.{field}: only {len(self._proxies)} of {needed} clients were "
                    f"connected within {timeout:g} s: {sorted(map(str, self._proxies))}"
                    f"{self._missing(needed)}; start those, ask for fewer or raise "
                    "federation.start_timeout"
                )
            time.sleep(_POLL_SECONDS)

    def _are_here(self, manager: ClientManager, needed: int, field: str) -> bool:
        if manager.num_available() < needed:
            return False
        self.refresh(manager)
        may_come = self._proxies or self.ids or self._federation.is_open
        if not may_come and self._mute.keys() >= manager.all().keys():
            raise RunError(
                f"federation.{field}: none of the {len(self._mute)} clients that are connected can "
                f"say who it is: {next(iter(self._mute.values()))}"
            )
        if len(self._proxies) < needed <= len(self._ids) and not self.ids:
            raise RunError(
                f"federation.{field}: got {needed}; {len(self._proxies)} clients with "
                f"different ids are connected: {sorted_ids(list(self._proxies))}; give each its "
                "own id"
            )
        return len(self._proxies) >= needed

    def _missing(self, needed: int) -> str:
        if self._federation.is_open or not all(isinstance(i, int) for i in self._proxies):
            return ""
        ids = [str(i) for i in self.ids or range(needed) if i not in self._proxies]
        return f", missing {foreign_text(', '.join(ids))}"

    def refresh(self, manager: ClientManager) -> None:
        """Ask connections that are new; forget those that are gone.

        One that does not say who it is counts as away. It is asked again after some seconds, or as
        long as it took to fail, so that one that never answers takes at most half of the time; one
        that never will say it, after `start_timeout`.
        """
        connected = dict(manager.all())
        now = time.monotonic()
        new = {
            cid: partial(self.introduction, proxy)
            for cid, proxy in connected.items()
            if cid not in self._ids and now >= self._ask_again.get(cid, now)
        }
        answers, timeout = ask_all(new, self.max_workers), self._federation.start_timeout
        told = time.monotonic()
        pause = min(timeout, max(_ASK_AGAIN_SECONDS, told - now))
        for cid, answer in answers.items():
            if isinstance(answer, Exception):
                self._ask_again[cid] = told + pause
                if isinstance(answer, NeverIntroducedError):
                    self._mute[cid] = answer
                    self._ask_again[cid] = told + timeout
                warnings.warn(
                    f"connection {cid}: did not tell its client id: {foreign_text(answer)}; it "
                    "counts as away; fix that client",
                    FedoptWarning,
                    stacklevel=2,
                )
                continue
            self._ids[cid] = answer[0]
            self.num_examples[answer[0]] = answer[1]
        self._ids = {cid: client_id for cid, client_id in self._ids.items() if cid in connected}
        self._proxies = {client_id: connected[cid] for cid, client_id in self._ids.items()}

    def introduction(self, proxy: ClientProxy) -> tuple[ClientId, int]:
        """Ask a connection for its id and number of examples; RunError if they are of no use."""
        reply = proxy.get_properties(self._facts, self._federation.start_timeout, group_id=0)
        if reply.status.code != Code.OK:
            raise RunError(foreign_text(reply.status.message))
        client_id: Any = reply.properties.get("client_id")
        count: Any = reply.properties.get("num_examples")
        if not is_client_id(client_id):
            raise RunError(
                f"it answered client_id {foreign_text(repr(client_id), 80)}; must be a number of "
                "at least 0, or a name"
            )
        if type(count) is not int or not 1 <= count <= self._most_examples:
            raise RunError(
                f"it answered num_examples {foreign_text(repr(count), 80)}; must be between 1 and "
                f"limits.examples ({self._most_examples}); look at its data, or raise "
                "limits.examples on the server"
            )
        if self.ids and type(client_id) is not type(self.ids[0]):
            raise RunError(
                f"it calls itself {foreign_text(repr(client_id), 80)}; the run's clients are "
                f"{foreign_text(repr(self.ids[0]), 80)} and the like; give it an id of that kind"
            )
        before = self._known.get(client_id, count)
        if count != before and not self._federation.is_open:
            raise RunError(
                f"client {client_id} holds {count} examples and held {before} when the run began; "
                "give it the same data, or start a new run"
            )
        return client_id, count

    def id_of(self, proxy: ClientProxy) -> ClientId:
        """Return the client id behind a connection."""
        return self._ids[proxy.cid]

    def client_at(self, cid: str) -> ClientId:
        """Return the client id behind a connection, or its own where it never told one."""
        return self._ids.get(cid, cid)

    def await_free(self, manager: ClientManager, needed: int) -> None:
        """Wait while fewer clients than needed are free and others are at work for earlier rounds;
        `federation.round_timeout` ends that, or who comes back."""
        while sum(map(self.is_free, self._proxies)) < needed and any(
            getattr(proxy, "is_busy", False) for proxy in self._proxies.values()
        ):
            self._while_waiting()
            time.sleep(_POLL_SECONDS)
            self.refresh(manager)

    def is_free(self, client_id: ClientId) -> bool:
        """Whether a client is connected and not at work for a round that closed without it."""
        proxy = self._proxies.get(client_id)
        return proxy is not None and not getattr(proxy, "is_busy", False)

    def ask(
        self, instructions: Sequence[tuple[ClientProxy, FitIns]]
    ) -> dict[ClientId, FitRes | Exception]:
        """Ask clients outside of Flower's loop, all at once, and return what each answered."""
        timeout = self._federation.timeout_seconds
        questions = {
            self.id_of(proxy): partial(proxy.fit, ins, timeout, 0) for proxy, ins in instructions
        }
        return ask_all(questions, self.max_workers)

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

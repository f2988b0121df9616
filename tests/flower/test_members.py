"""Who is found before the start, also of a run that is resumed, as clients come and leave."""

from __future__ import annotations

import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.common import Code, GetPropertiesRes, Status
from flwr.server import SimpleClientManager

from fedopt_flwr import RunConfig
from fedopt_flwr.engines.pairs import ForeignProxy
from fedopt_flwr.errors import FedoptWarning, RunError
from fedopt_flwr.flower.members import Members

KNOWN = {0: 12, 1: 9, 2: 5}


def config(num_clients: int, **federation: Any) -> RunConfig:
    return RunConfig(
        federation={"num_clients": num_clients, "clients_per_round": num_clients, **federation}
    )


def connect(manager: SimpleClientManager, client_id: int, num_examples: int) -> None:
    facts: Any = {"client_id": client_id, "num_examples": num_examples}
    answer = GetPropertiesRes(Status(Code.OK, ""), facts)
    client: Any = SimpleNamespace(get_properties=lambda ins: answer)
    manager.register(ForeignProxy(f"{client_id}-{num_examples}", client))


def resumed(min_replies: int = 1, start_timeout: float = 0.2) -> Members:
    return Members(
        config(3, min_replies=min_replies, start_timeout=start_timeout), lambda: None, known=KNOWN
    )


def test_all_of_a_resumed_run_are_not_waited_for_any_longer() -> None:
    manager, members = SimpleClientManager(), resumed(start_timeout=60)
    for client_id, count in KNOWN.items():
        connect(manager, client_id, count)
    started = time.monotonic()
    members.discover(manager)
    assert time.monotonic() - started < 5
    assert (members.ids, members.num_examples) == ([0, 1, 2], KNOWN)


def test_a_resumed_run_goes_on_with_some_and_takes_in_the_others_when_they_come() -> None:
    manager, members = SimpleClientManager(), resumed(min_replies=2)
    connect(manager, 2, 5)
    connect(manager, 0, 12)
    with pytest.warns(FedoptWarning, match="with 2 of the run.s 3 clients, without 1, wh"):
        members.discover(manager)
    assert (members.ids, members.num_examples) == ([0, 1, 2], KNOWN)
    assert members.connected(1) is None
    connect(manager, 1, 9)
    members.gather(manager, "min_replies")
    assert members.connected(1) is not None


def test_a_resumed_run_needs_as_many_as_a_round_needs() -> None:
    manager, members = SimpleClientManager(), resumed(min_replies=2)
    connect(manager, 1, 9)
    text = (
        r"--resume: only 1 of the run's 3 clients were connected within 0.2 s, missing 0, 2; "
        r"federation.min_replies is 2; start those"
    )
    with pytest.raises(RunError, match=text):
        members.discover(manager)


def test_a_client_with_other_data_is_away_and_ends_nothing() -> None:
    manager, members = SimpleClientManager(), resumed()
    connect(manager, 0, 13)
    connect(manager, 1, 9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        members.discover(manager)
    refused, *_, missing = [str(w.message) for w in caught]
    assert "client 0 holds 13 examples and held 12 when the run began; give" in refused
    assert "without 0, 2, which may come later" in missing
    assert members.num_examples == KNOWN
    connect(manager, 0, 12)
    members.refresh(manager)
    assert [members.connected(i) is not None for i in range(3)] == [True, True, False]


def test_a_client_that_comes_back_with_other_data_is_away() -> None:
    manager, members = SimpleClientManager(), Members(config(2), lambda: None, {})
    connect(manager, 0, 12)
    connect(manager, 1, 9)
    members.discover(manager)
    manager.unregister(manager.all()["1-9"])
    connect(manager, 1, 3)
    with pytest.warns(FedoptWarning, match="client 1 holds 3 examples and held 9 when the run be"):
        members.refresh(manager)
    assert members.connected(1) is None
    assert members.num_examples == {0: 12, 1: 9}


class Client:
    """A connection, as far as `Members` knows one."""

    def __init__(self, cid: str, client_id: int) -> None:
        self.cid, self._client_id = cid, client_id

    def get_properties(self, *_: Any, **__: Any) -> GetPropertiesRes:
        facts = {"client_id": self._client_id, "num_examples": 5}
        return GetPropertiesRes(Status(Code.OK, ""), facts)


class Leaky(SimpleClientManager):
    """Counts a client that has left when the list is asked for the first time."""

    def __init__(self, *clients: Client) -> None:
        super().__init__()
        self._asked = 0
        for client in clients:
            self.register(client)  # type: ignore[arg-type]

    def all(self) -> dict[str, Any]:
        self._asked += 1
        clients = dict(super().all())
        if self._asked == 1:
            del clients["b"]
        return clients


def test_a_client_that_left_after_it_was_counted_is_waited_for() -> None:
    members = Members(config(2, start_timeout=20), lambda: None, known={})
    members.discover(Leaky(Client("a", 0), Client("b", 1)))
    assert members.ids == [0, 1]


def test_two_connections_of_one_id_are_no_reason_to_wait() -> None:
    manager = SimpleClientManager()
    for cid in ("a", "b"):
        manager.register(Client(cid, 0))  # type: ignore[arg-type]
    with pytest.raises(RunError, match="1 clients with different ids are connected"):
        Members(config(2, start_timeout=1000), lambda: None, known={}).discover(manager)

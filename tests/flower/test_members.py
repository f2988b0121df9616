"""Who is found before the start, by a manager that loses clients at the worst moment."""

from __future__ import annotations

from typing import Any

import pytest
from flwr.common import Code, GetPropertiesRes, Status
from flwr.server import SimpleClientManager

from fedopt_flwr.config.sections import FederationSection
from fedopt_flwr.errors import RunError
from fedopt_flwr.flower.members import Members


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
    federation = FederationSection(num_clients=2, clients_per_round=2, start_timeout=20)
    members = Members(federation, while_waiting=lambda: None)
    members.discover(Leaky(Client("a", 0), Client("b", 1)))
    assert members.ids == [0, 1]


def test_two_connections_of_one_id_are_no_reason_to_wait() -> None:
    federation = FederationSection(num_clients=2, clients_per_round=2, start_timeout=1000)
    manager = SimpleClientManager()
    for cid in ("a", "b"):
        manager.register(Client(cid, 0))  # type: ignore[arg-type]
    with pytest.raises(RunError, match="1 clients with different ids are connected"):
        Members(federation, while_waiting=lambda: None).discover(manager)

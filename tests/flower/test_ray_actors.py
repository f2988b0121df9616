"""Our pool of Ray's processes, as Flower uses it, where machines are lost; no Ray runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend
from ray.exceptions import OutOfMemoryError, RayActorError, RuntimeEnvSetupError

from fedopt_flwr.engines import ray_actors


class Machine:
    """A machine with room for processes; `errors` are those of the next ones that start on it."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.is_lost = False
        self.errors: list[Exception] = []


class Future:
    """What a call of an actor gives."""

    def __init__(self, actor: Actor, reply: Any = None) -> None:
        self.actor = actor
        self.reply = reply


class Actor:
    """A process of Ray's."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.error = machine.errors.pop(0) if machine.errors else None
        self.is_slow = False
        self.trained: list[str] = []
        self.__ray_ready__ = SimpleNamespace(remote=lambda: Future(self))
        self.run = SimpleNamespace(remote=self._run)

    def _run(self, app: Any, message: str, cid: str, context: Any) -> Future:
        self.trained.append(message)
        return Future(self, (cid, f"reply to {message}", context))


class Cluster:
    """Machines in the order in which they are filled with processes, and what Ray's calls do."""

    def __init__(self, *rooms: int) -> None:
        self.machines = [Machine(room) for room in rooms]
        self.actors: list[Actor] = []

    def options(self, **resources: float) -> Cluster:
        return self

    def remote(self) -> Actor:
        taken = [a.machine for a in self.actors if a.error is None]
        living = [m for m in self.machines if not m.is_lost]
        machine = next(m for m in living if taken.count(m) < m.room)
        self.actors.append(Actor(machine))
        return self.actors[-1]

    def room(self, resources: dict[str, float]) -> int:
        return sum(machine.room for machine in self.machines if not machine.is_lost)

    def get(self, future: Any) -> Any:
        if future.actor.machine.is_lost:
            raise RayActorError
        if future.actor.error:
            raise future.actor.error
        return future.reply

    def wait(self, futures: list[Any], num_returns: int = 1, timeout: float = 0) -> Any:
        return [future for future in futures if not future.actor.is_slow], []


def backend_on(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> RayBackend:
    monkeypatch.setattr("ray.get", cluster.get)
    monkeypatch.setattr("ray.wait", cluster.wait)
    for module in ("flwr.simulation.ray_transport.ray_actor", ray_actors.__name__):
        monkeypatch.setattr(f"{module}.pool_size_from_resources", cluster.room)
    backend = RayBackend.__new__(RayBackend)
    backend.app_fn = lambda: None  # type: ignore[assignment, return-value]
    backend.pool = ray_actors.LastingPool(cluster, {"num_cpus": 1}, {})
    backend.pool.add_actors_to_pool(backend.pool.actors_capacity)
    return backend


def reply(backend: RayBackend, message: str) -> Any:
    context: Any = SimpleNamespace(node_config={"partition-id": 0})
    return backend.process_message(message, context)[0]  # type: ignore[arg-type]


def test_a_machine_that_is_lost_with_several_idle_processes_costs_no_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(2, 3)
    backend = backend_on(cluster, monkeypatch)
    cluster.machines[1].is_lost = True  # the last ones, which are used first
    assert reply(backend, "first") == "reply to first"
    assert backend.pool is not None
    assert backend.pool.num_actors == 2
    assert {id(actor) for actor in backend.pool.pool} == {id(a) for a in cluster.actors[:2]}
    assert [len(actor.trained) for actor in cluster.actors] == [0, 1, 0, 0, 1]


@pytest.mark.parametrize("error", [RayActorError(), OutOfMemoryError("no memory is left")])
def test_a_process_that_dies_at_a_message_is_used_no_more(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    cluster = Cluster(2)
    backend = backend_on(cluster, monkeypatch)
    cluster.actors[1].error = error
    assert [reply(backend, text) for text in "abc"] == [f"reply to {text}" for text in "abc"]
    assert cluster.actors[1].trained == ["a"]


def test_an_idle_process_that_is_slow_to_answer_is_used_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(2, 1)
    backend = backend_on(cluster, monkeypatch)
    cluster.machines[1].is_lost = True
    cluster.actors[1].is_slow = True
    assert reply(backend, "first") == "reply to first"
    assert backend.pool is not None
    assert backend.pool.pool == [cluster.actors[0]]
    cluster.actors[1].is_slow = False
    backend.pool.pool.clear()  # as while that one trains
    assert reply(backend, "second") == "reply to second"
    assert cluster.actors[1].trained == ["second"]
    assert len(cluster.actors) == 3, "one was started in place of one that lives"


def test_processes_that_cannot_start_are_tried_again_and_then_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(1, 1)
    backend = backend_on(cluster, monkeypatch)
    cluster.machines[1].is_lost = True
    cluster.actors[0].error = RayActorError()
    cluster.machines[0].errors = [RuntimeEnvSetupError("no folder") for _ in range(2)]
    assert reply(backend, "first") == "reply to first"
    cluster.actors[-1].error = RayActorError()
    cluster.machines[0].errors = [RuntimeEnvSetupError("no folder") for _ in range(3)]
    with pytest.raises(RuntimeEnvSetupError, match="no folder"):
        reply(backend, "second")
    assert reply(backend, "third") == "reply to third"
    assert backend.pool is not None
    assert backend.pool.num_actors == 1


def test_three_that_fail_to_start_at_once_count_as_three(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(3)
    backend = backend_on(cluster, monkeypatch)
    for actor in cluster.actors:
        actor.error = RayActorError()
    cluster.machines[0].errors = [RuntimeEnvSetupError("no folder") for _ in range(3)]
    with pytest.raises(RuntimeEnvSetupError, match="no folder"):
        reply(backend, "first")


def test_a_message_of_a_run_that_is_over_waits_for_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(1)
    backend = backend_on(cluster, monkeypatch)
    cluster.actors[0].error = RayActorError()
    cluster.machines[0].is_lost = True
    pool: Any = backend.pool
    pool.end()
    with pytest.raises(RuntimeError, match="the simulation is over"):
        reply(backend, "first")


def test_where_nothing_starts_a_message_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(1)
    backend = backend_on(cluster, monkeypatch)
    monkeypatch.setattr(ray_actors, "_START_SECONDS", 1)
    cluster.actors[0].error = RayActorError()
    monkeypatch.setattr("ray.wait", lambda *_, **__: ([], []))
    with pytest.raises(TimeoutError, match="has started no process in 1 s"):
        reply(backend, "first")

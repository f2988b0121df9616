"""Processes on Ray that come and go: a machine or a process that is lost does not end a run."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import ray
from flwr.server.superlink.fleet.vce.backend import raybackend
from flwr.simulation.ray_transport.ray_actor import BasicActorPool, pool_size_from_resources
from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError, RayError

# the actor, by itself or for its memory, or its reply with the machine
_LOST = (RayActorError, OutOfMemoryError, ObjectLostError)
_PING_SECONDS = 5.0  # idle actors answer within milliseconds; one that does not is used later
_START_ATTEMPTS = 3  # that fail while a message waits, before it fails with them
_START_SECONDS = 300  # of waiting while there is no actor but those that are starting


class LastingPool(BasicActorPool):
    """Flower's pool of actors, which hands on a message whose actor died, and lets that actor go.

    Flower's own puts it back, on top, where it fails at once all messages that it is given: after
    the loss of one machine of two, hardly a client of any later round is trained. A message that
    is handed on has the same reply, as a client's state changes only with its reply.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._changed = threading.Condition()
        self._jobs: dict[Any, Any] = {}  # by their future
        self._starting: dict[Any, Any] = {}  # actors in place of lost ones, by what is ready then
        self._is_over = False

    def submit(self, actor_fn: Any, job: Any) -> Any:
        """Give a message to an idle actor, once there is one, and return its future.

        What keeps actors from starting is raised where there is no other to wait for.
        """
        failed = seconds = 0
        with self._changed:
            while not self.pool:  # there is a thread for each actor that there was at the start
                if self._is_over:
                    raise RuntimeError("the simulation is over")
                errors = self._make_up_for_lost()
                failed += len(errors)
                is_alone = self.num_actors == len(self._starting)
                seconds = seconds + 1 if is_alone else 0
                if errors and is_alone and failed >= _START_ATTEMPTS:
                    raise errors[-1]
                if seconds > _START_SECONDS:
                    raise TimeoutError(f"Ray has started no process in {_START_SECONDS} s")
                self._changed.wait_for(lambda: self.pool, timeout=1.0)
            future = super().submit(actor_fn, job)
            self._jobs[future] = (actor_fn, job)
            return future

    def end(self) -> None:
        """Wait for no actor any more: those of a run that was stopped never come back."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def fetch_result_and_return_actor_to_pool(self, future: Any) -> Any:
        """Return reply and context; the loss of the actor is raised where a second one is lost."""
        job = self._jobs.pop(future)
        try:
            return super().fetch_result_and_return_actor_to_pool(future)
        except _LOST:
            self._let_go(future)
        again = self.submit(*job)
        del self._jobs[again]
        try:
            return super().fetch_result_and_return_actor_to_pool(again)
        except _LOST:
            self._let_go(again)
            raise
        except Exception:
            self.add_actor_back_to_pool(again)  # Flower knows only the first one
            raise

    def add_actor_back_to_pool(self, future: Any) -> None:
        with self._changed:
            if future in self._future_to_actor:  # not one that was let go
                super().add_actor_back_to_pool(future)
                self._changed.notify()

    def _let_go(self, future: Any) -> None:
        """Forget an actor that was lost, and the idle ones that were lost with its machine."""
        with self._changed:
            del self._future_to_actor[future]
            self.num_actors -= 1
            actors: list[Any] = self.pool
            idle = {actor.__ray_ready__.remote(): actor for actor in actors}
            self.pool.clear()
            self._starting |= idle
            if idle:
                ray.wait([*idle], num_returns=len(idle), timeout=_PING_SECONDS)
            self._use_those_that_started()
            self._changed.notify_all()

    def _make_up_for_lost(self) -> list[RayError]:
        """Use actors that started meanwhile, and start more where the machines have room.

        Returns why others did not start; ValueError where no machine has room for any.
        """
        errors = self._use_those_that_started()
        room = min(self.actors_capacity, pool_size_from_resources(self.client_resources))
        for _ in range(room - self.num_actors):
            actor = self.create_actor_fn()
            self._starting[actor.__ray_ready__.remote()] = actor
            self.num_actors += 1
        return errors

    def _use_those_that_started(self) -> list[RayError]:
        errors = []
        for ready, actor in list(self._starting.items()):
            if ray.wait([ready], timeout=0)[0]:
                del self._starting[ready]
                try:
                    ray.get(ready)
                    self.pool.append(actor)
                except RayError as error:  # as where its runtime environment cannot be made
                    errors.append(error)
                    self.num_actors -= 1
        return errors


@contextlib.contextmanager
def replacing_lost_actors() -> Iterator[None]:
    """Let Flower's simulation use this pool meanwhile; it lets nobody choose one."""
    name = "BasicActorPool"
    own = getattr(raybackend, name)
    made: list[LastingPool] = []
    at_end = signal.getsignal(signal.SIGTERM)

    def make(*arguments: Any, **options: Any) -> LastingPool:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, at_end)  # Ray's own, set when it started, aborts
        made.append(LastingPool(*arguments, **options))
        return made[-1]

    setattr(raybackend, name, make)
    try:
        yield
    finally:
        setattr(raybackend, name, own)
        for pool in made:
            pool.end()

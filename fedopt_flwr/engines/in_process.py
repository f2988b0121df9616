"""Flower's own server loop with clients that are called directly, in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from flwr.common import (
    Code,
    FitIns,
    FitRes,
    GetPropertiesIns,
    GetPropertiesRes,
    Status,
)
from flwr.server import History, SimpleClientManager
from flwr.server.client_proxy import ClientProxy

from ..flower import ClientStates, FederatedClient, FederatedStrategy
from ..flower.messages import NEVER, PHASE, ArraysInMemory, to_arrays
from ..flower.threads import intra_op_threads
from .common import LeanServer, NeverAsked, quiet

_OK = Status(Code.OK, "")


def run_in_process(
    strategy: FederatedStrategy,
    clients: Sequence[FederatedClient],
    states: ClientStates,
    *,
    num_rounds: int,
    workers: int = 1,
    round_timeout: float | None = None,
    threads: int = 1,
) -> None:
    """Run `num_rounds` rounds of `strategy` over `clients`, which all keep state in `states`.

    `workers` clients train at the same time. A client that raises is a failure of that client; one
    that takes longer than `round_timeout` seconds is not interrupted, but its reply is not counted.
    Intra-op threads and the level of Flower's logger are set for the run and restored afterwards.
    """
    manager = SimpleClientManager()
    slots = _UploadSlots()
    for number, client in enumerate(clients):
        manager.register(_DirectProxy(str(number), client, slots))
    server = _PruningServer(strategy, manager, states, slots)
    server.set_max_workers(workers)
    strategy.set_max_workers(workers)
    with quiet(), intra_op_threads(threads):
        server.fit(num_rounds, round_timeout)


class _UploadSlots:
    """Memory that a round's uploads are copied into and that the next round writes to again.

    Without it each upload stays where the client allocated it, between that client's temporaries;
    the allocator does not find such gaps a second use, and memory grows from round to round.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[tuple[int, ...], str], list[np.ndarray]] = {}
        self._used: list[np.ndarray] = []

    def keep(self, array: np.ndarray) -> np.ndarray:
        free = self._free.setdefault((array.shape, array.dtype.str), [])
        source = torch.from_numpy(array)
        slot = free.pop() if free else torch.empty_like(source).numpy()
        torch.from_numpy(slot).copy_(source)
        self._used.append(slot)
        return slot

    def release(self) -> None:
        for slot in self._used:
            self._free[(slot.shape, slot.dtype.str)].append(slot)
        self._used.clear()


class _DirectProxy(NeverAsked, ClientProxy):
    """Flower's view of a client of this process: arrays are passed on, never turned into bytes."""

    def __init__(self, cid: str, client: FederatedClient, slots: _UploadSlots) -> None:
        super().__init__(cid)
        self._client = client
        self._slots = slots

    def get_properties(
        self, ins: GetPropertiesIns, timeout: float | None, group_id: int | None
    ) -> GetPropertiesRes:
        return GetPropertiesRes(_OK, self._client.get_properties(ins.config))

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        started = time.perf_counter()
        arrays, num_examples, report = self._client.fit(to_arrays(ins.parameters), ins.config)
        seconds = time.perf_counter() - started
        if timeout is not None and seconds > timeout:
            late = f"answered after {seconds:.1f} s; federation.round_timeout is {timeout:g} s"
            report = {"error": late}
        if ins.config[PHASE] == "train":  # uploads of the start pass are the states themselves
            arrays = [self._slots.keep(array) for array in arrays]
        parameters = ArraysInMemory(arrays)
        return FitRes(_OK, parameters, num_examples, report)


class _PruningServer(LeanServer):
    """Also lets go of outdated client states and of the memory of uploads."""

    def __init__(
        self,
        strategy: FederatedStrategy,
        manager: SimpleClientManager,
        states: ClientStates,
        slots: _UploadSlots,
    ) -> None:
        super().__init__(client_manager=manager, strategy=strategy)
        self._federated = strategy
        self._states = states
        self._slots = slots

    def fit(self, num_rounds: int, timeout: float | None) -> tuple[History, float]:
        result = super().fit(num_rounds, timeout)
        self._prune()
        return result

    def fit_round(self, server_round: int, timeout: float | None):  # type: ignore[no-untyped-def]
        self._prune()  # only now: until it is evaluated, a round may be taken back
        if self.max_workers == 1:
            result = self._fit_in_this_thread(server_round, timeout)
        else:
            result = super().fit_round(server_round, timeout)
        self._slots.release()
        return result

    def _prune(self) -> None:
        for client_id in self._federated.asked:
            self._states.prune(client_id, {self._federated.versions.get(client_id, NEVER)})

    def _fit_in_this_thread(self, server_round: int, timeout: float | None):  # type: ignore[no-untyped-def]
        """Train one after another here, so that aggregating finds the memory that training freed;
        the C library would keep it for a training thread of its own."""
        asked = self.strategy.configure_fit(server_round, self.parameters, self._client_manager)
        results: list[tuple[ClientProxy, FitRes]] = []
        failures: list[tuple[ClientProxy, FitRes] | BaseException] = []
        for proxy, ins in asked:
            try:
                results.append((proxy, proxy.fit(ins, timeout, server_round)))
            except Exception as error:
                failures.append(error)
        return *self.strategy.aggregate_fit(server_round, results, failures), ([], [])

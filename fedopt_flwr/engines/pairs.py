"""Flower's loop over anyone's strategy and clients, in this process."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.client import Client
from flwr.common import Code, FitIns, FitRes
from flwr.server import Server, SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import Strategy

from ..errors import RunError
from ..flower import FederatedStrategy
from ..flower.messages import to_arrays
from .common import quiet


def _passed_on(name: str) -> Any:
    """Return a method of Flower's ClientProxy that asks the client at once."""
    return lambda proxy, ins, timeout, group_id: getattr(proxy.client, name)(ins)


class ForeignProxy(ClientProxy):
    """One client of this process; an exception in it is what Flower's loop would see of it."""

    def __init__(self, cid: str, client: Client) -> None:
        super().__init__(cid)
        self.client = client
        self.failure = ""  # of the last `fit` that went wrong

    get_properties = _passed_on("get_properties")
    get_parameters = _passed_on("get_parameters")
    evaluate = _passed_on("evaluate")
    reconnect = _passed_on("reconnect")  # no client has it: in process nothing is disconnected

    def fit(self, ins: FitIns, *_: object, **__: object) -> FitRes:
        try:
            result = self.client.fit(ins)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise
        reported = result.metrics.get("error")  # how clients of this package fail
        if result.status.code != Code.OK or isinstance(reported, str):
            self.failure = str(reported or result.status.message)
        return result


class _AllHere(SimpleClientManager):
    """All clients of the run are connected from the first; nothing is worth waiting for."""

    def wait_for(self, num_clients: int, timeout: int = 0) -> bool:
        if num_clients > self.num_available():
            raise RunError(
                f"the strategy waits for {num_clients} clients; the {self.num_available()} of this "
                "run are all connected: min_available_clients must be num_clients at most"
            )
        return True


def run_pair(
    strategy: Strategy, clients: Sequence[Client], num_rounds: int, *, may_fail: bool = False
) -> list[np.ndarray]:
    """Return the server's arrays, in state_dict order, after so many rounds over the clients.

    Clients are asked one after another: they may share what one process has once, as torch's
    global generator is, and NumPy's reader of arrays is not safe in threads with every CPython
    (gh-106905). Raises RunError where the strategy leaves the loop with no arrays, and, unless
    clients `may_fail`, where `fit` of one went wrong, which the loop would continue without.
    """
    manager = _AllHere()
    proxies = [ForeignProxy(str(number), client) for number, client in enumerate(clients)]
    for proxy in proxies:
        manager.register(proxy)
    server = Server(client_manager=manager, strategy=strategy)
    server.set_max_workers(1)
    if isinstance(strategy, FederatedStrategy):
        strategy.set_max_workers(1)
    with quiet(logging.CRITICAL):
        server.fit(num_rounds, None)
    for proxy in proxies:
        if proxy.failure and not may_fail:
            raise RunError(f"a client's fit failed: {proxy.failure}")
    if not server.parameters.tensors:
        raise RunError("the strategy ends with no parameters")
    return to_arrays(server.parameters)

"""Where training starts in users' own apps, and that the user's threads change nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Message
from flwr.clientapp import ClientApp
from rooms import Room
from torch import nn
from torch.utils.data import TensorDataset

from fedopt_flwr import clientapp, clients, serverapp, strategies
from fedopt_flwr.algorithm import ServerState
from fedopt_flwr.engines.pairs import run_pair

SIZES: dict[str, Any] = {"num_clients": 2, "clients_per_round": 2, "local_steps": 2}
WIDTH, CLASSES = 2000, 50


def wide_model() -> nn.Module:
    """100,050 parameters: dot products of so many depend on the number of threads."""
    torch.manual_seed(0)
    return nn.Linear(WIDTH, CLASSES)


def wide_data(client: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(client)
    inputs = torch.randn(8, WIDTH, generator=generator)
    return TensorDataset(inputs, torch.randint(0, CLASSES, (8,), generator=generator))


@contextlib.contextmanager
def threads_kept() -> Iterator[None]:
    """A client sets its own number of threads, which where it is another process is not ours."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Apart(Room):
    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        with threads_kept():
            return super().send_and_receive(messages, timeout=timeout)


class ApartClient(clients.AutoFedClient):
    def fit(self, parameters: Any, config: Any) -> Any:
        with threads_kept():
            return super().fit(parameters, config)


def make_app(model: Callable[[], nn.Module], data: Callable[[int], Any]) -> ClientApp:
    app = ClientApp()

    @app.query()
    @app.train()
    def train(message: Message, context: Any) -> Message:
        own = {"model": model(), "dataset": data(context.node_config["partition-id"])}
        return clientapp.train(message, context, device="cpu", **own)

    @app.evaluate()
    def evaluate(message: Message, context: Any) -> Message:
        own = {"model": model(), "dataset": data(context.node_config["partition-id"])}
        return clientapp.evaluate(message, context, device="cpu", **own)

    return app


def state_bytes(state: ServerState) -> dict[str, bytes]:
    return {name: vector.numpy().tobytes() for name, vector in state.vectors.items()}


def by_message() -> dict[str, bytes]:
    strategy = serverapp.AutoFed(wide_model(), **SIZES)
    arrays = ArrayRecord(wide_model().state_dict())
    strategy.start(Apart(make_app(wide_model, wide_data), count=2), arrays, num_rounds=4)
    return state_bytes(strategy._inner.state)


def by_pair() -> dict[str, bytes]:
    strategy = strategies.AutoFed(wide_model(), **SIZES, num_rounds=4)
    own = [
        ApartClient(wide_model(), wide_data(i), client_id=i, device="cpu").to_client()
        for i in range(2)
    ]
    run_pair(strategy, own, 4)
    return state_bytes(strategy.state)


@pytest.mark.parametrize("run", [by_message, by_pair])
def test_the_threads_of_a_users_program_change_no_bit(run: Callable[[], dict[str, bytes]]) -> None:
    found = []
    with threads_kept():
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(run())
            assert torch.get_num_threads() == number
    assert found[0] == found[1]

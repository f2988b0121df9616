"""Where training starts in users' own apps, and that the user's threads change nothing."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.clientapp import ClientApp
from helpers import as_datasets, linear_model, softmax_clients
from rooms import Room
from torch import nn
from torch.utils.data import TensorDataset

from fedopt_flwr import ConfigError, clientapp, clients, serverapp, strategies
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


def small_data(client: int) -> TensorDataset:
    return as_datasets(softmax_clients([9, 14]))[client]


def half_bfloat16() -> nn.Module:
    """A frozen base in bfloat16 and a head that is trained."""
    torch.manual_seed(0)
    base = nn.Linear(4, 4, dtype=torch.bfloat16).requires_grad_(False)
    return nn.Sequential(Cast(torch.bfloat16), base, Cast(torch.float32), linear_model())


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.to(self.dtype)


def test_a_base_in_bfloat16_is_evaluated_everywhere() -> None:
    strategy = serverapp.ScaffoldM(half_bfloat16(), fraction_evaluate=1.0, **SIZES)
    seen = []

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        model = half_bfloat16()
        model.load_state_dict(arrays.to_torch_state_dict())
        seen.append(model.state_dict())
        return MetricRecord({"loss": 1.0})

    room = Room(make_app(half_bfloat16, small_data), count=2)
    state = half_bfloat16().state_dict()
    result = strategy.start(room, state, num_rounds=2, evaluate_fn=evaluate)
    assert [*result.arrays] == [*state]
    assert [r.failures for r in strategy.rounds] == [0, 0, 0]
    assert result.evaluate_metrics_clientapp[2]["loss"] > 0
    assert torch.equal(seen[-1]["1.weight"], state["1.weight"])
    assert not torch.equal(seen[-1]["3.weight"], state["3.weight"])
    again = serverapp.ScaffoldM(half_bfloat16(), **SIZES)
    again.start(room, result.arrays, num_rounds=1)  # float32 there, of the same values
    assert again._inner.model.module[1].weight.dtype == torch.bfloat16


def compiled_model() -> nn.Module:
    return torch.compile(linear_model(), backend="eager")


def test_a_compiled_module_starts_from_the_names_of_the_plain_one() -> None:
    found = []
    start = {name: value + 0.5 for name, value in linear_model().state_dict().items()}
    for server in (linear_model, compiled_model):
        for client in (linear_model, compiled_model):
            strategy = serverapp.PAdaMFed(server(), fraction_evaluate=1.0, **SIZES)
            room = Room(make_app(client, small_data), count=2)
            result = strategy.start(room, ArrayRecord(start), num_rounds=2)
            assert [r.failures for r in strategy.rounds] == [0, 0, 0]
            assert [*result.arrays] == [*server().state_dict()]
            server().load_state_dict(result.arrays.to_torch_state_dict())
            found.append([array.tobytes() for array in result.arrays.to_numpy_ndarrays()])
            loss = result.evaluate_metrics_clientapp[2]["loss"]
            found[-1].append(str(loss).encode())
    assert found == [found[0]] * 4


def test_weights_and_other_initial_arrays_are_refused_together() -> None:
    room = Room(make_app(linear_model, small_data), count=2)
    own = linear_model().state_dict()
    given = {name: torch.full_like(value, 0.5) for name, value in own.items()}
    still = {**SIZES, "client_learning_rate": 1e-9}
    strategy = serverapp.FedAvg(linear_model(), weights=given, **still)
    result = strategy.start(room, ArrayRecord(own), num_rounds=1)
    for array in result.arrays.to_numpy_ndarrays():
        np.testing.assert_allclose(array, 0.5, atol=1e-6)
    with pytest.raises(ConfigError, match=r"^initial_arrays: got others than the model's own, and"):
        strategy.start(room, ArrayRecord(given), num_rounds=1)


@pytest.mark.parametrize("given", [None, [torch.zeros(3)], linear_model()])
def test_initial_arrays_of_another_type_are_refused(given: Any) -> None:
    strategy = serverapp.FedAvg(linear_model(), **SIZES)
    text = f"initial_arrays: got an object of type {type(given).__name__}; must be a state_dict, or"
    with pytest.raises(ConfigError, match=re.escape(text)):
        strategy.start(Room(make_app(linear_model, small_data)), given, num_rounds=1)

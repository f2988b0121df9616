"""Checks of any Flower strategy with its client, seen from outside, through Flower's own loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from ..engines.pairs import run_pair
from .checks import Outcome, require, run_check

_CLIENTS = 4
_FEATURES = 4
_CLASSES = 3
NumPyArrays = list[np.ndarray]


class Pair:
    """`make_strategy(model, num_clients=, clients_per_round=, num_rounds=)` and
    `make_client(model, dataset, client_id=)`, on softmax regression with unlike clients."""

    def __init__(self, make_strategy: Callable[..., Any], make_client: Callable[..., Any]) -> None:
        self._make_strategy = make_strategy
        self._make_client = make_client

    def run(
        self,
        num_rounds: int,
        *,
        order: Sequence[int] = range(_CLIENTS),
        mirrored: int | None = None,
        broken: int | None = None,
    ) -> NumPyArrays:
        """Return the server's arrays; one client may have other data, one may always raise."""
        strategy = self._make_strategy(
            _model(), num_clients=_CLIENTS, clients_per_round=_CLIENTS, num_rounds=num_rounds
        )
        clients = []
        for i in order:
            inputs, targets = _data(i)
            if i == mirrored:
                inputs = -inputs
            client = self._make_client(_model(), TensorDataset(inputs, targets), client_id=i)
            if i == broken:
                client.fit = _raise
            clients.append(client.to_client())
        return run_pair(strategy, clients, num_rounds, may_fail=broken is not None)


def _model() -> nn.Module:
    model = nn.Linear(_FEATURES, _CLASSES)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter))
    return model


def _data(client: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(client)
    inputs = torch.randn(16, _FEATURES, generator=generator) + 0.5 * client
    targets = torch.randint(0, _CLASSES, (16,), generator=generator)
    return inputs, torch.where(torch.arange(16) < 10, client % _CLASSES, targets)


def _raise(*arguments: object) -> Any:
    raise OSError("this client is meant to fail")


def mean_loss(arrays: NumPyArrays) -> float:
    """Return the mean cross-entropy over all clients' data."""
    weight, bias = (torch.tensor(array, dtype=torch.float32) for array in arrays)
    losses = [
        functional.cross_entropy(x @ weight.T + bias, y) for x, y in map(_data, range(_CLIENTS))
    ]
    return float(torch.stack(losses).mean())


def _check_run(pair: Pair) -> None:
    arrays = pair.run(3)
    expected = [tuple(value.shape) for value in _model().state_dict().values()]
    found = [array.shape for array in arrays]
    require(found == expected, f"the arrays at the end have shapes {found}, the model {expected}")
    require(all(np.isfinite(a).all() for a in arrays), "the arrays at the end are not finite")


def _check_loss(pair: Pair) -> None:
    before = mean_loss([p.detach().numpy() for p in _model().parameters()])
    after = mean_loss(pair.run(20))
    require(after < before, f"the mean loss goes from {before:.4f} to {after:.4f} in 20 rounds")


def _check_again(pair: Pair) -> None:
    _require_close(pair.run(4), pair.run(4), "a second run ends elsewhere")


def _check_order(pair: Pair) -> None:
    _require_close(pair.run(4), pair.run(4, order=(2, 0, 3, 1)), "another order ends elsewhere")


def _require_close(one: NumPyArrays, other: NumPyArrays, text: str) -> None:
    gap = max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))
    require(gap < 1e-5, f"{text}: by {gap:.3g}")


def _check_every_client(pair: Pair) -> None:
    plain = pair.run(2)
    for client in range(_CLIENTS):
        other = pair.run(2, mirrored=client)
        same = all(np.allclose(a, b, atol=1e-6) for a, b in zip(plain, other, strict=True))
        require(not same, f"other data at client {client} change nothing")


def _check_failure(pair: Pair) -> None:
    before = mean_loss([p.detach().numpy() for p in _model().parameters()])
    after = mean_loss(pair.run(20, broken=1))
    require(after < before, f"with one client failing, the loss ends at {after:.4f}: no progress")


_CHECKS: tuple[tuple[str, Callable[[Pair], None]], ...] = (
    ("a run ends with the model's arrays", _check_run),
    ("the mean loss falls", _check_loss),
    ("the same run gives the same result", _check_again),
    ("the order of clients does not matter", _check_order),
    ("every client counts", _check_every_client),
    ("a client that fails stops nobody", _check_failure),
)


def verify_pair(
    make_strategy: Callable[..., Any], make_client: Callable[..., Any]
) -> list[Outcome]:
    """Return the outcome of every check for a Flower strategy and client."""
    pair = Pair(make_strategy, make_client)
    return [run_check(name, partial(run, pair)) for name, run in _CHECKS]

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
Run = Callable[..., list[np.ndarray]]  # `_run` of one pair


def _run(
    make_strategy: Callable[..., Any],
    make_client: Callable[..., Any],
    num_rounds: int,
    *,
    order: Sequence[int] = range(_CLIENTS),
    mirrored: int | None = None,
    broken: int | None = None,
) -> list[np.ndarray]:
    """Return the server's arrays after softmax regression with unlike clients, of which one may
    have other data and one always raise."""
    strategy = make_strategy(
        _model(), num_clients=_CLIENTS, clients_per_round=_CLIENTS, num_rounds=num_rounds
    )
    clients = []
    for i in order:
        inputs, targets = _data(i)
        dataset = TensorDataset(-inputs if i == mirrored else inputs, targets)
        client = make_client(_model(), dataset, client_id=i)
        if i == broken:
            client.fit = _raise
        clients.append(client.to_client())
    return run_pair(strategy, clients, num_rounds, may_fail=broken is not None)


def _model() -> nn.Module:
    model = nn.Linear(_FEATURES, _CLASSES)
    for parameter in model.parameters():
        parameter.data = torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter)
    return model


def _data(client: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(client)
    inputs = torch.randn(16, _FEATURES, generator=generator) + 0.5 * client
    targets = torch.randint(0, _CLASSES, (16,), generator=generator)
    return inputs, torch.where(torch.arange(16) < 10, client % _CLASSES, targets)


def _raise(*arguments: object) -> Any:
    raise OSError("this client is meant to fail")


def _mean_loss(model: nn.Module) -> float:
    """Return the mean cross-entropy over all clients' data."""
    with torch.no_grad():
        losses = [functional.cross_entropy(model(x), y) for x, y in map(_data, range(_CLIENTS))]
    return float(torch.stack(losses).mean())


def _check_run(run: Run) -> None:
    arrays = run(3)
    expected = [tuple(value.shape) for value in _model().state_dict().values()]
    found = [array.shape for array in arrays]
    require(found == expected, f"the arrays at the end have shapes {found}, the model {expected}")
    require(all(np.isfinite(a).all() for a in arrays), "the arrays at the end are not finite")


def _check_loss(run: Run, broken: int | None = None) -> None:
    model = _model()
    before = _mean_loss(model)
    for parameter, array in zip(model.parameters(), run(20, broken=broken), strict=True):
        parameter.data = torch.tensor(array, dtype=torch.float32)
    after = _mean_loss(model)
    require(after < before, f"the mean loss goes from {before:.4f} to {after:.4f} in 20 rounds")


def _check_again(run: Run, order: Sequence[int] = range(_CLIENTS)) -> None:
    gap = max(float(np.abs(a - b).max()) for a, b in zip(run(4), run(4, order=order), strict=True))
    require(gap < 1e-5, f"the second of two runs ends elsewhere: by {gap:.3g}")


def _check_every_client(run: Run) -> None:
    plain = run(2)
    for client in range(_CLIENTS):
        other = run(2, mirrored=client)
        same = all(np.allclose(a, b, atol=1e-6) for a, b in zip(plain, other, strict=True))
        require(not same, f"other data at client {client} change nothing")


_CHECKS: dict[str, Callable[[Run], None]] = {
    "a run ends with the model's arrays": _check_run,
    "the mean loss falls": _check_loss,
    "the same run gives the same result": _check_again,
    "the order of clients does not matter": partial(_check_again, order=(2, 0, 3, 1)),
    "every client counts": _check_every_client,
    "a client that fails stops nobody": partial(_check_loss, broken=1),
}


def verify_pair(
    make_strategy: Callable[..., Any], make_client: Callable[..., Any]
) -> list[Outcome]:
    """Return the outcome of every check of a Flower strategy with its client, which are made by
    `make_strategy(model, num_clients=, clients_per_round=, num_rounds=)` and
    `make_client(model, dataset, client_id=)`."""
    run = partial(_run, make_strategy, make_client)
    return [run_check(name, partial(check, run)) for name, check in _CHECKS.items()]

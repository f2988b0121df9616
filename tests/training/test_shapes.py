"""Outputs and targets of unlike shapes are named before a run that would train to the mean."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import FEATURES, small_config
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from fedopt_flwr import ConfigError, simulate
from fedopt_flwr.data import as_client_data
from fedopt_flwr.errors import FedoptWarning
from fedopt_flwr.training.calling import Loss
from fedopt_flwr.training.dry_run import try_evaluation
from fedopt_flwr.training.flat_model import FlatModel
from fedopt_flwr.training.shapes import require_one_shape

TORCHS: list[Any] = [
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy_with_logits,
    nn.MSELoss(),
    nn.MSELoss,
    nn.BCEWithLogitsLoss(),
]
COLUMN, ROW = torch.randn(5, 1), torch.randn(5)


def regression(columns: bool = False) -> TensorDataset:
    x = torch.randn(9, FEATURES, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).float()
    return TensorDataset(x, y[:, None] if columns else y)


def train(loss: Any, columns: bool = False) -> Any:
    data = [regression(columns)] * 3
    return simulate(
        small_config(), model=lambda: nn.Linear(FEATURES, 1), client_data=data, loss=loss
    )


@pytest.mark.parametrize("loss", TORCHS)
def test_pytorchs_elementwise_losses_refuse_unlike_shapes(loss: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"model.loss: .*\[n, 1\] and targets of shape \[n\]; giv"
    ):
        train(loss)
    assert train(loss, columns=True).summary["failures"] == 0


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).mean()


@pytest.mark.parametrize(
    "loss",
    [
        squared,
        functools.partial(functional.huber_loss, delta=0.5),
        lambda o, t: functional.mse_loss(o, t.float()),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_loss_of_the_users_own_that_broadcasts_is_warned_of(loss: Loss) -> None:
    for outputs, targets in ((COLUMN, ROW), (ROW, COLUMN), (COLUMN[:, None], ROW)):
        with pytest.warns(FedoptWarning, match=r"each output with every target, .*\[n, 1"):
            require_one_shape(loss, outputs, targets)
    with pytest.warns(FedoptWarning, match=r"outputs of shape \[n, 1\] and targets of shape \[n\]"):
        train(loss)


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, t: squared(o.squeeze(1), t),
        lambda o, t: squared(o.view(-1), t),
        lambda o, t: squared(o[:, 0], t),
        lambda o, t: squared(o, t.unsqueeze(1)),
        lambda o, t: squared(o.sum(dim=-1), t),
        lambda o, t: o.mean(),
    ],
)
def test_a_loss_that_knows_the_shapes_is_left_alone(loss: Callable[..., Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        require_one_shape(loss, COLUMN, ROW)


@pytest.mark.parametrize(
    ("loss", "outputs", "targets"),
    [
        (functional.cross_entropy, torch.randn(5, 3), torch.zeros(5).long()),
        (functional.cross_entropy, torch.randn(5, 1), torch.zeros(5).long()),
        (functional.cross_entropy, torch.randn(5, 3, 2), torch.zeros(5, 2).long()),
        (lambda o, t: o["x"].mean(), {"x": COLUMN}, ROW),
        (squared, COLUMN, COLUMN),
    ],
)
def test_other_losses_and_values_are_left_alone(loss: Loss, outputs: Any, targets: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        require_one_shape(loss, outputs, targets)


def test_a_server_that_has_only_test_data_finds_it_too() -> None:
    model = FlatModel(nn.Linear(FEATURES, 1))
    with pytest.raises(ConfigError, match=r"\[n, 1\] and targets of shape \[n\]"):
        try_evaluation(model, functional.mse_loss, {}, as_client_data(regression()))

"""Your own module, data, loss and metric: a regression on sensors that differ from site to site."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

FEATURES = 8


class Forecast(nn.Module):
    """Two layers with dropout in between."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).squeeze(1)


def load(
    num_clients: int, seed: int, noise: float = 0.1
) -> tuple[list[TensorDataset], TensorDataset]:
    """Return one training set for each site, and a test set over all sites."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    weights = torch.randn(FEATURES, generator=generator)

    def measure(count: int, offset: float) -> TensorDataset:
        x = torch.randn(count, FEATURES, generator=generator) + offset
        y = torch.sin(x @ weights) + noise * torch.randn(count, generator=generator)
        return TensorDataset(x, y)

    sites = [measure(40 + 20 * site, 0.2 * site) for site in range(num_clients)]
    return sites, measure(400, 0.1 * num_clients)


def absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """The metric: mean distance from the measured value."""
    return (outputs - targets).abs().mean()

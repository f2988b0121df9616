"""What each client holds out of training, to evaluate models on."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .client_data import ClientData


class Part(NamedTuple):
    """One client's data: what it trains on, and what it evaluates on, if that is anything."""

    train: ClientData
    holdout: ClientData | None = None

    def on_device(self, device: torch.device) -> Part:
        return Part(self.train.on_device(device), self.holdout and self.holdout.on_device(device))


def held_out(data: ClientData, share: float, seed: int) -> Part:
    """Hold out a random share of the examples, rounded; at least one is left for training."""
    count = min(round(share * data.num_examples), data.num_examples - 1)
    if count < 1:
        return Part(data)
    order = torch.randperm(data.num_examples, generator=torch.Generator().manual_seed(seed % 2**63))
    kept, held = order[count:].sort().values, order[:count].sort().values
    return Part(data.share(kept), data.share(held))

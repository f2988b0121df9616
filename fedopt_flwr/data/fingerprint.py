"""Whether data is the same as before, from a digest of what of it is in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import torch

from .client_data import ClientData, TensorData
from .federated import FederatedData

TRAINING = "training data"
TEST = "test data"


def fingerprint(data: FederatedData) -> dict[str, str]:
    """Return a digest of the training data and one of the test data, of those that are here.

    Of data sets that are read from elsewhere only sizes and known targets count.
    """
    parts = {TRAINING: data.clients, TEST: [data.test] if data.test else []}
    return {name: _digest(clients) for name, clients in parts.items() if clients}


def _digest(parts: Iterable[ClientData]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(f"{part.num_examples} examples".encode())
        for array in _arrays(part):
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _arrays(part: ClientData) -> list[np.ndarray]:
    if isinstance(part, TensorData):
        every = torch.arange(part.num_examples)
        batch = next(part.batches([every], torch.device("cpu")))
        return [tensor.contiguous().view(torch.uint8).numpy() for tensor in batch]
    targets = part.known_targets()
    return [] if targets is None or targets.dtype == object else [targets]

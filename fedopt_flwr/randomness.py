"""The global generators that a user's module or data set may draw from: torch's, NumPy's, Python's.

Nothing of this package draws from them. Where a user's code does (dropout, random crops), they are
seeded for each client and round and put back afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


@contextlib.contextmanager
def kept(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Put the generators back at the end; meanwhile they are seeded, unless `seed` is None."""
    own = random.getstate()
    numpys = np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            if seed is not None:
                torch.default_generator.manual_seed(seed)
                if device.type == "cuda":  # this one; manual_seed would be for all
                    with torch.cuda.device(device):
                        torch.cuda.manual_seed(seed)
                elif device.type != "cpu":
                    torch.manual_seed(seed)
                random.seed(seed)
                np.random.seed(seed % 2**32)  # noqa: NPY002
            yield
        finally:
            random.setstate(own)
            np.random.set_state(numpys)  # noqa: NPY002


def state(device: torch.device) -> tuple[Any, ...]:
    """Return something that is equal as long as nothing was drawn."""
    numpys: Any = np.random.get_state()  # noqa: NPY002
    torchs = [torch.get_rng_state()]
    if device.type == "cuda":
        torchs.append(torch.cuda.get_rng_state(device))
    numbers = [numpys[1].tobytes(), *(t.numpy().tobytes() for t in torchs)]
    return random.getstate(), numpys[2:], numbers


def taken(device: torch.device) -> tuple[Any, ...]:
    """Return the generators' states, for `put_back`."""
    of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    numpys = np.random.get_state()  # noqa: NPY002
    return random.getstate(), numpys, torch.get_rng_state(), of_device


def put_back(device: torch.device, states: tuple[Any, ...]) -> None:
    """Have the generators draw again what they drew after `taken`."""
    own, numpys, torchs, of_device = states
    random.setstate(own)
    np.random.set_state(numpys)  # noqa: NPY002
    torch.set_rng_state(torchs)
    if of_device is not None:
        torch.cuda.set_rng_state(of_device, device)


def derive(seed: int, *purpose: str | int) -> int:
    """Return a seed in [0, 2**63) that depends on every part; 1 and "1" are different parts."""
    digest = hashlib.blake2b(repr((seed, *purpose)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1

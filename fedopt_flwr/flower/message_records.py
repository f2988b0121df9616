"""The records of a message in Flower's Message API, by name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import ConfigRecord

ARRAYS = "arrays"  # down and up, in the order that the instruction or report says
CONFIG = "config"  # down: the instruction, and a user's own values beside it
REPORT = "report"  # up: what a client says beside its arrays
METRICS = "metrics"  # up: what is averaged over nodes, by NUM_EXAMPLES
PROPERTIES = "properties"  # up, to a query: who a node is, and how many examples it has
NUM_EXAMPLES = "num-examples"


def config_record(values: Mapping[str, Any]) -> ConfigRecord:
    """Return a record without empty texts, which Flower's mods that count bytes do not take."""
    return ConfigRecord({name: value for name, value in values.items() if value != ""})


def digest(arrays: Iterable[np.ndarray]) -> str:
    """Return what tells arrays from those that something on the way has changed."""
    found = hashlib.blake2b(digest_size=16)
    for array in arrays:
        found.update(f"{array.dtype} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()

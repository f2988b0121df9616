"""The records of a message in Flower's Message API, by name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.common import Parameters

from .messages import to_arrays

ARRAYS = "arrays"  # down and up, in the order that the instruction or report says
CONFIG = "config"  # down: the instruction, and a user's own values beside it
REPORT = "report"  # up: what a client says beside its arrays
METRICS = "metrics"  # up: what is averaged over nodes, by NUM_EXAMPLES
PROPERTIES = "properties"  # up, to a query: who a node is, and how many examples it has
NUM_EXAMPLES = "num-examples"
_NUMPY = "numpy.ndarray"  # how Flower names arrays as bytes, in both of its APIs


def config_record(values: Mapping[str, Any]) -> ConfigRecord:
    """Return a record without empty texts, which Flower's mods that count bytes do not take."""
    return ConfigRecord({name: value for name, value in values.items() if value != ""})


def array_record(parameters: Parameters) -> ArrayRecord:
    """Return encoded arrays as a record of the same bytes, which messages may share."""
    both = zip(to_arrays(parameters), parameters.tensors, strict=True)
    arrays = [Array(str(array.dtype), array.shape, _NUMPY, data) for array, data in both]
    return ArrayRecord({str(number): array for number, array in enumerate(arrays)})


def encoded(record: ArrayRecord) -> Parameters:
    """Return the bytes of a record's arrays, which nobody has read so far."""
    return Parameters([array.data for array in record.values()], _NUMPY)


def digest(record: ArrayRecord) -> str:
    """Return what tells arrays from those that something on the way has changed."""
    found = hashlib.blake2b(digest_size=16)
    for array in record.values():
        found.update(array.data)  # which begins with type and shape
    return found.hexdigest()

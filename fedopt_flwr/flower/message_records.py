"""The records of a message in Flower's Message API, by name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import Parameters

from ..errors import MessageError
from ..problems import foreign_text
from .evaluations import LARGEST, LONGEST_NAME, MOST_VALUES
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


def require_named(content: RecordDict) -> None:
    """Raise MessageError for more or longer names of metrics than results and logs can hold."""
    names = {name for record in content.metric_records.values() for name in record}
    names -= {NUM_EXAMPLES}
    if len(names) > MOST_VALUES:
        raise MessageError(
            f"its reply holds {len(names)} metrics; must be at most {MOST_VALUES}; send fewer"
        )
    for name in names:
        if len(name) > LONGEST_NAME or not name.isprintable():
            raise MessageError(
                f"its reply holds a metric {foreign_text(repr(name), 80)}; a name must be of at "
                f"most {LONGEST_NAME} printable characters; give it another"
            )


def weight_of(record: MetricRecord) -> float:
    """Return by how many examples a node's metrics count; 0 for what no mean can hold."""
    weight = record.get(NUM_EXAMPLES)
    return weight if isinstance(weight, (int, float)) and 0 < weight < LARGEST else 0


def averaged(replies: Iterable[Message]) -> MetricRecord | None:
    """Return the mean of each metric over the replies that have it, weighted by examples."""
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    for reply in replies:
        for record in reply.content.metric_records.values():
            weight = weight_of(record)
            for name, value in record.items() if weight else ():
                if name == NUM_EXAMPLES or not isinstance(value, (int, float)):
                    continue
                if abs(value) < LARGEST:  # NaN is no less
                    sums[name] = sums.get(name, 0.0) + weight * value
                    weights[name] = weights.get(name, 0.0) + weight
    return MetricRecord({n: sums[n] / weights[n] for n in sums}) if sums else None


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

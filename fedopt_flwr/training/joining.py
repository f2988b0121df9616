"""What belongs to several parts of the data, outputs or targets, as one value for all of it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, MutableMapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..errors import FedoptWarning
from .metrics import Metric, Values, add_values


def on_cpu(value: Any) -> Any:
    """Return a copy in which every tensor is on the CPU and without a gradient."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return _mapping(value, {key: on_cpu(item) for key, item in value.items()})
    if isinstance(value, (tuple, list)):
        return _sequence(value, [on_cpu(item) for item in value])
    return value


def measured(
    metrics: Mapping[str, Metric], parts: list[tuple[Any, Any]], sizes: list[int]
) -> dict[str, Any]:
    """Return what each metric finds in all parts' outputs and targets; `sizes` are their numbers
    of examples.

    Where the parts cannot be joined, it is the mean of theirs, weighted by examples.
    """
    try:
        outputs = joined([outputs for outputs, _ in parts], sizes)
        targets = joined([targets for _, targets in parts], sizes)
    except (RuntimeError, KeyError) as error:
        warnings.warn(
            f"{', '.join(metrics)}: the parts of the test data cannot be joined ({error}), so it "
            f"is the mean over parts of {sizes[0]} examples; pad all examples to one length",
            FedoptWarning,
            stacklevel=2,
        )
        return {name: _mean(name, metric, parts, sizes) for name, metric in metrics.items()}
    return {name: metric(outputs, targets) for name, metric in metrics.items()}


def _mean(name: str, metric: Metric, parts: list[tuple[Any, Any]], sizes: list[int]) -> Values:
    """Return the means over the parts, by name; none where a part has no value."""
    found: list[Values] = []
    for part in parts:
        found.append({})
        add_values(found[-1], name, metric(*part))
    means: Values = {}
    for key in found[0]:
        values = [each.get(key) for each in found]
        known = [value for value in values if value is not None]
        total = sum(v * size for v, size in zip(known, sizes, strict=False))
        means[key] = total / sum(sizes) if len(known) == len(parts) else None
    return means


def joined(parts: list[Any], sizes: list[int]) -> Any:
    """Join the values of parts that hold so many examples each.

    Tensors are concatenated in their first dimension, and so are those in mappings, tuples and
    lists, entry by entry. Lists with one entry an example, and anything else, make one list.
    Raises RuntimeError or KeyError where the parts have unlike shapes or keys.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor) and first.ndim > 0:
        return torch.cat(parts)
    if isinstance(first, Mapping):
        entries = {key: joined([part[key] for part in parts], sizes) for key in first}
        return _mapping(first, entries)
    if not isinstance(first, (tuple, list)):
        return list(parts)
    lengths = [len(part) for part in parts]
    if len(set(lengths)) > 1 or (lengths == sizes and not _is_of_tensors(parts, sizes)):
        return list(chain.from_iterable(parts))
    return _sequence(first, [joined(list(entry), sizes) for entry in zip(*parts, strict=True)])


def _is_of_tensors(parts: list[Any], sizes: list[int]) -> bool:
    """Whether these are tuples with an entry for each of a model's outputs, not each example."""
    return isinstance(parts[0], tuple) and all(
        isinstance(item, Tensor) and item.ndim > 0 and len(item) == size
        for part, size in zip(parts, sizes, strict=True)
        for item in part
    )


def _mapping(like: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    """A mapping of the same kind: models' outputs may be dictionaries with attributes."""
    made = copy.copy(like) if isinstance(like, MutableMapping) else {}
    for key, value in entries.items():
        made[key] = value
    return made


def _sequence(like: tuple[Any, ...] | list[Any], items: list[Any]) -> Any:
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)

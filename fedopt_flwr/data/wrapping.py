"""Any data set of a user as the data of a client."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset

from ..errors import DataError
from .client_data import AS_TORCH, ClientData, DatasetData, Loading, TensorData
from .hugging_face import is_hugging_face, wrap_table
from .streams import StreamData


def as_client_data(dataset: Any, loading: Loading = AS_TORCH) -> ClientData:
    """Wrap a user's data set; TensorDataset (and a Subset of one) stays in memory, unless batches
    are made in a way of their own.

    Raises DataError for what is neither a map-style data set nor an IterableDataset with a length.
    """
    if isinstance(dataset, TensorData) and loading != AS_TORCH:
        raise DataError(
            "data.collate, data.loader_workers: this data is in memory as tensors, whose batches "
            "are made by indexing; leave both out, or give a data set of your own"
        )
    if isinstance(dataset, DatasetData):
        return dataset if loading == AS_TORCH else dataset.loaded_by(loading)
    if isinstance(dataset, (TensorData, StreamData)):
        return dataset
    if isinstance(dataset, IterableDataset):
        return StreamData(dataset, loading)
    if is_hugging_face(dataset, "Dataset"):
        return wrap_table(dataset, loading)
    _require_map_style(dataset)
    dataset = _flattened(dataset)
    if _reads_as(dataset, Subset) and is_hugging_face(dataset.dataset, "Dataset"):
        return wrap_table(dataset.dataset.select(list(dataset.indices)), loading)
    if loading != AS_TORCH:
        return DatasetData(dataset, loading=loading)
    if _reads_as(dataset, TensorDataset) and len(dataset.tensors) == 2:
        return TensorData(*dataset.tensors)
    if _reads_as(dataset, Subset):
        inner = as_client_data(dataset.dataset)
        if isinstance(inner, TensorData):
            try:
                return inner.share(torch.as_tensor(dataset.indices, dtype=torch.int64))
            except IndexError as error:
                raise DataError(f"data set: a Subset takes what is not there: {error}") from None
    return DatasetData(dataset)


def _flattened(dataset: Any) -> Any:
    """Return a Subset of Subsets as one of what they are parts of."""
    while _reads_as(dataset, Subset) and _reads_as(dataset.dataset, Subset):
        inner = dataset.dataset
        try:
            dataset = Subset(inner.dataset, [inner.indices[i] for i in dataset.indices])
        except IndexError as error:
            raise DataError(f"data set: a Subset takes what is not there: {error}") from None
    return dataset


def _reads_as(dataset: Any, kind: Any) -> bool:
    """Whether it reads examples as `kind` does, and not, say, with a transform of its own."""
    names = ("__getitem__", "__getitems__", "__len__")
    return isinstance(dataset, kind) and all(
        getattr(type(dataset), name, None) is getattr(kind, name, None) for name in names
    )


def _require_map_style(dataset: Any) -> None:
    no_map = isinstance(dataset, (tuple, str, bytes, type))
    try:
        len(dataset)
    except Exception:  # has none, or its own raises
        no_map = True
    if no_map or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"data set: got an object of type {type(dataset).__name__}; must be a map-style data "
            "set, with len() and dataset[i] = (input, target); make one of two arrays with "
            "torch.utils.data.TensorDataset(torch.as_tensor(x), torch.as_tensor(y))"
        )

"""One client's examples: rows of shared tensors, or any map-style data set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset


class ClientData(Protocol):
    """Examples that can be taken by position."""

    @property
    def num_examples(self) -> int: ...

    def batches(
        self, positions: Sequence[Tensor], device: torch.device
    ) -> Iterator[tuple[Any, Any]]:
        """Yield (inputs, targets) on `device` for each int64 tensor of positions (on the CPU)."""

    def targets(self) -> np.ndarray:
        """Return the targets of all examples."""

    def on_device(self, device: torch.device) -> ClientData:
        """Return this data with whatever fits in memory moved to `device`."""


class TensorData:
    """Rows of two tensors that many clients share; a batch is one indexing on their device."""

    def __init__(self, inputs: Tensor, labels: Tensor, rows: Tensor | None = None) -> None:
        self._inputs, self._labels, self._rows = inputs, labels, rows

    @property
    def num_examples(self) -> int:
        return len(self._inputs) if self._rows is None else len(self._rows)

    def batches(
        self, positions: Sequence[Tensor], device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in positions:
            rows = (chosen if self._rows is None else self._rows[chosen]).to(self._inputs.device)
            yield (
                self._inputs.index_select(0, rows).to(device),
                self._labels.index_select(0, rows).to(device),
            )

    def targets(self) -> np.ndarray:
        labels = self._labels.cpu()
        return (labels if self._rows is None else labels[self._rows]).numpy()

    def on_device(self, device: torch.device) -> TensorData:
        return TensorData(self._inputs.to(device), self._labels.to(device), self._rows)

    def share(self, rows: Tensor) -> TensorData:
        """Return a client's view: the same tensors, only these rows."""
        return TensorData(self._inputs, self._labels, rows)


class DatasetData:
    """Any map-style data set of (input, target) pairs, read through a DataLoader."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    @property
    def num_examples(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def batches(
        self, positions: Sequence[Tensor], device: torch.device
    ) -> Iterator[tuple[Any, Any]]:
        loader = DataLoader(self._dataset, batch_sampler=[p.tolist() for p in positions])
        for inputs, targets in loader:
            yield _to_device(inputs, device), _to_device(targets, device)

    def targets(self) -> np.ndarray:
        return np.asarray([np.asarray(self._dataset[i][1]) for i in range(self.num_examples)])

    def on_device(self, device: torch.device) -> DatasetData:
        return self


def as_client_data(dataset: Any) -> ClientData:
    """Wrap a user's data set; TensorDataset (and a Subset of one) stays in memory."""
    if isinstance(dataset, (TensorData, DatasetData)):
        return dataset
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        return TensorData(*dataset.tensors)
    if isinstance(dataset, Subset):
        inner = as_client_data(dataset.dataset)
        if isinstance(inner, TensorData) and inner._rows is None:
            return inner.share(torch.as_tensor(dataset.indices, dtype=torch.int64))
    return DatasetData(dataset)


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _to_device(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_to_device(item, device) for item in value)
    return value

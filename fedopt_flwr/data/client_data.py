"""One client's examples: rows of shared tensors, or any map-style data set."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from ..errors import DataError
from ..own_code import described


class NamedInputs(dict[str, Any]):
    """A batch of named columns, of which a model takes those that its `forward` names."""

    @property
    def alone(self) -> Any:
        """The only tensor beside the labels, or None if there are more."""
        others = [v for name, v in self.items() if name != "labels" and isinstance(v, Tensor)]
        return others[0] if len(others) == 1 else None


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

    def known_targets(self) -> np.ndarray | None:
        """Return the targets of all examples if they are in memory."""

    @property
    def relabels(self) -> bool:
        """Whether a user's function makes the batches, and may give them other targets."""

    def on_device(self, device: torch.device) -> ClientData:
        """Return this data with whatever fits in memory moved to `device`."""

    def share(self, rows: Tensor) -> ClientData:
        """Return a view of these rows (int64, on the CPU)."""


@dataclass(frozen=True)
class Loading:
    """How batches are made of a data set's examples."""

    collate: Callable[[list[Any]], Any] | None = None  # None: as torch's DataLoader does
    workers: int = 0  # processes that read them


AS_TORCH = Loading()
_TARGETS = ("labels", "label")  # columns of data sets whose examples are mappings


@dataclass(frozen=True)
class Source:
    """Both parts of a data set: ours in memory, or what the user's own loader returned.

    Ours have float32 inputs, images as [n, channels, h, w], or texts as int64 word numbers
    [n, length], and int64 targets, shape [n].
    """

    train: Any  # None where this machine has only the other part
    test: Any
    num_classes: int | None = None  # None: counted where it is needed
    owners: np.ndarray | None = None  # of the training rows, shape [n]
    loading: Loading = AS_TORCH


class TensorData:
    """Rows of two tensors that many clients share; a batch is one indexing on their device."""

    def __init__(self, inputs: Tensor, labels: Tensor, rows: Tensor | None = None) -> None:
        self._inputs = inputs
        self._labels = labels
        self._rows = torch.arange(len(inputs)) if rows is None else rows

    @property
    def num_examples(self) -> int:
        return len(self._rows)

    def batches(
        self, positions: Sequence[Tensor], device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor]]:
        distinct = {id(chosen): chosen for chosen in positions}  # full batches are all the same
        rows = self._rows[torch.cat(list(distinct.values()))]
        # moved once, as every move waits until the GPU has done what it was given before
        moved = rows.to(self._inputs.device)
        parts = torch.split(moved, [len(chosen) for chosen in distinct.values()])
        own = dict(zip(distinct, parts, strict=True))
        for chosen in positions:
            batch = own[id(chosen)]
            yield (
                self._inputs.index_select(0, batch).to(device),
                self._labels.index_select(0, batch).to(device),
            )

    def targets(self) -> np.ndarray:
        return self._labels[self._rows.to(self._labels.device)].detach().cpu().numpy()

    known_targets = targets
    relabels = False

    def on_device(self, device: torch.device) -> TensorData:
        if device == self._inputs.device:
            return self
        # its own rows alone: the shared tensors hold all clients' examples
        inputs, labels = (tensor[self._rows] for tensor in (self._inputs, self._labels))
        return TensorData(inputs.to(device), labels.to(device))

    def share(self, rows: Tensor) -> TensorData:
        return TensorData(self._inputs, self._labels, self._rows[rows])


class DatasetData:
    """Any map-style data set of (input, target) pairs, read through a DataLoader.

    What the data set raises, or an example that is no pair, is a DataError.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        targets: np.ndarray | None = None,
        loading: Loading = AS_TORCH,
    ) -> None:
        self._dataset = dataset
        self._targets = targets
        self._loading = loading

    @property
    def num_examples(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def batches(
        self, positions: Sequence[Tensor], device: torch.device
    ) -> Iterator[tuple[Any, Any]]:
        rows = [chosen.tolist() for chosen in positions]
        # else it would draw from torch's global one; of its seed are those of the workers made
        generator = torch.Generator().manual_seed(torch.initial_seed())
        loader = iter(
            DataLoader(
                self._dataset,
                batch_sampler=rows,
                generator=generator,
                collate_fn=self._loading.collate,
                num_workers=self._loading.workers,
            )
        )
        for chosen in positions:
            with reading(self._dataset, f"a batch with example {int(chosen[0])}"):
                inputs, targets = as_pair(next(loader))
            yield to_device(inputs, device), to_device(targets, device)

    def loaded_by(self, loading: Loading) -> DatasetData:
        return DatasetData(self._dataset, self._targets, loading)

    def targets(self) -> np.ndarray:
        if self._targets is None:
            values = []
            for position in range(self.num_examples):
                with reading(self._dataset, f"example {position}"):
                    values.append(target_of(self._dataset[position], self._loading))
            self._targets = as_targets(values)
        return self._targets

    def known_targets(self) -> np.ndarray | None:
        return self._targets

    @property
    def relabels(self) -> bool:
        return self._loading.collate is not None

    def on_device(self, device: torch.device) -> DatasetData:
        return self

    def share(self, rows: Tensor) -> DatasetData:
        part = Subset(self._dataset, rows.tolist())
        known = None if self._targets is None else self._targets[rows.numpy()]
        return DatasetData(part, known, self._loading)


@contextlib.contextmanager
def reading(dataset: Any, what: str) -> Iterator[None]:
    """Say in a DataError what of a data set cannot be read."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise DataError(
            f"data set of type {type(dataset).__name__}: {what} cannot be read: "
            f"{described(error)}; each example must be a pair (input, target), or a dict with a "
            "'label' or 'labels', of tensors, arrays or numbers that stack into a batch; for "
            "others give a collate function that makes one of a list of examples"
        ) from error


def target_of(example: Any, loading: Loading) -> np.ndarray:
    """Return the target of one example; of one that has none, what the user's function makes."""
    has_one = isinstance(example, Mapping) and any(name in example for name in _TARGETS)
    if loading.collate is None or has_one or _is_pair(example):
        return np.asarray(as_pair(example)[1])
    _, targets = as_pair(loading.collate([example]))
    return np.asarray(targets[0])


def as_targets(values: list[np.ndarray]) -> np.ndarray:
    """Return one array, of objects where shapes differ, so that it is none of class indices."""
    alike = len({value.shape for value in values}) < 2
    return np.asarray(values) if alike else np.fromiter(values, dtype=object)


def as_pair(item: Any) -> tuple[Any, Any]:
    """Return inputs and targets; of a mapping, all of it under the names that models use."""
    if isinstance(item, Mapping):
        named = NamedInputs(item)
        if "label" in named:
            named.setdefault("labels", named.pop("label"))
        if "labels" not in named:
            raise TypeError(f"got columns {sorted(map(str, named))} without a 'label' or 'labels'")
        return named, named["labels"]
    if not _is_pair(item):
        raise TypeError(f"got {type(item).__name__} instead of a pair")
    return item[0], item[1]


def _is_pair(item: Any) -> bool:
    return isinstance(item, (tuple, list)) and len(item) == 2


def to_device(value: Any, device: torch.device) -> Any:
    if hasattr(value, "to"):  # tensors, and batches of others' libraries
        return value.to(device)
    if isinstance(value, Mapping):
        kind = NamedInputs if isinstance(value, NamedInputs) else dict
        return kind({key: to_device(item, device) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        items = [to_device(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value

"""A data set that can only be read from its beginning: an IterableDataset with a length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from ..errors import DataError
from .client_data import Loading, as_pair, as_targets, reading, target_of, to_device


class StreamData:
    """Gives the batches that a map-style data set of the same examples gives.

    Every call of `batches` reads once from the beginning, as far as it must, and holds the examples
    of batches to come: those of a round, or of one part of an evaluation. The data set must yield
    the same examples in the same order each time.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        loading: Loading,
        rows: Tensor | None = None,
        targets: np.ndarray | None = None,
    ) -> None:
        if loading.workers:
            raise DataError(
                f"data.loader_workers: got {loading.workers}; an IterableDataset is read in this "
                "process; set it to 0"
            )
        self._dataset = dataset
        self._loading = loading
        self._collate = loading.collate or default_collate
        self._rows = torch.arange(_length(dataset)) if rows is None else rows
        self._targets = targets

    @property
    def num_examples(self) -> int:
        return len(self._rows)

    def batches(
        self, positions: Sequence[Tensor], device: torch.device
    ) -> Iterator[tuple[Any, Any]]:
        wanted = [self._rows[chosen].tolist() for chosen in positions]
        uses = Counter(row for batch in wanted for row in batch)
        held: dict[int, Any] = {}
        examples = enumerate(self._examples())
        read = -1  # the last row
        for batch in wanted:
            while read < max(batch):
                read, example = next(examples)
                if read in uses:
                    held[read] = example
            with reading(self._dataset, f"a batch with example {batch[0]}"):
                inputs, targets = as_pair(self._collate([held[row] for row in batch]))
            for row in batch:
                uses[row] -= 1
                if not uses[row]:
                    del held[row]
            yield to_device(inputs, device), to_device(targets, device)

    def _examples(self) -> Iterator[Any]:
        """Yield as many examples as the length says; DataError where there are fewer."""
        stated = _length(self._dataset)
        with reading(self._dataset, "its first example"):
            stream = iter(self._dataset)
        for number in range(stated):
            with reading(self._dataset, f"example {number} of {stated}, as many as len() says,"):
                try:
                    example = next(stream)
                except StopIteration:
                    raise ValueError("there are no more") from None
            yield example

    def targets(self) -> np.ndarray:
        if self._targets is None:
            wanted = set(self._rows.tolist())
            found = {}
            for row, example in enumerate(self._examples()):
                if row in wanted:
                    with reading(self._dataset, f"example {row}"):
                        found[row] = target_of(example, self._loading)
            self._targets = as_targets([found[row] for row in self._rows.tolist()])
        return self._targets

    def known_targets(self) -> np.ndarray | None:
        return self._targets

    @property
    def relabels(self) -> bool:
        return self._loading.collate is not None

    def on_device(self, device: torch.device) -> StreamData:
        return self

    def share(self, rows: Tensor) -> StreamData:
        known = None if self._targets is None else self._targets[rows.numpy()]
        return StreamData(self._dataset, self._loading, self._rows[rows], known)


def _length(dataset: IterableDataset[Any]) -> int:
    try:
        return len(dataset)  # type: ignore[arg-type]
    except TypeError:
        raise DataError(
            f"data set: got an IterableDataset of type {type(dataset).__name__} without a length; "
            "give it a method __len__ that returns the number of examples, which decides its "
            "weight and its epochs"
        ) from None

"""The models that the clients of one process share."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from ..training.calling import Loss
from ..training.flat_model import FlatModel
from ..training.metrics import Metric


class ModelPool:
    """The models of one process that clients take turns on; never one model a client."""

    def __init__(
        self,
        models: Sequence[FlatModel],
        loss: Loss,
        *,
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        self.loss = loss
        self.metrics = metrics or {}
        self.is_one = len(models) == 1  # so that one client trains at a time
        self._free: queue.LifoQueue[FlatModel] = queue.LifoQueue()
        for model in models:
            self._free.put(model)

    @contextmanager
    def borrow(self) -> Iterator[FlatModel]:
        """Lend one model; wait until one is free."""
        model = self._free.get()
        try:
            yield model
        finally:
            self._free.put(model)

"""Losses and metrics by name, and their evaluation on data."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..data import ClientData
from ..errors import ConfigError
from ..own_code import function_of, is_import_path, load_attribute
from ..problems import unknown_name
from .calling import Loss, counted, loss_of, models_own_loss, outputs_of
from .flat_model import FlatModel
from .joining import measured, on_cpu
from .metrics import METRICS, Metric, Summed, Values, add_values
from .objective import evaluation_chunks

_LOSSES: dict[str, Loss] = {"cross_entropy": functional.cross_entropy, "model": models_own_loss}


def named_loss(name: str, folders: Iterable[Path] = ()) -> Loss:
    """Return the loss of that name: a callable (outputs, targets) -> mean over the batch.

    "model" is the one that a model returns itself.
    """
    loss: Loss = _named("model.loss", name, _LOSSES, folders)
    return loss


def named_metric(name: str, folders: Iterable[Path] = (), field: str = "model.metric") -> Metric:
    """Return the metric of that name: a callable (outputs, targets) -> number, of all test data."""
    metric: Metric = _named(field, name, METRICS, folders)
    return metric


def _named(field: str, name: str, known: dict[str, Any], folders: Iterable[Path]) -> Any:
    if is_import_path(name):
        return function_of(field, load_attribute(field, name, folders))
    if name not in known:
        raise ConfigError(unknown_name(field, name, [*known, "module:attribute"]))
    return known[name]


@dataclass(frozen=True)
class Evaluation:
    """Loss and metrics over the test data."""

    loss: float
    metrics: Values

    @property
    def main(self) -> float | None:
        """What the first metric measures."""
        return next(iter(self.metrics.values()), None)

    @property
    def accuracy(self) -> float | None:
        return self.metrics.get("accuracy")

    @property
    def known(self) -> dict[str, float]:
        """The metrics that have a value."""
        return {name: value for name, value in self.metrics.items() if value is not None}


def usable_metrics(metrics: Mapping[str, Metric], data: ClientData) -> dict[str, Metric]:
    """Return the metrics without accuracy where the targets are no class indices, as it is the
    default and nobody may have asked for it."""
    if metrics.get("accuracy") is not METRICS["accuracy"]:
        return dict(metrics)
    _, targets = next(data.batches([torch.zeros(1, dtype=torch.int64)], torch.device("cpu")))
    is_number = isinstance(targets, Tensor) and (targets.ndim == 0 or targets.is_floating_point())
    return {n: m for n, m in metrics.items() if n != "accuracy" or not is_number}


@contextlib.contextmanager
def evaluating(model: FlatModel, use_batch_statistics: bool) -> Iterator[None]:
    """Have a module evaluate, without gradients; batch statistics leave no trace in buffers."""
    saved = model.read_buffers() if use_batch_statistics else {}
    for layer in model.module.eval().modules():
        if use_batch_statistics and isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.train()
    try:
        with torch.no_grad():
            yield
    finally:
        if saved:
            model.write_buffers(saved)


def evaluate(
    model: FlatModel,
    data: ClientData,
    loss: Loss,
    metrics: Mapping[str, Metric],
    *,
    use_batch_statistics: bool = False,
    micro_batch_size: int = 0,
) -> Evaluation:
    """Return the mean loss over `data` of the model as it stands, and the metrics of all of it.

    No more examples than `micro_batch_size` are evaluated at once, or 500 where that is 0. A metric
    that is no `Summed` is called once, on the CPU, with the outputs and targets of all examples.
    With `use_batch_statistics` batch norm layers normalise by the batch instead of by
    their running statistics, which stay as they were.
    """
    chunks = evaluation_chunks(torch.arange(data.num_examples), micro_batch_size)
    sizes = [len(rows) for rows in chunks]
    losses: list[tuple[Any, Any]] = []  # read at the end: reading waits for the GPU
    summed = {name: metric for name, metric in metrics.items() if isinstance(metric, Summed)}
    whole = {name: metric for name, metric in metrics.items() if name not in summed}
    sums: dict[str, Tensor] = {}
    parts: list[tuple[Any, Any]] = []
    with evaluating(model, use_batch_statistics):
        for size, (inputs, targets) in zip(sizes, data.batches(chunks, model.device), strict=True):
            outputs = outputs_of(model.module, inputs, size)
            value = loss_of(loss, outputs, targets) + 0  # it may return one tensor each time
            losses.append((value, counted(loss, outputs, targets, size)))
            for name, metric in summed.items():
                part = metric.sums(outputs, targets)
                sums[name] = sums[name] + part if name in sums else part
            if whole:
                parts.append((on_cpu(outputs), on_cpu(targets)))
        found = measured(whole, parts, sizes) if whole else {}
    found |= {name: metric.of_sums(sums[name]) for name, metric in summed.items()}
    values: Values = {}
    for name in metrics:
        add_values(values, name, found[name])
    return Evaluation(_mean(losses), values)


def _mean(parts: list[tuple[Any, Any]]) -> float:
    weighted = [(float(value), float(weight)) for value, weight in parts if weight]
    total = sum(weight for _, weight in weighted)
    return sum(value * weight for value, weight in weighted) / total if total else math.nan

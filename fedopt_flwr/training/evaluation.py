"""Losses and metrics by name, and their evaluation on data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
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
from .flat_model import FlatModel
from .joining import measured, on_cpu
from .objective import Loss, evaluation_chunks, outputs_of

Metric = Callable[[Any, Any], Any]

_LOSSES: dict[str, Loss] = {"cross_entropy": functional.cross_entropy}


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the share of examples whose largest output is the target class, in [0, 1]."""
    return (outputs.argmax(dim=1) == targets).float().mean()


_METRICS: dict[str, Metric] = {"accuracy": accuracy}


def named_loss(name: str, folders: Iterable[Path] = ()) -> Loss:
    """Return the loss of that name: a callable (outputs, targets) -> mean over the batch."""
    loss: Loss = _named("model.loss", name, _LOSSES, folders)
    return loss


def named_metric(name: str, folders: Iterable[Path] = ()) -> Metric:
    """Return the metric of that name: a callable (outputs, targets) -> number, of all test data."""
    metric: Metric = _named("model.metric", name, _METRICS, folders)
    return metric


def _named(field: str, name: str, known: dict[str, Any], folders: Iterable[Path]) -> Any:
    if is_import_path(name):
        return function_of(field, load_attribute(field, name, folders))
    if name not in known:
        raise ConfigError(unknown_name(field, name, [*known, "module:attribute"]))
    return known[name]


@dataclass(frozen=True)
class Evaluation:
    """Loss and metric over the test data."""

    loss: float
    metric: float | None
    metric_name: str


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
    metric: Metric | None,
    *,
    use_batch_statistics: bool = False,
) -> tuple[float, float | None]:
    """Return the mean loss over `data` of the model as it stands, and the metric of all of it.

    The metric is called once, on the CPU, with the outputs and targets of all examples.
    With `use_batch_statistics` batch norm layers normalise by the batch instead of by their
    running statistics, which stay as they were.
    """
    chunks = evaluation_chunks(torch.arange(data.num_examples))
    sizes = [len(rows) for rows in chunks]
    losses: list[Any] = []  # read at the end: reading waits for the GPU
    shares: list[Any] = []
    parts: list[tuple[Any, Any]] = []
    with evaluating(model, use_batch_statistics):
        for size, (inputs, targets) in zip(sizes, data.batches(chunks, model.device), strict=True):
            outputs = outputs_of(model.module, inputs, size)
            losses.append(loss(outputs, targets) + 0)  # a copy: it may return one tensor each time
            if metric is accuracy:  # whose mean over the parts is that of the whole
                shares.append(accuracy(outputs, targets))
            elif metric is not None:
                parts.append((on_cpu(outputs), on_cpu(targets)))
        if metric is None:
            return _mean(losses, sizes), None
        value = _mean(shares, sizes) if shares else measured(metric, parts, sizes)
    return _mean(losses, sizes), value


def _mean(values: list[Any], sizes: list[int]) -> float:
    total = sum(float(value) * size for value, size in zip(values, sizes, strict=True))
    return total / sum(sizes)

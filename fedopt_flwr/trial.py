"""Model, loss, metric and data, tried on one batch before a run that could not work."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import generators
from .algorithm import ClientId
from .data import ClientData
from .errors import ConfigError, DataError, FedoptError, FedoptWarning, about
from .objectives import Loss, Metric, evaluating, evaluation_chunks
from .vectors import FlatModel

_MODEL_FITS = (
    "the model and the data must fit in shape and dtype (see model.name and model.options), and "
    "batch norm may need batches of two or more"
)
_LOSS_RETURNS = (
    "it is called with (outputs, targets) and must return the mean over the batch, a tensor of "
    "shape [] with a gradient"
)
_METRIC_RETURNS = "it is called with (outputs, targets) and must return a number, the batch's mean"
_ON_CLASSES = (functional.cross_entropy, functional.nll_loss)
_Result = TypeVar("_Result")


class UnknownClassError(DataError):
    """A class that the model has no output for; on a GPU it would end the whole process."""


class _Pass(NamedTuple):
    is_random: bool  # it drew from a global generator, as dropout and random crops do
    num_classes: int | None  # for losses on class labels


def try_training(
    model: FlatModel, loss: Loss, clients: Mapping[ClientId, ClientData], batch_size: int = 0
) -> bool:
    """Take the gradient of one batch of each kind of data; say if one was random.

    Model and generators are left as they were. A client whose data cannot be used will fail in its
    rounds, so there is a warning; if there is no other, or for a label that the model has no output
    for, ConfigError or DataError say what is wrong.
    """
    failed: list[FedoptError] = []
    passes: dict[Any, _Pass] = {}  # by dtypes and dimensions
    first = torch.zeros(1, dtype=torch.int64)
    for client_id in sorted(clients, key=lambda i: -clients[i].num_examples):
        data, whom = clients[client_id], f"client {client_id}"
        try:
            with generators.kept(model.device):
                kind = _kind(_take(data, first, model, whom))
                if kind not in passes:
                    count = min(batch_size or data.num_examples, data.num_examples)
                    passes[kind] = _try_step(model, loss, data, count, whom)
        except UnknownClassError:
            raise
        except FedoptError as error:
            failed.append(error)
        else:
            _require_labels(data, loss, passes[kind].num_classes, whom)
    if failed and not passes:
        raise failed[0]
    if failed:
        others = f", as will {len(failed) - 1} other clients" if len(failed) > 1 else ""
        text = f"{failed[0]}; this client will fail in its rounds{others}"
        warnings.warn(text, FedoptWarning, stacklevel=2)
    return any(step.is_random for step in passes.values())


def _try_step(model: FlatModel, loss: Loss, data: ClientData, count: int, whom: str) -> _Pass:
    rows = torch.randperm(data.num_examples, generator=torch.Generator().manual_seed(0))[:count]
    before = generators.state(model.device)
    inputs, targets = _take(data, rows, model, whom)
    seen = f"{_shown(inputs, targets)} of {whom}"
    with _unchanged(model), torch.enable_grad():
        outputs = _call("model", lambda: model.module.train()(inputs), seen, _MODEL_FITS)
        num_classes = _num_classes(loss, outputs, targets)
        _require_labels(data, loss, num_classes, whom, targets)
        value = _call("model.loss", lambda: loss(outputs, targets), seen, _LOSS_RETURNS)
        if not isinstance(value, Tensor) or value.shape != () or not value.requires_grad:
            returned = f"returned {_shown(value)}, without a gradient or not of shape []"
            raise ConfigError(f"model.loss: {returned}, on {seen}; {_LOSS_RETURNS}")
        _call("model.loss", value.backward, seen, _LOSS_RETURNS)
    return _Pass(before != generators.state(model.device), num_classes)


def try_evaluation(
    model: FlatModel,
    loss: Loss,
    metric: Metric | None,
    test: ClientData,
    *,
    use_batch_statistics: bool = False,
) -> None:
    """Evaluate the first part of the test data; ConfigError or DataError say what fails."""
    whom = "the test data"
    chunk = evaluation_chunks(test)[0]
    with (
        generators.kept(model.device),
        _unchanged(model),
        evaluating(model, use_batch_statistics),
    ):
        inputs, targets = _take(test, chunk, model, whom)
        seen = f"{_shown(inputs, targets)} of {whom}"
        outputs = _call("model", lambda: model.module(inputs), seen, _MODEL_FITS)
        _require_labels(test, loss, _num_classes(loss, outputs, targets), whom, targets)
        _call("model.loss", lambda: float(loss(outputs, targets)), seen, _LOSS_RETURNS)
        if metric is not None:
            own = metric
            _call("model.metric", lambda: float(own(outputs, targets)), seen, _METRIC_RETURNS)


@contextlib.contextmanager
def _unchanged(model: FlatModel) -> Iterator[None]:
    """Put back parameters and buffers, those too that `forward` replaced by new ones."""
    module = model.module
    parameters = [(p, p.detach().clone()) for p in module.parameters()]
    buffers = [
        (owner, name, buffer, buffer.clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in parameters:
                parameter.copy_(value)
            for owner, name, buffer, value in buffers:
                owner._buffers[name] = buffer.copy_(value)
            model.gradient.zero_()


def _take(data: ClientData, rows: Tensor, model: FlatModel, whom: str) -> tuple[Any, Any]:
    with about(whom):
        return next(data.batches([rows], model.device))


def _call(field: str, function: Callable[[], _Result], seen: str, remedy: str) -> _Result:
    try:
        return function()
    except torch.OutOfMemoryError:  # of the device, which says so itself
        raise
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{field}: failed on {seen}: {text}; {remedy}") from error


def _num_classes(loss: Loss, outputs: Any, targets: Any) -> int | None:
    if loss not in _ON_CLASSES and not isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)):
        return None
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)):
        return None
    is_class = targets.ndim == 1 and not targets.is_floating_point()
    return outputs.shape[1] if is_class and outputs.ndim == 2 else None


def _require_labels(
    data: ClientData, loss: Loss, num_classes: int | None, whom: str, batch: Tensor | None = None
) -> None:
    """Check the batch's labels and all that are in memory."""
    if num_classes is None:
        return
    known = data.known_targets()
    if known is not None and known.dtype.kind in "iu":
        batch = torch.as_tensor(known.astype("int64"))
    if batch is None:
        return
    none = getattr(loss, "ignore_index", -100)
    wrong = batch[((batch < 0) & (batch != none)) | (batch >= num_classes)]
    if len(wrong):
        raise UnknownClassError(
            f"{whom}: has an example of class {int(wrong[0])}; the model has {num_classes} "
            f"outputs, for classes 0 to {num_classes - 1}; mend the label or give the model more "
            "outputs"
        )


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.ndim
    if isinstance(value, Mapping):
        return tuple(sorted((str(key), _kind(item)) for key, item in value.items()))
    if isinstance(value, (tuple, list)):
        return tuple(_kind(item) for item in value)
    return type(value)


def _shown(*values: Any) -> str:
    texts = [
        f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        if isinstance(value, Tensor)
        else type(value).__name__
        for value in values
    ]
    return f"inputs {texts[0]} and targets {texts[1]}" if len(texts) == 2 else texts[0]

"""Model, loss, metric and data, tried on one batch before a run that could not work."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import randomness
from ..algorithm import ClientId
from ..data import ClientData
from ..errors import ConfigError, DataError, FedoptError, FedoptWarning
from ..models.weights import plain_module
from ..own_code import described
from ..problems import about
from .calling import (
    IGNORED,
    Loss,
    is_on_classes,
    is_torchs,
    loss_of,
    mixed,
    models_own_loss,
    option_of,
    outputs_of,
    scores_of,
)
from .evaluation import evaluate, evaluating
from .flat_model import FlatModel
from .joining import on_cpu
from .metrics import Metric, Values, add_values
from .objective import evaluation_chunks, parts_of
from .shapes import ShapeError, require_one_shape

_MODEL_FITS = (
    "the model and the data must fit in shape and dtype (see model.name and model.options)"
)
_LOSS_RETURNS = (
    "it is called with (outputs, targets) and must return the mean over the batch, a tensor of "
    "shape [] with a gradient"
)
_METRIC_RETURNS = (
    "it is called with (outputs, targets) of the whole test set and must return a number, or a "
    "dict of numbers by names that no other metric has"
)


class UnknownClassError(DataError):
    """A class that the model has no output for; on a GPU it would end the whole process."""


class _Batch(NamedTuple):
    outputs: Any
    targets: Any
    loss: Any
    num_classes: int | None  # for losses on class labels
    seen: str  # the data in words


def try_training(
    model: FlatModel,
    loss: Loss,
    clients: Mapping[ClientId, ClientData],
    batch_size: int = 0,
    *,
    are_all: bool = True,
    micro_batch_size: int = 0,
    precision: str = "float32",
) -> bool:
    """Take the gradient of one batch of each kind of data; say if one drew from a global generator,
    as dropout and random crops do.

    Model and generators are left as they were. A client whose data cannot be used will fail in its
    rounds, so a warning names it. ConfigError or DataError say what is wrong if that is so for
    every client (and `are_all`: other processes have no more of them), and for what would not fail
    but do harm: a label that the model has no output for, and shapes that a loss would broadcast.
    """
    failed: list[FedoptError] = []
    classes: dict[Any, int | None] = {}  # by the data's dtypes and dimensions
    is_random = False
    first = torch.zeros(1, dtype=torch.int64)
    for client_id in sorted(clients, key=lambda i: -clients[i].num_examples):
        data = clients[client_id]
        whom = f"client {client_id}"
        try:
            with randomness.kept(model.device):
                before = randomness.state(model.device)
                kind = _kind(_take(data, first, model, whom))
                if kind not in classes:
                    whole = min(batch_size or data.num_examples, data.num_examples)
                    count = len(parts_of(torch.arange(whole), micro_batch_size)[0])
                    with mixed(model.device, precision):
                        classes[kind] = _try_step(model, loss, data, count, whom)
                is_random |= before != randomness.state(model.device)
        except (UnknownClassError, ShapeError):
            raise
        except FedoptError as error:
            failed.append(error)
        else:
            _require_labels(data, loss, classes[kind], whom)
    if failed and are_all and not classes:
        raise failed[0]
    if failed:
        others = f", as will {len(failed) - 1} other clients" if len(failed) > 1 else ""
        text = f"{failed[0]}; this client will fail in its rounds{others}"
        warnings.warn(text, FedoptWarning, stacklevel=2)
    return is_random


def _try_step(model: FlatModel, loss: Loss, data: ClientData, count: int, whom: str) -> int | None:
    with _unchanged(model), torch.enable_grad():
        model.module.train()
        batch = _try_batch(model, loss, data, count, whom)
        value = batch.loss
        if not isinstance(value, Tensor) or value.shape != () or not value.requires_grad:
            returned = f"returned {_shown(value)}, without a gradient or not of shape []"
            raise ConfigError(f"model.loss: {returned}, on {batch.seen}; {_LOSS_RETURNS}")
        _call("model.loss", value.backward, batch.seen, _LOSS_RETURNS)
    return batch.num_classes


def try_evaluation(
    model: FlatModel,
    loss: Loss,
    metrics: Mapping[str, Metric],
    test: ClientData,
    *,
    use_batch_statistics: bool = False,
    micro_batch_size: int = 0,
) -> None:
    """Evaluate as much of the test data as is evaluated at once; ConfigError or DataError say what
    fails."""
    count = len(evaluation_chunks(torch.arange(test.num_examples), micro_batch_size)[0])
    with (
        randomness.kept(model.device),
        _unchanged(model),
        evaluating(model, use_batch_statistics),
    ):
        batch = _try_batch(model, loss, test, count, "the test data")
        _call("model.loss", lambda: float(batch.loss), batch.seen, _LOSS_RETURNS)
        if not metrics or (count < test.num_examples and _measure(metrics, batch)):
            return
        # what fails on a part of the test data may do on the whole, as one class has no AUC
        tried: dict[str, Metric] = {}
        for name, metric in metrics.items():
            tried[name] = metric
            _call(
                f"evaluation.metrics: {name!r}" if len(tried) > 1 else "model.metric",
                partial(
                    evaluate,
                    model,
                    test,
                    loss,
                    tried,
                    use_batch_statistics=use_batch_statistics,
                    micro_batch_size=micro_batch_size,
                ),
                batch.seen,
                _METRIC_RETURNS,
            )


def _measure(metrics: Mapping[str, Metric], batch: _Batch) -> bool:
    with contextlib.suppress(Exception, SystemExit), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs, targets = on_cpu(batch.outputs), on_cpu(batch.targets)
        values: Values = {}
        for name, metric in metrics.items():
            add_values(values, name, metric(outputs, targets))
        return True
    return False


def _try_batch(model: FlatModel, loss: Loss, data: ClientData, count: int, whom: str) -> _Batch:
    """The loss of so many examples, drawn from all of them: data may be sorted."""
    rows = torch.randperm(data.num_examples, generator=torch.Generator().manual_seed(0))[:count]
    inputs, targets = _take(data, rows, model, whom)
    seen = f"inputs {_shown(inputs)} and targets {_shown(targets)} of {whom}"
    declared = None
    if loss is models_own_loss:  # which computes it in the call
        declared = _declared_classes(model.module, targets)
        _require_labels(data, loss, declared, whom, targets)
    outputs = _call("model", lambda: outputs_of(model.module, inputs, count), seen, _MODEL_FITS)
    compared = scores_of(outputs, targets) if is_torchs(loss) else (outputs, targets)
    num_classes = declared or _num_classes(loss, *compared)
    _require_labels(data, loss, num_classes, whom, compared[1])
    require_one_shape(loss, *compared)
    value = _call("model.loss", lambda: loss_of(loss, outputs, targets), seen, _LOSS_RETURNS)
    return _Batch(outputs, targets, value, num_classes, seen)


@contextlib.contextmanager
def _unchanged(model: FlatModel) -> Iterator[None]:
    """Put back trainable parameters and buffers, those too that `forward` replaced by new ones."""
    owners = [(module._buffers, dict(module._buffers)) for module in model.module.modules()]
    tensors = [model.vector, model.local_vector, *model.module.buffers()]
    values = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                if not tensor.equal(value):  # else it may be one that cannot be written
                    tensor.copy_(value)
        for buffers, before in owners:
            buffers.update(before)
        model.zero_gradient()


def _take(data: ClientData, rows: Tensor, model: FlatModel, whom: str) -> tuple[Any, Any]:
    with about(whom):
        return next(data.batches([rows], model.device))


def _call(field: str, function: Callable[[], Any], seen: str, remedy: str) -> Any:
    try:
        return function()
    except torch.OutOfMemoryError:  # of the device, which says so itself
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{field}: failed on {seen}: {described(error)}; {remedy}") from error


def _num_classes(loss: Loss, outputs: Any, targets: Any) -> int | None:
    if not is_on_classes(loss):
        return None
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)):
        return None
    is_class = targets.ndim == 1 and not targets.is_floating_point()
    return outputs.shape[1] if is_class and outputs.ndim == 2 else None


def _declared_classes(module: nn.Module, targets: Any) -> int | None:
    """Return how many classes one of Hugging Face's models says that it has."""
    is_class = isinstance(targets, Tensor) and targets.ndim == 1 and not targets.is_floating_point()
    found = getattr(getattr(plain_module(module), "config", None), "num_labels", None)
    return found if is_class and isinstance(found, int) and found > 1 else None


def _require_labels(
    data: ClientData, loss: Loss, num_classes: int | None, whom: str, batch: Tensor | None = None
) -> None:
    """Check the batch's labels and all that are in memory."""
    if num_classes is None:
        return
    known = None if data.relabels else data.known_targets()
    if known is not None and known.dtype.kind in "iu":
        batch = torch.as_tensor(known.astype("int64"))
    if batch is None:
        return
    none = option_of(loss, "ignore_index", IGNORED)
    wrong = batch[((batch < 0) & (batch != none)) | (batch >= num_classes)]
    if len(wrong):
        raise UnknownClassError(
            f"{whom}: has an example of class {int(wrong[0])}; the model has {num_classes} "
            f"outputs, for classes 0 to {num_classes - 1}; fix the label or give the model more "
            "outputs (a built-in model has one for each class of the test data)"
        )


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.ndim
    if isinstance(value, Mapping):
        return tuple((str(key), _kind(value[key])) for key in sorted(value, key=str))
    if isinstance(value, (tuple, list)):
        return tuple(_kind(item) for item in value)
    return type(value)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_shown(item)}' for key, item in value.items())}}}"
    return type(value).__name__

"""Model, loss, metric and data, tried on a few examples before a run that could not work."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from .algorithm import ClientId
from .data import ClientData
from .errors import ConfigError, DataError, FedoptError, FedoptWarning, about
from .objectives import Loss, Metric
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
_Result = TypeVar("_Result")


class _WrongLabel(DataError):
    """A class that the model has no output for; on a GPU it would end the whole process."""


class _Pass(NamedTuple):
    is_random: bool  # it read torch's global generator, as dropout does
    num_classes: int | None  # for cross-entropy on class labels


def try_training(
    model: FlatModel, loss: Loss, clients: Mapping[ClientId, ClientData], batch_size: int = 0
) -> bool:
    """Take a gradient of up to two examples of each kind of data; say if one was random.

    Parameters, buffers and torch's generator are left as they were. A client whose data cannot be
    used will fail in its rounds, so there is a warning; if there is no other, or for a label that
    the model has no output for, ConfigError or DataError say what is wrong.
    """
    failed: list[FedoptError] = []
    passes: dict[Any, _Pass] = {}  # by dtypes and dimensions
    for client_id in sorted(clients, key=lambda i: -clients[i].num_examples):
        data, whom = clients[client_id], f"client {client_id}"
        try:
            kind = _kind(_take(data, 1, model, whom))
            if kind not in passes:
                count = min(2, data.num_examples, batch_size or 2)
                passes[kind] = _try_step(model, loss, data, count, whom)
        except _WrongLabel:
            raise
        except FedoptError as error:
            failed.append(error)
        else:
            _require_labels(data, passes[kind].num_classes, whom)
    if failed and not passes:
        raise failed[0]
    if failed:
        others = f", as will {len(failed) - 1} other clients" if len(failed) > 1 else ""
        text = f"{failed[0]}; this client will fail in its rounds{others}"
        warnings.warn(text, FedoptWarning, stacklevel=2)
    return any(step.is_random for step in passes.values())


def _try_step(model: FlatModel, loss: Loss, data: ClientData, count: int, whom: str) -> _Pass:
    inputs, targets = _take(data, count, model, whom)
    seen = f"{_shown(inputs, targets)} of {whom}"
    devices = [model.device] if model.device.type == "cuda" else []
    with _unchanged(model), torch.random.fork_rng(devices=devices):
        before = _generator_state(model.device)
        outputs = _call("model", lambda: model.module.train()(inputs), seen, _MODEL_FITS)
        num_classes = _num_classes(loss, outputs, targets)
        _require_labels(data, num_classes, whom, targets)
        value = _call("model.loss", lambda: loss(outputs, targets), seen, _LOSS_RETURNS)
        if not isinstance(value, Tensor) or value.shape != () or not value.requires_grad:
            returned = f"returned {_shown(value)}, without a gradient or not of shape []"
            raise ConfigError(f"model.loss: {returned}, on {seen}; {_LOSS_RETURNS}")
        _call("model.loss", value.backward, seen, _LOSS_RETURNS)
        changed = not torch.equal(before, _generator_state(model.device))
    return _Pass(changed, num_classes)


def try_evaluation(model: FlatModel, loss: Loss, metric: Metric, test: ClientData) -> None:
    """Evaluate up to two examples of the test data; ConfigError or DataError say what fails."""
    whom = "the test data"
    inputs, targets = _take(test, min(2, test.num_examples), model, whom)
    seen = f"{_shown(inputs, targets)} of {whom}"
    with _unchanged(model), torch.no_grad():
        outputs = _call("model", lambda: model.module.eval()(inputs), seen, _MODEL_FITS)
        _require_labels(test, _num_classes(loss, outputs, targets), whom, targets)
        _call("model.loss", lambda: float(loss(outputs, targets)), seen, _LOSS_RETURNS)
        _call("model.metric", lambda: float(metric(outputs, targets)), seen, _METRIC_RETURNS)


@contextlib.contextmanager
def _unchanged(model: FlatModel) -> Iterator[None]:
    saved = model.read_buffers()
    try:
        yield
    finally:
        model.write_buffers(saved)
        model.gradient.zero_()


def _take(data: ClientData, count: int, model: FlatModel, whom: str) -> tuple[Any, Any]:
    with about(whom):
        return next(data.batches([torch.arange(count)], model.device))


def _call(field: str, function: Callable[[], _Result], seen: str, remedy: str) -> _Result:
    try:
        return function()
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{field}: failed on {seen}: {text}; {remedy}") from error


def _num_classes(loss: Loss, outputs: Any, targets: Any) -> int | None:
    if loss is not functional.cross_entropy or not isinstance(outputs, Tensor):
        return None
    is_class = isinstance(targets, Tensor) and targets.ndim == 1
    is_class = is_class and not targets.is_floating_point()
    return outputs.shape[1] if is_class and outputs.ndim == 2 else None


def _require_labels(
    data: ClientData, num_classes: int | None, whom: str, batch: Tensor | None = None
) -> None:
    """Check the batch's labels and all that are in memory; -100 means none to cross-entropy."""
    known = data.known_targets()
    labels = torch.as_tensor(known) if known is not None and known.dtype.kind in "iu" else batch
    if num_classes is None or labels is None:
        return
    wrong = labels[((labels < 0) & (labels != -100)) | (labels >= num_classes)]
    if len(wrong):
        raise _WrongLabel(
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


def _generator_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()

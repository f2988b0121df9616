"""What a model is called with, and what a loss or a metric reads from what it returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..data.client_data import NamedInputs
from ..errors import ConfigError
from ..models.weights import plain_module

Loss = Callable[[Any, Any], Tensor]
IGNORED = -100  # a target that PyTorch's losses leave out by default
_LOSSES = (functional.__name__, nn.CrossEntropyLoss.__module__)  # where PyTorch's are
_CLASS_LOSSES = (functional.cross_entropy, functional.nll_loss)


def models_own_loss(outputs: Any, targets: Any) -> Tensor:
    """Return the loss that a model computed itself, of the labels that it was called with.

    It is `outputs.loss` (or `outputs["loss"]`), the first of a tuple, or all that was returned.
    """
    found = outputs[0] if isinstance(outputs, tuple) else getattr(outputs, "loss", outputs)
    if isinstance(outputs, Mapping):
        found = outputs.get("loss")
    if not isinstance(found, Tensor) or found.ndim:
        raise TypeError(
            "the model returned no loss of its own, which it does where its examples are dicts "
            "with 'labels' that it takes; name another loss, such as 'cross_entropy'"
        )
    return found


def loss_of(loss: Loss, outputs: Any, targets: Any) -> Tensor:
    """Return the mean loss of a batch; PyTorch's own losses compare the model's scores."""
    if is_torchs(loss):
        outputs, targets = scores_of(outputs, targets)
    return loss(outputs, targets)


def is_torchs(loss: Any) -> bool:
    """Whether a loss is one of PyTorch's, or a functools.partial of one."""
    inner = loss.func if isinstance(loss, partial) else loss
    kind = type(inner) if isinstance(inner, nn.Module) else inner
    return getattr(kind, "__module__", "") in _LOSSES


def is_on_classes(loss: Any) -> bool:
    """Whether a loss is the cross entropy of class indices, in any of its forms."""
    inner = loss.func if isinstance(loss, partial) else loss
    return inner in _CLASS_LOSSES or isinstance(inner, (nn.CrossEntropyLoss, nn.NLLLoss))


def option_of(loss: Any, name: str, default: Any = None) -> Any:
    """Return an option of a loss: of its module, or of a functools.partial."""
    return (
        loss.keywords.get(name, default)
        if isinstance(loss, partial)
        else getattr(loss, name, default)
    )


def scores_of(outputs: Any, targets: Any) -> tuple[Any, Any]:
    """Return what belongs together of outputs that have `logits`, such as Hugging Face's.

    A score for each token and its target lie in rows; those of causal language models, which
    predict the token that follows, are moved by one.
    """
    if isinstance(outputs, Tensor):
        return outputs, targets
    is_table = isinstance(outputs, Mapping)
    scores = outputs.get("logits") if is_table else getattr(outputs, "logits", None)
    if not isinstance(scores, Tensor) or not isinstance(targets, Tensor):
        return outputs, targets
    if scores.ndim == 3 and targets.ndim == 2 and not targets.is_floating_point():
        length, learned = targets.shape[1], scores.shape[1] - targets.shape[1]
        if "CausalLM" not in type(outputs).__name__:
            scores = scores[:, learned:]
        elif learned:  # a prompt before the text, whose last token predicts the text's first
            scores = scores[:, -length - 1 : -1]
        else:
            scores, targets = scores[:, :-1], targets[:, 1:]
        return scores.flatten(0, 1), targets.flatten()
    if scores.shape == (*targets.shape, 1) and targets.is_floating_point():
        return scores.squeeze(-1), targets
    return scores, targets


def classes_of(loss: Loss, outputs: Any, targets: Any) -> Tensor | None:
    """Return the targets, as class indices, of a loss whose mean is over those that count."""
    if not is_on_classes(loss) and loss is not models_own_loss:
        return None
    _, targets = scores_of(outputs, targets)
    is_class = isinstance(targets, Tensor) and not targets.is_floating_point()
    return targets.long() if is_class else None  # bytes as an index would be a mask


def targets_that_count(loss: Loss, classes: Tensor) -> Tensor:
    found: Tensor = classes != option_of(loss, "ignore_index", IGNORED)
    return found


def counted(loss: Loss, outputs: Any, targets: Any, num_examples: int) -> int | Tensor:
    """Return how much a batch's mean loss counts beside those of others.

    That is its number of examples, and for cross entropy the number (or weight) of targets that are
    not ignored, which its mean is taken over.
    """
    classes = classes_of(loss, outputs, targets)
    if classes is None:
        return num_examples
    counts, weights = targets_that_count(loss, classes), option_of(loss, "weight")
    count: Tensor = counts.sum() if weights is None else weights[classes[counts]].sum()
    return count


def mixed(device: torch.device, precision: str) -> contextlib.AbstractContextManager[Any]:
    """Return what has a model compute in bfloat16 where that is safe; its parameters stay.

    ConfigError where PyTorch has no bfloat16 on that device.
    """
    if precision == "float32":
        return contextlib.nullcontext()
    try:
        return torch.autocast(device.type, dtype=torch.bfloat16)
    except (RuntimeError, AssertionError) as error:  # the latter of devices of other packages
        raise ConfigError(
            f"training.precision: got {precision!r}, which PyTorch does not compute on "
            f"{str(device)!r}; use 'float32', or another training.device"
        ) from error


def outputs_of(module: nn.Module, inputs: Any, num_examples: int) -> Any:
    """Return the module's outputs for a batch of so many examples.

    Of named inputs it gets those that its `forward` names. Batch norm layers that meet one value a
    channel use their running statistics: one value has no variance, so PyTorch refuses it, and a
    client with a single example has no more.
    """
    if num_examples != 1:
        return _called(module, inputs)
    layers = [
        layer
        for layer in module.modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training
    ]
    hooks = [layer.register_forward_pre_hook(_choose, with_kwargs=True) for layer in layers]
    try:
        return _called(module, inputs)
    finally:
        for hook, layer in zip(hooks, layers, strict=True):
            hook.remove()
            layer.train()


def _choose(layer: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
    values = args[0] if args else named["input"]
    layer.train(values.numel() > values.shape[1])


def _called(module: nn.Module, inputs: Any) -> Any:
    if not isinstance(inputs, NamedInputs):
        return module(inputs)
    inner: Any = plain_module(module)
    inner = plain_module(inner.get_base_model()) if hasattr(inner, "get_base_model") else inner
    parameters = signature(inner.forward).parameters.values()
    variable = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    named = [parameter.name for parameter in parameters if parameter.kind not in variable]
    taken = {name: value for name, value in inputs.items() if name in named}
    if taken.keys() - {"labels"}:
        return module(**taken)
    if inputs.alone is not None:
        return module(inputs.alone, **taken)
    if any(parameter.kind == Parameter.VAR_KEYWORD for parameter in parameters):
        return module(**inputs)
    raise TypeError(f"forward takes {named}; the data's columns are {sorted(inputs)}")

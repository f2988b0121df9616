"""Outputs and targets of unlike shapes, which a loss would compare each with all."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import ConfigError, FedoptWarning
from .calling import is_on_classes, is_torchs

_MARGINS = (functional.multi_margin_loss, nn.MultiMarginLoss)  # of class indices, too


class ShapeError(ConfigError):
    """Outputs and targets that an elementwise loss would broadcast: it would train to a mean."""


def require_one_shape(loss: Callable[[Any, Any], Any], outputs: Any, targets: Any) -> None:
    """Raise ShapeError where one of PyTorch's elementwise losses meets unlike shapes.

    A loss of the user's own may know what to do with them, so a warning names them, and only if
    its value changes when each output meets its own target alone.
    """
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return
    if outputs.shape == targets.shape:
        return
    kind = type(loss) if isinstance(loss, nn.Module) else loss
    is_whole = is_torchs(loss) and not isinstance(loss, partial)
    is_elementwise = is_whole and not is_on_classes(loss) and kind not in _MARGINS
    if not is_elementwise and not _broadcasts(loss, outputs, targets):
        return
    shapes = "outputs of shape {} and targets of shape {}".format(*_shown(outputs, targets))
    remedy = (
        "give both the same shape, for example outputs.squeeze(1) in the model or "
        "targets.unsqueeze(1) in the data"
    )
    if is_elementwise:
        raise ShapeError(f"model.loss: compares entry by entry, but gets {shapes}; {remedy}")
    warnings.warn(
        f"model.loss: seems to compare each output with every target, since it gets {shapes}; "
        f"{remedy}",
        FedoptWarning,
        stacklevel=1,  # for the data of clients and for the test data it is the same warning
    )


def _broadcasts(loss: Callable[[Any, Any], Any], outputs: Tensor, targets: Tensor) -> bool:
    """Whether it compares each output with every target: as they are, their order does not matter,
    and in either of the two shapes they have one value, which is another."""
    if outputs.numel() != targets.numel():
        return False
    with (
        contextlib.suppress(Exception, SystemExit),
        torch.no_grad(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        as_targets = float(loss(outputs.reshape(targets.shape), targets))
        as_outputs = float(loss(outputs, targets.reshape(outputs.shape)))
        as_given = float(loss(outputs, targets))
        reordered = float(loss(outputs, targets.flip(0)))
        close = 1e-4 * abs(as_targets) + 1e-7
        is_elementwise = abs(as_targets - as_outputs) <= close < abs(as_targets - as_given)
        return is_elementwise and abs(as_given - reordered) <= close
    return False


def _shown(*tensors: Tensor) -> list[str]:
    """Shapes, with n for the examples of a batch."""
    shapes = [[str(size) for size in tensor.shape] for tensor in tensors]
    if all(shapes) and len({shape[0] for shape in shapes}) == 1:
        shapes = [["n", *shape[1:]] for shape in shapes]
    return [f"[{', '.join(shape)}]" for shape in shapes]

"""Batches of a single example, which batch norm cannot normalise by their own statistics."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def outputs_of(module: nn.Module, inputs: Any, num_examples: int) -> Any:
    """Return the module's outputs for a batch of so many examples."""
    with single_values(module) if num_examples == 1 else contextlib.nullcontext():
        return module(inputs)


@contextlib.contextmanager
def single_values(module: nn.Module) -> Iterator[None]:
    """Have batch norm layers that meet one value a channel use their running statistics.

    One value has no variance, so PyTorch refuses it; a client with a single example has no more.
    """
    switched: list[nn.Module] = []

    def before(layer: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        values = args[0] if args else named["input"]
        if layer.training and values.numel() == values.shape[1]:
            switched.append(layer.eval())

    def after(layer: nn.Module, *_: Any) -> None:
        if switched and switched[-1] is layer:
            switched.pop().train()

    layers = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    hooks = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    hooks += [layer.register_forward_hook(after, always_call=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

"""Batches of a single example, which batch norm cannot normalise by their own statistics."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def outputs_of(module: nn.Module, inputs: Any, num_examples: int) -> Any:
    """Return the module's outputs for a batch of so many examples.

    Batch norm layers that meet one value a channel use their running statistics: one value has no
    variance, so PyTorch refuses it, and a client with a single example has no more.
    """
    if num_examples > 1:
        return module(inputs)
    layers = [
        layer
        for layer in module.modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training
    ]
    hooks = [layer.register_forward_pre_hook(_choose, with_kwargs=True) for layer in layers]
    try:
        return module(inputs)
    finally:
        for hook, layer in zip(hooks, layers, strict=True):
            hook.remove()
            layer.train()


def _choose(layer: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
    values = args[0] if args else named["input"]
    layer.train(values.numel() > values.shape[1])

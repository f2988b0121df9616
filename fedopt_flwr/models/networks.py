"""Small networks for images, vectors and texts; ResNet-18 with the stem for 32x32 images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn


def mlp(
    input_shape: tuple[int, ...], num_classes: int, hidden: Sequence[int] = (200,)
) -> nn.Module:
    """Fully connected ReLU network; `hidden` lists the widths of its hidden layers."""
    if any(not isinstance(width, int) or width < 1 for width in hidden):
        raise ValueError(f"hidden: got {list(hidden)}; must be a list of positive integers")
    layers: list[nn.Module] = []
    width = math.prod(input_shape)
    for next_width in hidden:
        layers += [nn.Linear(width, next_width), nn.ReLU()]
        width = next_width
    return _OfFlatInputs(*layers, nn.Linear(width, num_classes))


class _OfFlatInputs(nn.Sequential):
    """Numbers its layers from the first with weights, as patterns of their names expect."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = super().forward(inputs.flatten(1))  # type: ignore[no-untyped-call]
        return outputs


def logistic(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Softmax regression: one linear layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))


def cnn(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Three convolutions, each halving the image, and two linear layers; 80k weights on MNIST.

    Channels-last memory and ReLU after the pooling (max and ReLU commute) take a third off a step
    on a CPU, where pooling along contiguous rows costs as much as a convolution.
    """
    _require_image(input_shape)
    channels, height, width = input_shape
    layers: list[nn.Module] = [_ChannelsLast()]
    for next_channels in (16, 32, 64):
        layers += [nn.Conv2d(channels, next_channels, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()]
        channels = next_channels
    hidden = nn.Linear(channels * (height // 8) * (width // 8), 96)
    return nn.Sequential(*layers, nn.Flatten(), hidden, nn.ReLU(), nn.Linear(96, num_classes))


class _ChannelsLast(nn.Module):
    """Changes the layout in memory, not the values; later layers keep it."""

    def forward(self, images: Tensor) -> Tensor:
        # contiguous(memory_format=...) would leave the strides of single-channel images alone
        return torch.empty_like(images, memory_format=torch.channels_last).copy_(images)


def lstm(
    input_shape: tuple[int, ...],
    num_classes: int,
    vocabulary: int = 10_000,
    embedding: int = 64,
    width: int = 128,
) -> nn.Module:
    """An LSTM over word numbers [n, length], 0 being padding at the end; one linear layer reads the
    state after each text's last word. `vocabulary` must be at least that of the data."""
    if len(input_shape) != 1:
        raise ValueError(
            f"the data has shape {tuple(input_shape)}; must be word numbers, (length,)"
        )
    return _TextClassifier(num_classes, vocabulary, embedding, width)


class _TextClassifier(nn.Module):
    def __init__(self, num_classes: int, vocabulary: int, embedding: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding, padding_idx=0)
        self.lstm = nn.LSTM(embedding, width, batch_first=True)
        self.scores = nn.Linear(width, num_classes)

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(words))
        last = (words != 0).sum(dim=1).clamp_(min=1).sub_(1)
        scores: Tensor = self.scores(states[torch.arange(len(words), device=words.device), last])
        return scores


def resnet18(
    input_shape: tuple[int, ...], num_classes: int, norm: Literal["batch", "group"] = "batch"
) -> nn.Module:
    """ResNet-18 (He et al. 2016) with a 3x3 stem and no first pooling, as usual for CIFAR.

    `norm = "group"` puts GroupNorm with 32 groups in place of batch norm.
    """
    from torchvision.models import resnet18 as imagenet_resnet18

    _require_image(input_shape)
    if norm not in ("batch", "group"):
        raise ValueError(f"norm: got {norm!r}; must be 'batch' or 'group'")
    layer = nn.BatchNorm2d if norm == "batch" else partial(nn.GroupNorm, 32)
    network: nn.Module = imagenet_resnet18(num_classes=num_classes, norm_layer=layer)
    network.conv1 = nn.Conv2d(input_shape[0], 64, 3, padding=1, bias=False)
    network.maxpool = nn.Identity()
    return network


def _require_image(input_shape: tuple[int, ...]) -> None:
    if len(input_shape) != 3 or min(input_shape[1:]) < 8:
        raise ValueError(
            f"the data has shape {tuple(input_shape)}; must be (channels, height, width) with at "
            "least 8 pixels a side; use 'mlp' or 'logistic' for other data"
        )

"""One client's objective on a FlatModel: minibatches, loss, gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import randomness
from ..data import ClientData
from .calling import (
    Loss,
    classes_of,
    counted,
    loss_of,
    mixed,
    outputs_of,
    targets_that_count,
)
from .flat_model import FlatModel

_EVALUATION_BATCH = 500


class _Part(NamedTuple):
    """What is computed at once: a minibatch, or a micro-batch of one."""

    inputs: Any
    targets: Any
    size: int


def num_steps(
    num_examples: int, batch_size: int, local_steps: int | None, epochs: int | None
) -> int:
    """Return K_i: the local steps, or epochs · ⌈n_i/B⌉ (epochs for the full batch)."""
    if local_steps is not None:
        return local_steps
    per_epoch = -(-num_examples // batch_size) if 0 < batch_size < num_examples else 1
    return (epochs or 0) * per_epoch


def batch_positions(
    num_examples: int,
    batch_size: int,
    local_steps: int | None,
    epochs: int | None,
    seed: int,
) -> list[Tensor]:
    """Return the positions of each minibatch of a round, K_i int64 tensors.

    Local steps walk through freshly shuffled passes and cut them into batches of exactly
    min(B, n_i). An epoch is cut into ⌈n_i/B⌉ batches whose sizes differ by at most one, so that no
    batch of a single example is left over but for B = 2 and an odd n_i (see `outputs_of`).
    Where B is 0 or at least n_i, every batch is the whole data in its own order.
    """
    if not 0 < batch_size < num_examples:
        whole = torch.arange(num_examples)
        return [whole] * num_steps(num_examples, batch_size, local_steps, epochs)
    generator = torch.Generator().manual_seed(seed)
    if local_steps is not None:
        passes = -(-local_steps * batch_size // num_examples)
        order = [torch.randperm(num_examples, generator=generator) for _ in range(passes)]
        return list(torch.split(torch.cat(order)[: local_steps * batch_size], batch_size))
    per_epoch = -(-num_examples // batch_size)
    return [
        part
        for _ in range(epochs or 0)
        for part in torch.randperm(num_examples, generator=generator).tensor_split(per_epoch)
    ]


class _Mean(NamedTuple):
    """The mean loss of a minibatch; NaN where none of the targets of its classes counts."""

    loss: Tensor
    size: int
    classes: Tensor | None = None  # None: it is no NaN for that reason


class ModelObjective:
    """F_i of one client for one round, evaluated on a FlatModel that it borrows.

    Every rule sees the same ∇F: the gradient of the loss, clipped to the norm `clip_norm` if that
    is above 0, plus weight_decay · y, and with `gradient_momentum` above 0 the sum of all such
    gradients of the round so far, each older one multiplied by it once more (as torch.optim.SGD
    does after clip_grad_norm_). The n-th gradient of a batch continues the n-th of the batch
    before, so that rules which compare two points have a sum for each. With `compares_points` all
    gradients of a batch see the same draws of the generators, as of dropout, and the same buffers,
    which end as the last of them leaves them. Local parameters take one
    step of plain SGD a batch, along its last gradient, with weight decay and nothing else, after
    all gradients of that batch. `mean_loss` is the mean
    minibatch loss weighted by examples, over all gradients taken so far of batches in which any
    target counts.

    With `micro_batch_size` above 0 no more examples than that are computed at once, and a batch's
    gradient is the mean over its parts. `precision` "bf16" computes outputs and loss in bfloat16;
    parameters and gradients are float32.
    """

    def __init__(
        self,
        model: FlatModel,
        loss: Loss,
        data: ClientData,
        positions: list[Tensor],
        weight_decay: float = 0.0,
        clip_norm: float = 0.0,
        gradient_momentum: float = 0.0,
        seed: int = 0,
        local_learning_rate: float = 0.0,
        micro_batch_size: int = 0,
        precision: str = "float32",
        *,
        compares_points: bool = False,
    ) -> None:
        self._model = model
        self._micro_batch_size = micro_batch_size
        self._precision = precision
        self._local_learning_rate = local_learning_rate
        self._loss = loss
        self._data = data
        self._positions = positions
        self._weight_decay = weight_decay
        self._clip_norm = clip_norm
        self._gradient_momentum = gradient_momentum
        self._seed = seed
        self._sums: list[Tensor] = []  # of local momentum
        self._place = 0  # of the next gradient among those of this batch
        self._compares_points = compares_points
        self._at_first: tuple[Any, dict[str, Tensor]]  # generators and buffers, as a batch begins
        self._local_step: Tensor | None = None  # of the local parameters, at a batch's end
        self._losses: list[_Mean] = []
        model.module.train()

    @property
    def num_examples(self) -> int:
        return self._data.num_examples

    @property
    def num_steps(self) -> int:
        return len(self._positions)

    def working_copy(self, x: Tensor) -> Tensor:
        return self._model.vector.copy_(x)

    def batches(self) -> Iterator[list[_Part]]:
        self._sums.clear()
        for batch in self._take(self._positions):
            self._place = 0
            self._local_step = None
            yield batch
            self._step_local(batch)

    def _take(self, positions: list[Tensor]) -> Iterator[list[_Part]]:
        # the same object for the same rows, which then are moved to the device once
        distinct = {id(rows): parts_of(rows, self._micro_batch_size) for rows in positions}
        parts = [distinct[id(rows)] for rows in positions]
        taken = self._data.batches([rows for batch in parts for rows in batch], self._model.device)
        for batch in parts:
            yield [_Part(*next(taken), len(rows)) for rows in batch]

    def _step_local(self, batch: list[_Part]) -> None:
        if not self._local_learning_rate:
            return
        step = self._local_step
        if step is None:  # the rule needed no gradient
            self._loss_gradient(self._model.vector, batch, len(batch))
            self._losses.pop()
            step = self._next_local_step()
        self._model.local_vector.sub_(step)

    def _next_local_step(self) -> Tensor:
        step = self._model.local_gradient * self._local_learning_rate
        decay = self._local_learning_rate * self._weight_decay
        return step.add_(self._model.local_vector, alpha=decay)

    def gradient(self, y: Tensor, batch: list[_Part]) -> Tensor:
        place, self._place = self._place, self._place + 1
        if self._compares_points:
            self._see_what_the_first_saw(place)
        gradient = self._regularised(self._loss_gradient(y, batch, len(batch)))
        if self._local_learning_rate:
            self._local_step = self._next_local_step()
        if not self._gradient_momentum:
            return gradient
        if place == len(self._sums):
            self._sums.append(torch.zeros_like(gradient))
        total = self._sums[place].mul_(self._gradient_momentum).add_(gradient)
        return gradient.copy_(total)

    def _see_what_the_first_saw(self, place: int) -> None:
        model = self._model
        if place == 0:
            self._at_first = randomness.taken(model.device), model.read_buffers()
            return
        generators, buffers = self._at_first
        randomness.put_back(model.device, generators)
        if buffers:
            model.write_buffers(buffers)

    @property
    def last_loss(self) -> Tensor:
        loss, _, classes = self._losses[-1]
        if classes is None:
            return loss
        return torch.where(targets_that_count(self._loss, classes).any(), loss, 0.0)

    def full_gradient(self, y: Tensor, num_examples: int = 0) -> Tensor:
        rows = torch.arange(self.num_examples)
        if 0 < num_examples < self.num_examples:
            generator = torch.Generator().manual_seed(self._seed)
            rows = torch.randperm(self.num_examples, generator=generator)[:num_examples]
        parts = evaluation_chunks(rows, self._micro_batch_size)
        taken = self._data.batches(parts, self._model.device)
        batch = (_Part(*next(taken), len(part)) for part in parts)  # one at a time in memory
        return self._regularised(self._loss_gradient(y, batch, len(parts)).clone())

    def _loss_gradient(self, y: Tensor, batch: Iterable[_Part], num_parts: int) -> Tensor:
        """Take the gradient of the mean over all targets of a batch that count; 0 if none does."""
        model = self._model
        if y is not model.vector:
            model.vector.copy_(y)
        model.zero_gradient()
        means = self._backward_all(batch) if num_parts > 1 else self._backward(*batch)
        self._losses.append(means)
        return model.gradient

    def _backward(self, part: _Part) -> _Mean:
        outputs, loss = self._forward(part)
        loss.backward()  # type: ignore[no-untyped-call]
        return _Mean(loss.detach(), part.size, classes_of(self._loss, outputs, part.targets))

    def _backward_all(self, parts: Iterable[_Part]) -> _Mean:
        model = self._model
        total, count = (torch.zeros((), device=model.device) for _ in range(2))
        size = 0
        for part in parts:
            outputs, loss = self._forward(part)
            weight = counted(self._loss, outputs, part.targets, part.size)
            if weight:  # else it is the mean over no target
                (loss * weight).backward()  # type: ignore[no-untyped-call]
                total, count = total + loss.detach() * weight, count + weight
                size += part.size
        if size:
            total = total / count
            for gradient in (model.gradient, model.local_gradient):
                gradient.div_(count)
        return _Mean(total, size)

    def _forward(self, part: _Part) -> tuple[Any, Tensor]:
        with mixed(self._model.device, self._precision):
            outputs = outputs_of(self._model.module, part.inputs, part.size)
            return outputs, loss_of(self._loss, outputs, part.targets)

    def _regularised(self, gradient: Tensor) -> Tensor:
        if self._clip_norm:
            norm = torch.linalg.vector_norm(gradient)
            gradient.mul_(self._clip_norm / norm.clamp_(min=self._clip_norm))
        if self._weight_decay:
            gradient.add_(self._model.vector, alpha=self._weight_decay)
        return gradient

    @property
    def mean_loss(self) -> float:
        found = _mean(self._losses)
        if not math.isnan(found):
            return found
        return _mean(
            [
                mean
                for mean in self._losses
                if mean.classes is None or bool(targets_that_count(self._loss, mean.classes).any())
            ]
        )


def _mean(means: list[_Mean]) -> float:
    means = [mean for mean in means if mean.size]
    if not means:
        return 0.0
    values = torch.stack([mean.loss for mean in means])
    sizes = values.new_tensor([mean.size for mean in means])
    return float(values.mul(sizes).sum() / sizes.sum())


def evaluation_chunks(rows: Tensor, micro_batch_size: int = 0) -> list[Tensor]:
    """Return the parts of these rows that are evaluated at once."""
    return parts_of(rows, min(micro_batch_size or _EVALUATION_BATCH, _EVALUATION_BATCH))


def parts_of(rows: Tensor, size: int) -> list[Tensor]:
    """Return rows in parts of at most `size`, or in one where that is 0.

    They are of equal size, so that none is left with one example, which batch norm refuses.
    """
    return list(torch.tensor_split(rows, -(-len(rows) // size))) if 0 < size < len(rows) else [rows]

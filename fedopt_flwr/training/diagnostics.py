"""What theorems speak of and no client knows alone: f and ∇f over the data of all clients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..data import ClientData
from .calling import Loss, counted, loss_of, outputs_of
from .evaluation import evaluating
from .flat_model import FlatModel
from .objective import evaluation_chunks


@dataclass(frozen=True)
class Diagnosis:
    """Σ p_i f_i(x), without weight decay as every loss that is recorded, and ‖∇f(x)‖ with it."""

    global_train_loss: float
    gradient_norm: float


def diagnose(
    model: FlatModel,
    parts: Iterable[tuple[float, ClientData]],
    loss: Loss,
    *,
    weight_decay: float = 0.0,
    use_batch_statistics: bool = False,
    micro_batch_size: int = 0,
) -> Diagnosis:
    """Measure the model as it stands, as it is evaluated: no dropout, no clipping.

    `parts` are each client's p_i and data. It costs a pass with gradients over all of them.
    """
    value = 0.0
    gradient = torch.zeros_like(model.vector)
    # cuDNN's recurrent layers have no gradient in evaluation
    cudnn = torch.backends.cudnn.flags(enabled=False)
    with evaluating(model, use_batch_statistics), torch.enable_grad(), cudnn:
        for share, data in parts:
            chunks = evaluation_chunks(torch.arange(data.num_examples), micro_batch_size)
            model.gradient.zero_()
            total = count = 0.0
            for rows, batch in zip(chunks, data.batches(chunks, model.device), strict=True):
                inputs, targets = batch
                outputs = outputs_of(model.module, inputs, len(rows))
                weight = float(counted(loss, outputs, targets, len(rows)))
                if weight:  # the mean over no target is NaN
                    mean = loss_of(loss, outputs, targets)
                    (mean * weight).backward()  # type: ignore[no-untyped-call]
                    total, count = total + float(mean.detach()) * weight, count + weight
            if count:
                gradient.add_(model.gradient, alpha=share / count)
                value += share * total / count
    gradient.add_(model.vector, alpha=weight_decay)
    return Diagnosis(value, float(torch.linalg.vector_norm(gradient)))

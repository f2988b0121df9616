"""What theorems speak of and no client knows alone, as each measures its part: f_i and ∇f_i."""

from __future__ import annotations

import torch
from torch import Tensor

from ..data import ClientData
from .calling import Loss, counted, loss_of, outputs_of
from .evaluation import evaluating
from .flat_model import FlatModel
from .objective import evaluation_chunks


def diagnose(
    model: FlatModel,
    data: ClientData,
    loss: Loss,
    *,
    use_batch_statistics: bool = False,
    micro_batch_size: int = 0,
) -> tuple[float, Tensor]:
    """Return f_i, the mean loss over all of `data` at the model as it stands, and its gradient, a
    new vector; both without weight decay, and 0 where no target counts.

    The model is measured as it is evaluated: no dropout, no clipping. It costs one pass with
    gradients over the data.
    """
    chunks = evaluation_chunks(torch.arange(data.num_examples), micro_batch_size)
    model.gradient.zero_()
    total = count = 0.0
    # cuDNN's recurrent layers have no gradient in evaluation
    cudnn = torch.backends.cudnn.flags(enabled=False)
    with evaluating(model, use_batch_statistics), torch.enable_grad(), cudnn:
        for rows, batch in zip(chunks, data.batches(chunks, model.device), strict=True):
            inputs, targets = batch
            outputs = outputs_of(model.module, inputs, len(rows))
            weight = float(counted(loss, outputs, targets, len(rows)))
            if weight:  # the mean over no target is NaN
                mean = loss_of(loss, outputs, targets)
                (mean * weight).backward()  # type: ignore[no-untyped-call]
                total, count = total + float(mean.detach()) * weight, count + weight
    count = count or 1.0
    return total / count, model.gradient.div(count)

"""Metrics by name and what any metric returns: a value of the whole data, or none.

A built-in metric either adds up sums over the parts of the data, which give the value of the whole
exactly, or is called once with all of it, as your own are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .calling import IGNORED, scores_of

Metric = Callable[[Any, Any], Any]  # (outputs, targets) -> a number, None, or a dict of those
_LARGEST_EXPONENT = 700.0  # whose power is still a float
Values = dict[str, float | None]  # by name; None: no value, as AUROC has none with one class


@dataclass(frozen=True)
class Summed:
    """A metric of sums that may be added up over the parts of the data, called as any other."""

    sums: Callable[[Any, Any], Tensor]
    of_sums: Callable[[Tensor], float | None]

    def __call__(self, outputs: Any, targets: Any) -> float | None:
        return self.of_sums(self.sums(outputs, targets))


def _decided(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return predicted and true classes of the targets that count, both of shape [count].

    Outputs of shape [n, C, ...] have a score for each class, those of shape [n] or [n, 1] a logit
    of class 1.
    """
    if targets.is_floating_point() and outputs.numel() != targets.numel():
        raise ValueError(f"targets of {targets.dtype} are no class indices")
    if outputs.numel() == targets.numel():
        predicted = (outputs > 0).long().reshape(-1)
    else:
        predicted = outputs.argmax(dim=1).reshape(-1)
    true = targets.reshape(-1).long()
    counts = true != IGNORED
    return predicted[counts], true[counts]


def _require_one_label(outputs: Tensor, targets: Tensor) -> None:
    if outputs.ndim == 2 and outputs.shape[1] > 1 and outputs.shape == targets.shape:
        raise ValueError(
            f"targets of shape {list(targets.shape)} have a value for each class; it must be one "
            "class index an example, or take a metric of your own, such as one of a label's column"
        )


def _hits(outputs: Tensor, targets: Tensor) -> Tensor:
    if targets.is_floating_point():
        _require_one_label(outputs, targets)
    predicted, true = _decided(outputs, targets)
    return torch.stack([(predicted == true).sum(), torch.as_tensor(len(true)).to(true.device)])


def _ratio(sums: Tensor) -> float | None:
    part, whole = float(sums[0]), float(sums[1])
    return part / whole if whole else None


def _confusion(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return how often each true class (row) was taken for each class (column), [C, C]."""
    _require_one_label(outputs, targets)
    predicted, true = _decided(outputs, targets)
    classes = max(outputs.shape[1] if outputs.ndim > 1 else 2, 2)
    return torch.bincount(true * classes + predicted, minlength=classes**2).view(classes, classes)


def _of_confusion(name: str) -> Callable[[Tensor], float | None]:
    """Return a score of scikit-learn as one of a confusion matrix: its cells are the examples."""

    def score(counts: Tensor) -> float | None:
        from sklearn import metrics

        cells = counts.cpu().numpy()
        true, predicted = cells.nonzero()
        if not len(true):
            return None
        weights = cells[true, predicted]
        if name == "f1":
            macro = {"average": "macro", "zero_division": 0.0}
            return float(metrics.f1_score(true, predicted, sample_weight=weights, **macro))
        hits = metrics.recall_score(
            true, predicted, sample_weight=weights, average=None, labels=np.unique(true)
        )
        return float(hits.mean())

    return score


def _auroc(outputs: Tensor, targets: Tensor) -> float | None:
    """Return the area under the ROC curve, with several classes the mean of each against the rest.

    The mean is over the classes that occur; there is none where all examples are of one class.
    """
    from sklearn.metrics import roc_auc_score

    _require_one_label(outputs, targets)
    counts = targets.reshape(-1).long() != IGNORED
    true = targets.reshape(-1).long()[counts].numpy()
    if not torch.isfinite(outputs).all():
        return None
    present = np.unique(true)
    if len(present) < 2:
        return None
    if outputs.numel() == targets.numel():
        return float(roc_auc_score(true, outputs.reshape(-1)[counts].float().numpy()))
    scores = torch.softmax(outputs.double(), dim=1)[counts].numpy()
    if outputs.shape[1] == 2:
        return float(roc_auc_score(true, scores[:, 1]))
    return float(np.mean([roc_auc_score(true == c, scores[:, c]) for c in present]))


def _errors(power: int) -> Callable[[Any, Any], Tensor]:
    def sums(outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.shape != targets.shape and outputs.shape != (*targets.shape, 1):
            raise ValueError(
                f"outputs of shape {list(outputs.shape)} and targets of shape "
                f"{list(targets.shape)} must have one shape"
            )
        differences = outputs.reshape(targets.shape).double() - targets.double()
        count = torch.as_tensor(differences.numel()).to(differences)
        return torch.stack([differences.abs().pow(power).sum(), count])

    return sums


def _surprise(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the cross entropies of the targets that count, and their number."""
    losses = functional.cross_entropy(outputs.float(), targets, reduction="sum")
    return torch.stack([losses.double(), (targets != IGNORED).sum().double()])


def _perplexity(sums: Tensor) -> float | None:
    mean = _ratio(sums)
    return None if mean is None else math.exp(min(mean, _LARGEST_EXPONENT))


def _of_scores(metric: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda outputs, targets: metric(*scores_of(outputs, targets))


accuracy = Summed(_of_scores(_hits), _ratio)
METRICS: dict[str, Metric] = {
    "accuracy": accuracy,  # share of examples whose largest output is the target, in [0, 1]
    "balanced_accuracy": Summed(
        _of_scores(_confusion), _of_confusion("balanced_accuracy")
    ),  # mean recall
    "f1": Summed(_of_scores(_confusion), _of_confusion("f1")),  # mean over the classes
    "auroc": _of_scores(_auroc),
    "mse": Summed(_of_scores(_errors(2)), _ratio),
    "mae": Summed(_of_scores(_errors(1)), _ratio),
    "perplexity": Summed(_of_scores(_surprise), _perplexity),  # exp of the mean cross entropy
}


def add_values(values: Values, name: str, found: Any) -> None:
    """Note what a metric returned: a number under its name, or each entry of a mapping.

    What is None or not finite has no value. Raises ValueError for a name that is taken, and
    what `float` raises.
    """
    entries = found if isinstance(found, Mapping) else {name: found}
    for key, value in entries.items():
        if str(key) in values:
            raise ValueError(f"two metrics are called {str(key)!r}")
        number = None if value is None else float(value)
        values[str(key)] = number if number is not None and math.isfinite(number) else None

"""Metrics: of the whole data, several at once, without a value where there is none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import linear_model, small_config, three_datasets
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sklearn_metrics
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from fedopt_flwr import ConfigError, simulate
from fedopt_flwr.config.sections import KNOWN_BETTER
from fedopt_flwr.data import as_client_data
from fedopt_flwr.errors import FedoptWarning
from fedopt_flwr.training.evaluation import evaluate
from fedopt_flwr.training.flat_model import FlatModel
from fedopt_flwr.training.joining import measured
from fedopt_flwr.training.metrics import METRICS, add_values


class Scores(nn.Module):
    """Returns its inputs, so that a test chooses the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.zero


def values_of(outputs: Tensor, targets: Tensor, *names: str) -> dict[str, float | None]:
    data = as_client_data(TensorDataset(outputs, targets))
    loss: Any = functional.mse_loss if targets.is_floating_point() else functional.cross_entropy
    return evaluate(FlatModel(Scores()), data, loss, {n: METRICS[n] for n in names}).metrics


@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(2, 1700))
@settings(max_examples=30, deadline=None)
def test_values_are_those_of_the_whole_data_in_several_parts(
    seed: int, classes: int, size: int
) -> None:
    rng = np.random.default_rng(seed)
    outputs = rng.normal(size=(size, classes)).astype(np.float32)
    targets = rng.integers(0, classes, size)
    names = ("accuracy", "balanced_accuracy", "f1", "auroc")
    found = values_of(torch.from_numpy(outputs), torch.from_numpy(targets), *names)
    predicted = outputs.argmax(1)
    assert found["accuracy"] == pytest.approx((predicted == targets).mean())
    recalls = [(predicted[targets == c] == c).mean() for c in np.unique(targets)]
    assert found["balanced_accuracy"] == pytest.approx(np.mean(recalls))
    f1 = sklearn_metrics.f1_score(targets, predicted, average="macro")
    assert found["f1"] == pytest.approx(f1)
    if len(np.unique(targets)) < 2:
        assert found["auroc"] is None
    elif len(np.unique(targets)) == classes > 2:
        scores = np.exp(outputs.astype(float))
        scores /= scores.sum(1, keepdims=True)
        known = sklearn_metrics.roc_auc_score(targets, scores, multi_class="ovr")
        assert found["auroc"] == pytest.approx(known)


def test_f1_is_no_mean_over_parts() -> None:
    """The rare class is in one part alone: 1 of 3 found, none wrongly."""
    outputs = torch.tensor([[1.0, 0.0]] * 1000)
    targets = torch.zeros(1000, dtype=torch.int64)
    targets[:3] = 1
    outputs[0] = torch.tensor([0.0, 1.0])
    whole = (2 * 997 / (2 * 997 + 2) + 2 * 1 / (2 * 1 + 2)) / 2
    assert values_of(outputs, targets, "f1")["f1"] == pytest.approx(whole)


def test_two_classes_by_one_logit() -> None:
    logits = torch.tensor([[-1.0], [2.0], [0.5], [-0.5]])
    targets = torch.tensor([0, 1, 0, 1]).view(4, 1).float()
    found = values_of(logits, targets, "accuracy", "f1", "auroc", "balanced_accuracy")
    assert found == {"accuracy": 0.5, "f1": 0.5, "auroc": 0.75, "balanced_accuracy": 0.5}


def test_errors_of_regression() -> None:
    outputs, targets = torch.tensor([[1.0], [2.0], [5.0]]), torch.tensor([[1.0], [4.0], [2.0]])
    found = values_of(outputs, targets, "mse", "mae")
    assert found == {"mse": pytest.approx(13 / 3), "mae": pytest.approx(5 / 3)}
    with pytest.raises(
        ValueError, match=r"outputs of shape \[3, 1\] and targets of shape \[3, 2\]"
    ):
        METRICS["mse"](outputs, torch.zeros(3, 2))


def test_targets_that_losses_ignore_do_not_count() -> None:
    outputs = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    targets = torch.tensor([1, 1, -100])
    assert METRICS["accuracy"](outputs, targets) == 0.5
    assert METRICS["balanced_accuracy"](outputs, targets) == 0.5
    assert METRICS["accuracy"](outputs, torch.full((3,), -100)) is None
    assert METRICS["f1"](outputs, torch.full((3,), -100)) is None


def test_what_has_no_value_is_left_out() -> None:
    values: dict[str, float | None] = {}
    add_values(values, "own", {"a": 1, "b": None, "c": math.nan, "d": torch.tensor(2.0)})
    add_values(values, "e", math.inf)
    assert values == {"a": 1.0, "b": None, "c": None, "d": 2.0, "e": None}
    with pytest.raises(ValueError, match="two metrics are called 'a'"):
        add_values(values, "a", 3)


def run(**sections: Any) -> Any:
    metric = sections.pop("metric", None)
    test = sections.pop("test", three_datasets()[0])
    config = small_config(**sections)
    return simulate(config, linear_model, three_datasets(), test, metric=metric)


def test_several_metrics_are_recorded_by_name() -> None:
    result = run(evaluation={"metrics": ["f1", "accuracy", "auroc"]})
    last = result.rounds[-1]
    assert list(last.test_metrics) == ["accuracy", "f1", "auroc"]
    assert last.test_metric == last.test_accuracy == last.test_metrics["accuracy"]
    assert result.summary["final_test_metrics"] == last.test_metrics


def test_a_metric_may_return_a_dict() -> None:
    def metric(outputs: Tensor, targets: Tensor) -> dict[str, float]:
        return {"examples": len(targets), "accuracy": 0.25, "none": math.nan}

    last = run(metric=metric).rounds[-1]
    assert last.test_metrics == {"examples": 9.0, "accuracy": 0.25}
    assert (last.test_metric, last.test_accuracy) == (9.0, 0.25)


def test_one_class_has_no_auroc_and_the_run_continues() -> None:
    x, y = three_datasets()[0].tensors
    test = TensorDataset(x, torch.zeros_like(y))
    result = run(test=test, model={"metric": "auroc"}, evaluation={"metrics": ["accuracy"]})
    assert all("auroc" not in record.test_metrics for record in result.rounds)
    assert result.rounds[-1].test_metric is None
    assert result.rounds[-1].test_accuracy is not None


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        (
            {"evaluation": {"metrics": ["f2"]}},
            "evaluation.metrics: unknown 'f2'; Known: accuracy, auroc, balanced_accuracy, f1",
        ),
        ({"evaluation": {"metrics": ["mse"]}}, "evaluation.metrics: 'mse': failed on .*one shape"),
        ({"evaluation": {"metrics": ["no:where"]}}, "evaluation.metrics: cannot import 'no:where'"),
    ],
)
def test_metrics_that_cannot_be_are_refused(sections: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        run(**sections)


def test_an_own_metric_may_not_take_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ownmetrics.py").write_text("def two(o, t):\n    return {'accuracy': 1.0}\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"ownmetrics:two.*two metrics are called 'accuracy'"):
        run(evaluation={"metrics": ["ownmetrics:two"]})


def test_accuracy_is_left_out_for_other_targets() -> None:
    x, _ = three_datasets()[0].tensors
    data = [TensorDataset(x, torch.zeros(len(x), 1)) for _ in range(3)]
    config = small_config(evaluation={"metrics": ["mse"]})

    def model() -> nn.Module:
        return nn.Linear(x.shape[1], 1)

    with pytest.warns(FedoptWarning, match="not; mse is measured"):
        result = simulate(config, model, data, data[0], loss=functional.mse_loss)
    last = result.rounds[-1]
    assert last.test_metric == last.test_metrics["mse"] == pytest.approx(last.test_loss)
    assert last.test_accuracy is None


def test_auroc_of_what_is_not_finite_or_ignored() -> None:
    outputs, targets = (
        torch.tensor([[2.0, 0.0], [0.0, 1.0], [5.0, 0.0]]),
        torch.tensor([0, 1, -100]),
    )
    assert METRICS["auroc"](outputs, targets) == 1.0
    assert METRICS["auroc"](outputs / 0, targets) is None


def test_a_dict_of_parts_that_cannot_be_joined_is_averaged_by_name() -> None:
    def metric(outputs: Tensor, targets: Tensor) -> dict[str, float | None]:
        return {"width": float(outputs.shape[1]), "none": None}

    parts = [(torch.zeros(2, 3), torch.zeros(2)), (torch.zeros(1, 6), torch.zeros(1))]
    with pytest.warns(FedoptWarning, match="cannot be joined"):
        found = measured({"own": metric}, parts, [2, 1])
    assert found == {"own": {"width": 4.0, "none": None}}


def test_of_every_named_metric_it_is_known_which_values_are_better() -> None:
    assert METRICS.keys() <= KNOWN_BETTER.keys()


@pytest.mark.parametrize("name", ["accuracy", "balanced_accuracy", "f1", "auroc"])
def test_several_labels_an_example_are_refused(name: str) -> None:
    outputs, targets = torch.randn(6, 4), torch.eye(4)[[0, 1, 2, 3, 0, 1]]
    with pytest.raises(ValueError, match=r"shape \[6, 4\] have a value for each class; it must be"):
        METRICS[name](outputs, targets)

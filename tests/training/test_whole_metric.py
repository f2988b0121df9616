"""A metric is that of the whole test set, not the mean over its parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import CLASSES, FEATURES, linear_model, small_config, softmax_clients, three_datasets
from sklearn.metrics import f1_score, roc_auc_score
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from fedopt_flwr import ConfigError, simulate
from fedopt_flwr.data import as_client_data
from fedopt_flwr.errors import FedoptWarning
from fedopt_flwr.flower import FederatedClient, MemoryStates, ModelPool
from fedopt_flwr.training.evaluation import evaluate
from fedopt_flwr.training.flat_model import FlatModel
from fedopt_flwr.training.joining import joined
from fedopt_flwr.training.metrics import accuracy

SIZE = 1203  # three parts of 401


def sorted_test(rare: int = 0) -> TensorDataset:
    """Examples sorted by class, as many published files are; `rare` of class 1, if that is > 0."""
    x, y = (torch.from_numpy(part) for part in softmax_clients([SIZE])[0])
    labels = (y > 0).long()
    if rare:
        labels = torch.zeros(SIZE).long()
        labels[-rare:] = 1
    order = labels.argsort(stable=True)
    return TensorDataset(x[order], labels[order])


def auc(outputs: Tensor, targets: Tensor) -> float:
    """As scikit-learn's was for long: an error where there is only one class."""
    if len(targets.unique()) < 2:
        raise ValueError("only one class")
    return roc_auc_score(targets.numpy(), outputs[:, 1].numpy())


def f1(outputs: Tensor, targets: Tensor) -> float:
    return f1_score(targets.numpy(), (outputs[:, 1] > outputs[:, 0]).numpy())


@pytest.mark.parametrize("rare", [0, 1])
@pytest.mark.parametrize("metric", [auc, f1])
def test_a_metric_is_of_all_outputs_whatever_their_order(metric: Any, rare: int) -> None:
    """With one example of a class, most parts and samples of the test data have none of it."""
    test = sorted_test(rare)
    result = simulate(
        small_config(),
        model=linear_model,
        client_data=three_datasets(),
        test_data=test,
        metric=metric,
    )
    with torch.no_grad():
        expected = metric(result.model.eval()(test.tensors[0]), test.tensors[1])
    assert result.rounds[-1].test_metric == expected


def test_a_client_evaluates_by_the_same_function() -> None:
    test, model = sorted_test(), FlatModel(linear_model())
    pool = ModelPool([model], functional.cross_entropy, metrics={"metric": f1})
    client = FederatedClient(0, as_client_data(test), pool, MemoryStates())
    _, _, report = client.evaluate(model.state_arrays(), {})
    with torch.no_grad():
        assert report["metric"] == f1(linear_model()(test.tensors[0]), test.tensors[1])


def test_the_metric_is_called_once_and_not_with_tensors_that_the_module_uses_again() -> None:
    kept = torch.zeros(401, CLASSES)
    seen: list[Tensor] = []

    class Reusing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear_model()

        def forward(self, x: Tensor) -> Tensor:
            return kept.copy_(self.layer(x))

    def metric(outputs: Tensor, targets: Tensor) -> float:
        seen.append(outputs)
        return 0.0

    test = sorted_test()
    loss = functional.cross_entropy
    evaluate(FlatModel(Reusing()), as_client_data(test), loss, {"own": metric})
    (outputs,) = seen
    torch.testing.assert_close(outputs, linear_model()(test.tensors[0]).detach())


def test_accuracy_is_as_it_was() -> None:
    test, model = sorted_test(), FlatModel(linear_model())
    own = lambda outputs, targets: accuracy(outputs, targets)  # noqa: E731
    data, loss = as_client_data(test), functional.cross_entropy
    found, expected = (evaluate(model, data, loss, {"m": metric}) for metric in (accuracy, own))
    assert (found.loss, found.main) == pytest.approx((expected.loss, expected.main))
    with torch.no_grad():
        outputs = linear_model()(test.tensors[0])
    share = float((outputs.argmax(1) == test.tensors[1]).double().mean())
    assert found.main == pytest.approx(share)


@pytest.mark.parametrize("metric", [lambda o, t: "good", lambda o, t: [1.0, 2.0]])
def test_a_metric_that_fails_on_all_of_the_test_data_is_refused(metric: Any) -> None:
    with pytest.raises(ConfigError, match=r"model.metric: failed on .*of the whole test set"):
        simulate(
            small_config(),
            model=linear_model,
            client_data=three_datasets(),
            test_data=sorted_test(),
            metric=metric,
        )


class Heads(NamedTuple):
    first: Tensor
    second: Tensor


class Named(dict[str, Any]):
    """Outputs as Hugging Face's models return them: a dictionary with attributes."""

    @property
    def logits(self) -> Tensor:
        return self["logits"]


def test_parts_of_every_kind_are_joined() -> None:
    one, two = torch.arange(6.0).view(2, 3), torch.arange(3.0).view(1, 3)
    whole = torch.cat([one, two])
    sizes = [2, 1]
    assert torch.equal(joined([one, two], sizes), whole)
    heads = joined([Heads(one, one), Heads(two, -two)], sizes)
    assert torch.equal(heads.first, whole)
    assert torch.equal(heads.second, torch.cat([one, -two]))
    alike = joined([Heads(one, -one), Heads(one, -one)], [2, 2])  # two outputs, two examples
    assert torch.equal(alike.second, torch.cat([-one, -one]))
    named = joined([Named(logits=one, loss=torch.tensor(1.0)), Named(logits=two, loss=None)], sizes)
    assert torch.equal(named.logits, whole)
    assert named["loss"] == [torch.tensor(1.0), None]
    nested = joined([{"a": [one, (one,)]}, {"a": [two, (two,)]}], sizes)
    assert torch.equal(nested["a"][1][0], whole)
    # a list with one entry an example stays one: boxes of each picture
    boxes = joined([[one, two], [two]], sizes)
    assert [len(item) for item in boxes] == [2, 1, 1]
    assert joined([["a", "b"], ["c"]], sizes) == ["a", "b", "c"]
    assert joined([3, 4], sizes) == [3, 4]
    assert joined([[one]], [2])[0] is one  # what is whole is passed on as it is


class Padded(Dataset):
    """Pairs that each batch pads to its longest: the parts have unlike shapes."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        width = FEATURES + max(indices) // 500
        return [(torch.full((width,), float(i % 7)), i % CLASSES) for i in indices]


def test_parts_that_cannot_be_joined_count_by_their_examples_and_are_warned_of() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.unsqueeze(2)).transpose(1, 2)  # [batch, classes, length]

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs.mean(dim=2), targets)

    def width(outputs: Tensor, targets: Tensor) -> float:
        return float(outputs.shape[2])

    data = as_client_data(Padded())
    with pytest.warns(FedoptWarning, match="cannot be joined .* mean over parts of 401 examples"):
        value = evaluate(FlatModel(Wide()), data, loss, {"width": width}).main
    assert value == pytest.approx(np.mean([FEATURES, FEATURES + 1, FEATURES + 2]))


def test_targets_that_are_mappings_reach_the_metric_as_one() -> None:
    class Detection(Dataset):
        def __len__(self) -> int:
            return SIZE

        def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Any]]:
            return torch.ones(FEATURES), {"label": index % CLASSES, "name": f"picture {index}"}

    seen: list[Mapping[str, Any]] = []

    def metric(outputs: Tensor, targets: Mapping[str, Any]) -> float:
        seen.append(targets)
        return 1.0

    def loss(outputs: Tensor, targets: Mapping[str, Any]) -> Tensor:
        return functional.cross_entropy(outputs, targets["label"])

    evaluate(FlatModel(linear_model()), as_client_data(Detection()), loss, {"own": metric})
    (targets,) = seen
    assert targets["label"].tolist() == [i % CLASSES for i in range(SIZE)]
    assert targets["name"] == [f"picture {i}" for i in range(SIZE)]

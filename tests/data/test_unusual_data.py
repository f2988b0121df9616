"""Good data and modules of kinds that are not the usual: they train, and to the right numbers."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import (
    CLASSES,
    FEATURES,
    as_datasets,
    linear_model,
    small_config,
    softmax_clients,
    three_datasets,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, Subset, TensorDataset

from fedopt_flwr import ConfigError, DataError, RunConfig, simulate
from fedopt_flwr.algorithms import ALGORITHMS
from fedopt_flwr.data import FederatedData, as_client_data
from fedopt_flwr.errors import FedoptWarning
from fedopt_flwr.training.flat_model import FlatModel
from fedopt_flwr.training.objective import ModelObjective


class Shifted(TensorDataset):
    """A data set with a transform of its own, in place of its tensors' values."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return x + 1, y


def test_a_transform_of_the_users_data_set_counts() -> None:
    plain = three_datasets()
    shifted = [Shifted(*d.tensors) for d in plain]
    by_hand = [TensorDataset(d.tensors[0] + 1, d.tensors[1]) for d in plain]
    results = [
        simulate(small_config(), model=linear_model, client_data=data).parameters
        for data in (shifted, by_hand, plain)
    ]
    np.testing.assert_array_equal(results[0], results[1])
    assert not np.array_equal(results[0], results[2])
    inner = as_client_data(Subset(Subset(shifted[0], [1, 2, 3]), [2]))
    ((inputs, _),) = list(inner.batches([torch.tensor([0])], torch.device("cpu")))
    torch.testing.assert_close(inputs[0], plain[0].tensors[0][3] + 1)


def test_regression_and_named_inputs_train() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(FEATURES, 1)

        def forward(self, inputs: dict[str, Tensor]) -> Tensor:
            return self.layer(inputs["signal"])

    data = [
        [({"signal": x}, x[:1]) for x in dataset.tensors[0]] for dataset in three_datasets()
    ]  # a list of pairs is a map-style data set
    result = simulate(small_config(), model=Named, client_data=data, loss=functional.mse_loss)
    assert result.summary["failures"] == 0
    assert result.rounds[1].train_loss < result.rounds[0].train_loss


def test_numpys_numbers_are_numbers() -> None:
    config = RunConfig(
        federation={"num_clients": np.int64(30), "seed": np.int32(4)},
        training={"weight_decay": np.float32(0.5)},
    )
    assert (config.federation.num_clients, config.federation.seed) == (30, 4)
    assert config.training.weight_decay == 0.5


class Noisy(Dataset):
    """Augments with torch's, NumPy's and Python's generators, as transforms of images do."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.data[index]
        noise = torch.randn(1) + np.random.normal() + random.gauss(0, 1)  # noqa: NPY002
        return x + 0.1 * noise.float(), y


def test_random_transforms_are_seeded_by_client_and_round() -> None:
    data = [Noisy(d) for d in three_datasets()]
    one = simulate(small_config(), model=linear_model, client_data=data)
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    random.seed(5)
    after = torch.get_rng_state(), random.getstate()
    with pytest.warns(FedoptWarning, match="workers: got 2"):
        two = simulate(small_config(), model=linear_model, client_data=data, workers=2)
    np.testing.assert_array_equal(one.parameters, two.parameters)
    assert torch.equal(torch.get_rng_state(), after[0])
    assert random.getstate() == after[1]
    plain = simulate(small_config(), model=linear_model, client_data=three_datasets()).parameters
    assert not np.array_equal(one.parameters, plain)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(x, 0.5, self.training)
        return self.layer(x * random.random() + float(np.random.random()))  # noqa: NPY002


def test_both_points_of_a_batch_see_the_same_dropout() -> None:
    """Else the difference of two gradients at one point is noise, which these rules sum up."""
    model = FlatModel(Dropping())
    x = model.vector.clone()
    (data,) = as_datasets(softmax_clients([16]))
    found: dict[bool, list[list[Tensor]]] = {}
    for compares_points in (True, False):
        objective = ModelObjective(
            model,
            functional.cross_entropy,
            as_client_data(data),
            [torch.arange(16)] * 2,
            compares_points=compares_points,
        )
        found[compares_points] = [
            [objective.gradient(x, batch).clone() for _ in range(3)]
            for batch in objective.batches()
        ]
    for first, *others in found[True]:
        assert all(torch.equal(first, other) for other in others)
    assert not torch.equal(found[True][0][0], found[True][1][0])
    assert not torch.equal(*found[False][0][:2])


def test_lazy_data_draws_nothing_from_torchs_generator() -> None:
    data = [[(x, int(y)) for x, y in d] for d in three_datasets()]
    before = torch.get_rng_state()
    simulate(small_config(), model=linear_model, client_data=data, test_data=data[0])
    assert torch.equal(torch.get_rng_state(), before)


class Counted(Dataset):
    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.reads += 1
        return torch.full((FEATURES,), index / 1000), index % CLASSES


def test_large_lazy_data_are_not_read_before_the_run() -> None:
    """Two rounds of two batches of four, one batch of the trial, a first example or two."""
    data = [Counted() for _ in range(3)]
    simulate(small_config(), model=linear_model, client_data=data)
    assert max(d.reads for d in data) < 2 * 2 * 4 + 4 + 4


def test_a_redefined_length_counts() -> None:
    class Short(TensorDataset):
        def __len__(self) -> int:
            return 4

    class Fetching(TensorDataset):
        def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
            return [(torch.full((FEATURES,), 7.0), self.tensors[1][i]) for i in indices]

    plain = three_datasets()[0]
    assert as_client_data(Short(*plain.tensors)).num_examples == 4
    data = as_client_data(Fetching(*plain.tensors))
    assert next(data.batches([torch.tensor([0])], torch.device("cpu")))[0].tolist() == [[7.0] * 4]
    negative = as_client_data(Subset(plain, [-1, 0]))
    assert torch.equal(
        next(negative.batches([torch.tensor([0])], torch.device("cpu")))[0][0], plain.tensors[0][-1]
    )
    with pytest.raises(DataError, match=r"a Subset takes what is not there: index 9 .* size 9"):
        as_client_data(Subset(plain, [9]))


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


def test_named_tuples_are_inputs() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear_model()

        def forward(self, pair: Pair) -> Tensor:
            return self.layer(pair.left - pair.right)

    data = [[(Pair(x, x / 2), int(y)) for x, y in d] for d in three_datasets()]
    assert simulate(small_config(), model=Sum, client_data=data).summary["failures"] == 0


def test_regression_measures_no_accuracy() -> None:
    data = [TensorDataset(d.tensors[0], d.tensors[0][:, :1]) for d in three_datasets()]
    options = {"client_data": data, "test_data": data[0], "loss": functional.mse_loss}
    with pytest.warns(FedoptWarning, match="model.metric: accuracy needs class indices"):
        result = simulate(small_config(), model=lambda: nn.Linear(FEATURES, 1), **options)
    last = result.rounds[-1]
    assert (last.test_accuracy, last.test_metric) == (None, None)
    assert last.test_loss > 0
    options.pop("test_data")
    with pytest.raises(ConfigError, match=r"model.name: 'mlp' predicts classes"):
        simulate(small_config(), **options)


def test_a_loss_of_pairs_is_tried_on_a_whole_batch() -> None:
    """Zero, and without a gradient, where a batch has only one class."""

    def contrast(outputs: Tensor, targets: Tensor) -> Tensor:
        unlike = targets[:, None] != targets[None, :]
        return (outputs @ outputs.T)[unlike].square().mean() if unlike.any() else torch.tensor(0.0)

    data = [
        TensorDataset(x[y.argsort()], y[y.argsort()])
        for x, y in (d.tensors for d in as_datasets(softmax_clients([60] * 3)))
    ]
    config = small_config(training={"local_steps": 2, "batch_size": 30})
    assert simulate(config, model=linear_model, client_data=data, loss=contrast).rounds


def test_numpys_numbers_may_be_options() -> None:
    config = RunConfig(model={"options": {"hidden": [np.int64(4), np.int64(3)]}})
    assert config.model.options == {"hidden": [4, 3]}
    assert type(config.model.options["hidden"][0]) is int


def test_gradients_are_taken_under_no_grad() -> None:
    with torch.no_grad():
        result = simulate(small_config(), model=linear_model, client_data=three_datasets())
    assert result.summary["failures"] == 0


def flat_batch_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES))


def test_one_example_trains_under_batch_norm_with_the_running_statistics() -> None:
    """PyTorch refuses one value a channel; others of the same layer are normalised as ever."""
    (data,) = as_datasets(softmax_clients([1]))
    model, loss = FlatModel(flat_batch_norm()), functional.cross_entropy
    before = model.read_buffers()["buffers.float32"]
    objective = ModelObjective(model, loss, as_client_data(data), [torch.tensor([0])])
    (batch,) = list(objective.batches())
    gradient = objective.gradient(model.vector.clone(), batch).clone()
    plain = flat_batch_norm().eval()
    loss(plain(data.tensors[0]), data.tensors[1]).backward()
    expected = torch.cat([p.grad.reshape(-1) for p in plain.parameters() if p.grad is not None])
    torch.testing.assert_close(gradient, expected)
    assert torch.equal(model.read_buffers()["buffers.float32"], before)
    assert all(layer.training for layer in model.module.modules())
    assert not model.module[1]._forward_pre_hooks
    assert not model.module[1]._forward_hooks


def test_a_layer_is_looked_at_in_each_of_its_calls_by_position_and_by_keyword() -> None:
    """The same layer sees one value a channel first and nine then: those count."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.last = nn.BatchNorm2d(2), nn.Linear(2, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            pooled = self.norm(input=x.mean(dim=(2, 3), keepdim=True))
            return self.last((pooled + self.norm(x)).mean(dim=(2, 3)))

    pictures = torch.randn(1, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    data = as_client_data(TensorDataset(pictures, torch.zeros(1).long()))
    model = FlatModel(Twice())
    objective = ModelObjective(model, functional.cross_entropy, data, [torch.tensor([0])])
    (batch,) = list(objective.batches())
    objective.gradient(model.vector.clone(), batch)
    expected = 0.1 * pictures.mean(dim=(0, 2, 3))
    torch.testing.assert_close(model.module.norm.running_mean, expected)


def test_a_metric_may_return_the_same_tensor_for_every_batch() -> None:
    kept = torch.zeros(())

    def share(outputs: Tensor, targets: Tensor) -> Tensor:
        return kept.copy_((outputs.argmax(dim=1) == targets).float().mean())

    test = as_datasets(softmax_clients([1200]))[0]
    own = small_config(federation={"num_clients": 3, "clients_per_round": 3, "num_rounds": 1})
    common = {"model": linear_model, "client_data": three_datasets(), "test_data": test}
    expected = simulate(own, **common).rounds[-1].test_accuracy
    assert simulate(own, metric=share, **common).rounds[-1].test_metric == pytest.approx(expected)


def test_one_example_with_many_values_a_channel_is_normalised_by_them() -> None:
    data = as_client_data(TensorDataset(torch.randn(1, 2, 3, 3), torch.zeros(1).long()))
    model = FlatModel(nn.Sequential(nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(18, CLASSES)))
    objective = ModelObjective(model, functional.cross_entropy, data, [torch.tensor([0])])
    (batch,) = list(objective.batches())
    objective.gradient(model.vector.clone(), batch)
    mean = batch[0].inputs.mean(dim=(0, 2, 3))
    torch.testing.assert_close(model.module[0].running_mean, 0.1 * mean)


@pytest.mark.parametrize("work", [{"local_steps": 2}, {"local_epochs": 1, "batch_size": 2}])
def test_no_client_fails_for_a_single_example_under_batch_norm(work: dict[str, int]) -> None:
    data = as_datasets(softmax_clients([9, 1, 5]))
    own = small_config(training=work)
    result = simulate(own, model=flat_batch_norm, client_data=data)
    assert [r.failures for r in result.rounds] == [0, 0]


@pytest.mark.parametrize(
    "name", ["fedavg", "scaffold", *(n for n, rule in ALGORITHMS.items() if rule.compares_points)]
)
def test_batch_norm_describes_the_model_that_the_client_trained_last(name: str) -> None:
    """Not x⁻, where some rules take a second gradient."""
    model = FlatModel(flat_batch_norm())
    x = model.vector.clone()
    shifted = x.clone()
    shifted[FEATURES * 4 : FEATURES * 4 + 4] += 10.0  # the bias before batch norm
    (data,) = as_datasets(softmax_clients([16]))
    positions = [torch.arange(16)] * 60  # at momentum 0.1 what was before counts 0.2 %
    client = as_client_data(data)
    own = {"momentum": 0.5} if name == "padamfed_vr" else {}  # else its plan says it
    rule: Any = ALGORITHMS[name](client_learning_rate=1e-6, **own)
    objective = ModelObjective(
        model, functional.cross_entropy, client, positions, compares_points=rule.compares_points
    )
    zeros = torch.zeros_like(x)
    sent = {"model": x, "previous_model": shifted, "direction": zeros, "server_momentum": zeros}
    rule.client_update(sent, dict.fromkeys(rule.client_state, zeros), objective)
    weight, bias = x[: FEATURES * 4].view(4, FEATURES), x[FEATURES * 4 : FEATURES * 4 + 4]
    mean = (data.tensors[0] @ weight.T + bias).mean(dim=0)
    torch.testing.assert_close(model.module[1].running_mean, mean, atol=0.05, rtol=0)


class Remembering(nn.Module):
    """Keeps what it saw last in a buffer that no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("seen", torch.zeros(FEATURES), persistent=False)
        fixed = torch.ones(1).expand(3)  # cannot be written to
        self.register_buffer("fixed", fixed, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x - self.seen
        if self.training:
            self.seen.copy_(0.9 * x.mean(dim=0))
        return self.layer(x)


def test_buffers_that_do_not_persist_are_of_no_other_client() -> None:
    parts = three_datasets()
    one = simulate(small_config(), Remembering, parts).parameters
    found = simulate(small_config(), Remembering, parts, workers=2).parameters
    np.testing.assert_array_equal(one, found)


def test_one_client_may_draw_where_others_do_not() -> None:
    parts = three_datasets()
    parts[2] = Noisy(parts[2])  # all are of one size, and the first is tried first
    one = simulate(small_config(), linear_model, parts).parameters
    with pytest.warns(FedoptWarning, match="workers: got 2"):
        found = simulate(small_config(), linear_model, parts, workers=2).parameters
    np.testing.assert_array_equal(one, found)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32])
def test_labels_may_be_of_any_kind_of_integer(dtype: torch.dtype) -> None:
    parts = [part.tensors for part in three_datasets()]
    own = [TensorDataset(x, y.to(dtype)) for x, y in parts]
    usual = [TensorDataset(x, y) for x, y in parts]
    loss = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0])[:CLASSES])
    if dtype in (torch.uint16, torch.uint32):  # which torch's loss does not take
        clients = [as_client_data(part) for part in own]
        data = FederatedData(clients, None, (FEATURES,))
        assert (data.num_classes, data.label_counts().sum()) == (CLASSES, sum(map(len, own)))
        return
    found = [simulate(small_config(), None, d, d[0], loss=loss) for d in (own, usual)]
    np.testing.assert_array_equal(found[0].parameters, found[1].parameters)
    assert found[0].rounds[-1].test_metrics == found[1].rounds[-1].test_metrics

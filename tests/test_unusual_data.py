"""Good data and modules of kinds that are not the usual: they train, and to the right numbers."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from helpers import CLASSES, FEATURES, as_datasets, linear_model, softmax_clients
from test_own_code import settings, three
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, Subset, TensorDataset

from fedopt_flwr import ConfigError, DataError, RunConfig, simulate
from fedopt_flwr.data import as_client_data
from fedopt_flwr.errors import FedoptWarning

pytestmark = pytest.mark.filterwarnings("ignore:algorithm.momentum")


class Shifted(TensorDataset):
    """A data set with a transform of its own, in place of its tensors' values."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return x + 1, y


def test_a_transform_of_the_users_data_set_counts() -> None:
    plain = three()
    shifted = [Shifted(*d.tensors) for d in plain]
    by_hand = [TensorDataset(d.tensors[0] + 1, d.tensors[1]) for d in plain]
    results = [
        simulate(settings(), model=linear_model, client_data=data).parameters
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
        [({"signal": x}, x[:1]) for x in dataset.tensors[0]] for dataset in three()
    ]  # a list of pairs is a map-style data set
    result = simulate(settings(), model=Named, client_data=data, loss=functional.mse_loss)
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
    data = [Noisy(d) for d in three()]
    one = simulate(settings(), model=linear_model, client_data=data)
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    random.seed(5)
    after = torch.get_rng_state(), random.getstate()
    with pytest.warns(FedoptWarning, match="workers: got 2"):
        two = simulate(settings(), model=linear_model, client_data=data, workers=2)
    np.testing.assert_array_equal(one.parameters, two.parameters)
    assert torch.equal(torch.get_rng_state(), after[0])
    assert random.getstate() == after[1]
    plain = simulate(settings(), model=linear_model, client_data=three()).parameters
    assert not np.array_equal(one.parameters, plain)


def test_lazy_data_draws_nothing_from_torchs_generator() -> None:
    data = [[(x, int(y)) for x, y in d] for d in three()]
    before = torch.get_rng_state()
    simulate(settings(), model=linear_model, client_data=data, test_data=data[0])
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
    simulate(settings(), model=linear_model, client_data=data)
    assert max(d.reads for d in data) < 2 * 2 * 4 + 4 + 4


def test_a_redefined_length_counts() -> None:
    class Short(TensorDataset):
        def __len__(self) -> int:
            return 4

    class Fetching(TensorDataset):
        def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
            return [(torch.full((FEATURES,), 7.0), self.tensors[1][i]) for i in indices]

    plain = three()[0]
    assert as_client_data(Short(*plain.tensors)).num_examples == 4
    data = as_client_data(Fetching(*plain.tensors))
    assert next(data.batches([torch.tensor([0])], torch.device("cpu")))[0].tolist() == [[7.0] * 4]
    negative = as_client_data(Subset(plain, [-1, 0]))
    assert torch.equal(
        next(negative.batches([torch.tensor([0])], torch.device("cpu")))[0][0], plain.tensors[0][-1]
    )
    with pytest.raises(DataError, match="a Subset takes example 9 of a data set with 9 examples"):
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

    data = [[(Pair(x, x / 2), int(y)) for x, y in d] for d in three()]
    assert simulate(settings(), model=Sum, client_data=data).summary["failures"] == 0


def test_regression_measures_no_accuracy() -> None:
    data = [TensorDataset(d.tensors[0], d.tensors[0][:, :1]) for d in three()]
    options = {"client_data": data, "test_data": data[0], "loss": functional.mse_loss}
    with pytest.warns(FedoptWarning, match="model.metric: accuracy needs class indices"):
        result = simulate(settings(), model=lambda: nn.Linear(FEATURES, 1), **options)
    last = result.rounds[-1]
    assert (last.test_accuracy, last.test_metric) == (None, None)
    assert last.test_loss > 0
    options.pop("test_data")
    with pytest.raises(ConfigError, match=r"model.name: 'mlp' predicts classes"):
        simulate(settings(), **options)


def test_a_loss_of_pairs_is_tried_on_a_whole_batch() -> None:
    """Zero, and without a gradient, where a batch has only one class."""

    def contrast(outputs: Tensor, targets: Tensor) -> Tensor:
        unlike = targets[:, None] != targets[None, :]
        return (outputs @ outputs.T)[unlike].square().mean() if unlike.any() else torch.tensor(0.0)

    data = [
        TensorDataset(x[y.argsort()], y[y.argsort()])
        for x, y in (d.tensors for d in as_datasets(softmax_clients([60] * 3)))
    ]
    config = settings(training={"local_steps": 2, "batch_size": 30})
    assert simulate(config, model=linear_model, client_data=data, loss=contrast).rounds


def test_numpys_numbers_may_be_options() -> None:
    config = RunConfig(model={"options": {"hidden": [np.int64(4), np.int64(3)]}})
    assert config.model.options == {"hidden": [4, 3]}
    assert type(config.model.options["hidden"][0]) is int


def test_gradients_are_taken_under_no_grad() -> None:
    with torch.no_grad():
        result = simulate(settings(), model=linear_model, client_data=three())
    assert result.summary["failures"] == 0

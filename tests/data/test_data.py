"""Sources, partitions and minibatches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset, TensorDataset

from fedopt_flwr import ConfigError, DataError, RunConfig, simulate
from fedopt_flwr.config.sections import DataSection, Facts, PartitionSection
from fedopt_flwr.data import (
    as_client_data,
    load_client_data,
    load_federated_data,
    load_test_data,
)
from fedopt_flwr.data.client_data import DatasetData, TensorData
from fedopt_flwr.data.partitions import partition
from fedopt_flwr.training.objective import batch_positions, num_steps

TARGETS = np.repeat(np.arange(10), 60)
CPU = torch.device("cpu")


def divided(kind: str, num_clients: int = 12, seed: int = 0, **fields: object) -> list[np.ndarray]:
    return partition(TARGETS, num_clients, PartitionSection(kind=kind, **fields), seed=seed)


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "classes", "beta"])
def test_a_partition_gives_each_example_to_exactly_one_client(kind: str) -> None:
    rows = divided(kind)
    assert sorted(np.concatenate(rows)) == list(range(600))
    assert min(map(len, rows)) >= 1


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "classes", "subsample", "beta"])
def test_a_partition_depends_on_its_seed_alone(kind: str) -> None:
    one, same, other = divided(kind), divided(kind), divided(kind, seed=1)
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_small_concentration_means_unlike_clients() -> None:
    def unlikeness(concentration: float) -> float:
        rows = divided("dirichlet", concentration=concentration)
        shares = [np.bincount(TARGETS[r], minlength=10) / len(r) for r in rows]
        return float(np.mean([share.max() for share in shares]))

    assert unlikeness(0.1) > 0.5
    assert unlikeness(1000.0) < 0.2


def test_classes_partition_gives_exactly_that_many_classes() -> None:
    assert all(len(np.unique(TARGETS[r])) == 3 for r in divided("classes", classes_per_client=3))


def test_subsample_draws_sizes_from_the_range_and_classes_by_number() -> None:
    rows = divided("subsample", 40, examples_per_client=(10, 50), classes_per_client=2)
    sizes = [len(r) for r in rows]
    assert (min(sizes) >= 10, max(sizes) <= 50, len(set(sizes)) > 5) == (True, True, True)
    assert all(len(np.unique(TARGETS[r])) <= 2 for r in rows)
    assert all(len(np.unique(r)) == len(r) for r in rows)
    with pytest.raises(DataError, match="wants 500 examples"):
        divided("subsample", examples_per_client=(500, 500), classes_per_client=1)


def test_beta_shares_follow_the_distribution() -> None:
    even = [len(r) for r in divided("beta", shape=(200.0, 200.0))]
    uneven = [len(r) for r in divided("beta", shape=(0.2, 0.8))]
    assert np.std(even) < 8 < np.std(uneven)


def test_empty_clients_only_where_they_are_asked_for() -> None:
    rows = divided("dirichlet", concentration=0.01, min_examples=0)
    assert min(map(len, rows)) == 0
    with pytest.raises(DataError, match="fewer than min_examples"):
        divided("beta", shape=(0.001, 1.0), num_clients=50)


def test_partition_warnings_of_repeated_attempts_are_not_shown() -> None:
    assert min(map(len, divided("dirichlet", concentration=0.3, min_examples=10))) >= 10


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(0, 45), st.integers(1, 5), st.booleans())
def test_batches_of_a_round(n: int, batch_size: int, work: int, by_epochs: bool) -> None:
    steps, epochs = (None, work) if by_epochs else (work, None)
    positions = batch_positions(n, batch_size, steps, epochs, seed=5)
    assert len(positions) == num_steps(n, batch_size, steps, epochs)
    size = min(batch_size, n) or n
    if not by_epochs:
        assert [len(p) for p in positions] == [size] * work
    else:
        assert len(positions) == work * -(-n // size)
        counts = np.bincount(torch.cat(positions).numpy(), minlength=n)
        assert counts.tolist() == [work] * n
        smallest = min(len(p) for p in positions)
        assert smallest > 1 or n == 1 or size <= 2
    again = batch_positions(n, batch_size, steps, epochs, seed=5)
    assert all(torch.equal(a, b) for a, b in zip(positions, again, strict=True))


def test_batches_differ_between_seeds_and_cover_the_data() -> None:
    one, other = (batch_positions(50, 10, 5, None, seed) for seed in (1, 2))
    assert not torch.equal(torch.cat(one), torch.cat(other))
    assert sorted(torch.cat(one).tolist()) == list(range(50))


class Squares(Dataset):
    """A map-style data set that computes its examples."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(index), index**2]), index % 3


def test_any_map_style_data_set_gives_the_batches_of_the_same_tensors() -> None:
    lazy = as_client_data(Squares())
    tensors = TensorDataset(
        *(torch.stack([torch.as_tensor(Squares()[i][k]) for i in range(12)]) for k in (0, 1))
    )
    eager = as_client_data(Subset(tensors, range(12)))
    assert isinstance(lazy, DatasetData)
    assert isinstance(eager, TensorData)
    positions = batch_positions(12, 5, 4, None, 0)
    for a, b in zip(lazy.batches(positions, CPU), eager.batches(positions, CPU), strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])
    assert lazy.targets().tolist() == eager.targets().tolist()


def test_lazy_and_in_memory_data_train_to_the_same_bits() -> None:
    config = {"federation": {"num_clients": 2, "clients_per_round": 2, "num_rounds": 3}}
    tensors = TensorDataset(
        *(torch.stack([torch.as_tensor(Squares()[i][k]) for i in range(12)]) for k in (0, 1))
    )
    runs = [
        simulate(
            config | {"algorithm": {"name": "fedavg", "client_learning_rate": 1e-3}},
            model=lambda: torch.nn.Linear(2, 3),
            client_data=[data, data],
        )
        for data in (Squares(), tensors)
    ]
    np.testing.assert_array_equal(runs[0].parameters, runs[1].parameters)


def test_digits_keeps_a_fifth_of_each_class_for_the_test() -> None:
    data = load_federated_data(RunConfig())
    assert sum(c.num_examples for c in data.clients) + data.test.num_examples == 1797
    assert data.input_shape == (1, 8, 8)
    counts = np.bincount(data.test.targets())
    assert (counts.min(), counts.max()) == (34, 36)


def test_synthetic_data_is_heterogeneous_by_its_two_parameters() -> None:
    def centres(spread: float) -> float:
        config = RunConfig(
            data={"name": "synthetic", "options": {"model_spread": 1.0, "data_spread": spread}}
        )
        data = load_federated_data(config)
        assert len(data.clients) == 20
        assert data.input_shape == (60,)
        means = [
            next(c.batches([torch.arange(c.num_examples)], CPU))[0].mean() for c in data.clients
        ]
        return float(torch.stack(means).std())

    assert centres(25.0) > 2 * centres(0.0)
    config = RunConfig(data={"name": "synthetic"})
    data = load_federated_data(config)
    sizes = [client.num_examples for client in data.clients]
    assert min(sizes) > 40  # 50 + lognormal, less a tenth
    assert data.test.num_examples == pytest.approx(sum(sizes) / 9, rel=0.05)
    train = torch.cat(
        [next(c.batches([torch.arange(c.num_examples)], CPU))[0] for c in data.clients]
    )
    test = next(data.test.batches([torch.arange(data.test.num_examples)], CPU))[0]
    assert not len({tuple(r) for r in test.tolist()} & {tuple(r) for r in train.tolist()})
    with pytest.raises(ConfigError, match=r"data\.options of 'synthetic': unknown 'alpha'"):
        load_federated_data(RunConfig(data={"name": "synthetic", "options": {"alpha": 1}}))


def write_npz(folder: Path, **extra: np.ndarray) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (40, 8, 8, 3), dtype=np.uint8), np.arange(40) % 4
    np.savez(folder / "train.npz", x=x, y=y, **extra)
    np.savez(folder / "test.npz", x=x[:8], y=y[:8])


def test_npz_keeps_its_natural_partition_and_turns_images_around(tmp_path: Path) -> None:
    write_npz(tmp_path, client=np.arange(40) // 10)
    settings = {
        "data": {"name": "npz", "path": tmp_path},
        "federation": {"num_clients": 4, "clients_per_round": 2},
    }
    data = load_federated_data(RunConfig(**settings))
    assert [c.num_examples for c in data.clients] == [10] * 4
    assert data.input_shape == (3, 8, 8)
    x, _ = next(data.clients[1].batches([torch.tensor([0])], CPU))
    with np.load(tmp_path / "train.npz") as archive:
        np.testing.assert_allclose(
            x[0].numpy(), archive["x"][10].transpose(2, 0, 1) / 255, rtol=1e-6
        )
    with pytest.raises(ConfigError, match="own partition has 4 clients"):
        load_federated_data(RunConfig(data=settings["data"]))


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"x": np.zeros((3, 2))}, "must hold 'x' and 'y'"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(2, int)}, "all of one length"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(3)}, "'y' of .* has dtype float64"),
        ({"x": np.zeros((3, 2)), "y": np.array([0, 1, -1])}, "'y' of .* values from -1 to 1; must"),
        ({"x": np.zeros((3, 2)), "y": np.array([0, 1, 10**9])}, "an integer from 0 to 999,999"),
        ({"x": np.zeros((3, 2)), "y": np.array(["a", "b", "c"])}, "'y' of .* has dtype <U1"),
        ({"x": np.zeros(3), "y": np.zeros(3, int)}, r"'x' of .* shape \(3,\); must hold real"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0, int)}, "'x' of .* n of at least 1"),
        ({"x": np.zeros((3, 2), complex), "y": np.zeros(3, int)}, "dtype complex128"),
        ({"x": np.array(3.0), "y": np.zeros(3, int)}, "all of one length"),
        (
            {"x": np.array([[0.0], [np.nan], [np.inf]]), "y": np.zeros(3, int)},
            "'x' of .* is not finite in 2 examples, the first is 1; remove them",
        ),
        (
            {"x": np.zeros((3, 2)), "y": np.zeros(3, int), "client": np.zeros((3, 2), int)},
            r"'client' of .* has shape \(3, 2\); must be one id",
        ),
    ],
)
def test_broken_npz_files_are_described(tmp_path: Path, arrays: dict, text: str) -> None:
    config = RunConfig(data={"name": "npz", "path": tmp_path})
    with pytest.raises(DataError, match="holds neither train"):
        load_federated_data(config)
    for part in ("train", "test"):
        np.savez(tmp_path / f"{part}.npz", **arrays)
    with pytest.raises(DataError, match=text):
        load_federated_data(config)
    (tmp_path / "train.npz").write_bytes(b"not an archive")
    with pytest.raises(DataError, match="cannot be read"):
        load_federated_data(config)
    whole = (tmp_path / "test.npz").read_bytes()
    (tmp_path / "train.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="cannot be read"):
        load_federated_data(config)


def test_npz_parts_and_classes_must_agree(tmp_path: Path) -> None:
    y = np.arange(20) % 4
    np.savez(tmp_path / "train.npz", x=np.ones((20, 3), ">f4"), y=y)
    np.savez(tmp_path / "test.npz", x=np.ones((20, 3)), y=y)
    federation = {"num_clients": 2, "clients_per_round": 2}
    section = {"name": "npz", "path": tmp_path, "partition": {"kind": "iid"}}
    data = load_federated_data(RunConfig(data=section, federation=federation))
    x, _ = next(data.clients[0].batches([torch.tensor([0])], CPU))
    assert x.tolist() == [[1.0, 1.0, 1.0]]  # big-endian numbers are turned
    few = RunConfig(data={**section, "options": {"num_classes": 3}}, federation=federation)
    with pytest.raises(
        DataError, match=r"num_classes 3; the files hold class 3; it must be from 4"
    ):
        load_federated_data(few)
    np.savez(tmp_path / "test.npz", x=np.ones((20, 2)), y=y)
    with pytest.raises(DataError, match=r"examples of different shapes: .*\(3,\).*\(2,\)"):
        load_federated_data(RunConfig(data=section, federation=federation))


def test_a_client_needs_no_test_file_and_a_server_no_training_file(tmp_path: Path) -> None:
    write_npz(tmp_path, client=np.arange(40) // 10)
    config = RunConfig(
        data={"name": "npz", "path": tmp_path, "options": {"num_classes": 7}},
        federation={"num_clients": 4, "clients_per_round": 2},
    )
    (tmp_path / "test.npz").rename(tmp_path / "away")
    own = load_client_data(config.data, Facts(num_clients=4), [2])
    np.testing.assert_array_equal(own[2].train.targets(), np.arange(20, 30) % 4)
    with pytest.raises(DataError, match=r"holds no test\.npz"):
        load_federated_data(config)
    (tmp_path / "away").rename(tmp_path / "test.npz")
    (tmp_path / "train.npz").unlink()
    data = load_test_data(config)
    assert (data.clients, data.test.num_examples) == ([], 8)
    assert (data.input_shape, data.num_classes) == ((3, 8, 8), 7)
    with pytest.raises(DataError, match=r"holds no train\.npz"):
        load_client_data(config.data, Facts(num_clients=4), [2])


def test_a_client_loads_the_part_that_a_simulation_gives_it() -> None:
    config = RunConfig()
    parts = load_federated_data(config).clients
    own = load_client_data(config.data, Facts(num_clients=20), [0, 7, 19])
    assert list(own) == [0, 7, 19]
    assert all((own[i].train.targets() == parts[i].targets()).all() for i in own)


def test_whole_data_belongs_to_one_client_of_any_name(tmp_path: Path) -> None:
    config = RunConfig(data={"partition": {"kind": "whole"}})
    assert (
        load_client_data(config.data, Facts(num_clients=1), ["ward-3"])["ward-3"].train.num_examples
        == 1442
    )
    with pytest.raises(ConfigError, match="such data belongs to one client"):
        load_client_data(config.data, Facts(num_clients=2), [0, 1])
    (tmp_path / "paired.py").write_text(
        "import torch\n"
        "from torch.utils.data import TensorDataset\n"
        "def pair(num_clients, seed):\n"
        "    sizes = (8, 3)\n"
        "    return tuple(TensorDataset(torch.ones(n, 2), torch.ones(n)) for n in sizes), None\n"
    )
    paired = RunConfig(data={"name": "paired:pair", "partition": {"kind": "whole"}})
    for name in (1, "ward-3"):
        own = load_client_data(paired.data, Facts(num_clients=2), [name], [tmp_path])[name]
        assert (own.train.num_examples, own.holdout and own.holdout.num_examples) == (8, 3)
    with pytest.raises(ConfigError, match="that is for `fedopt client`"):
        load_federated_data(config)
    with pytest.raises(ConfigError, match="all of it belongs to this client"):
        load_client_data(DataSection(), Facts(num_clients=20), ["ward-3"])
    with pytest.raises(ConfigError, match="client id 20: must be between 0 and 19"):
        load_client_data(DataSection(), Facts(num_clients=20), [20])


def test_the_users_own_loader_and_model(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from torch.utils.data import TensorDataset\n"
        "def clients(num_clients, seed, size):\n"
        "    g = torch.Generator().manual_seed(seed)\n"
        "    x = [torch.randn(size, 3, generator=g) for _ in range(num_clients)]\n"
        "    return [TensorDataset(a, (a[:, 0] > 0).long()) for a in x], None\n"
        "def whole(num_clients, seed):\n"
        "    train, _ = clients(1, seed, 60)\n"
        "    return train[0], train[0]\n"
        "def wrong(num_clients, seed):\n"
        "    return 5\n"
        "class Net(torch.nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(3, 2)\n"
    )
    file = tmp_path / "run.toml"
    file.write_text(
        '[data]\nname = "mine:clients"\noptions = {size = 9}\n[model]\nname = "mine:Net"\n'
        "[federation]\nnum_clients = 4\nclients_per_round = 2\nnum_rounds = 3\n"
    )
    result = simulate(file)
    assert result.parameters.shape == (8,)
    assert result.rounds[-1].test_loss is None
    whole = RunConfig.from_file(file, ["data.name=mine:whole", "data.options={}"])
    assert simulate(whole).rounds[-1].test_accuracy is not None
    with pytest.raises(ConfigError, match=r"'mine:wrong' failed: .* must return \(train, test\)"):
        simulate(RunConfig.from_file(file, ["data.name=mine:wrong", "data.options={}"]))


def test_a_client_without_data_is_named() -> None:
    full, empty = (
        TensorDataset(torch.zeros(3, 4), torch.zeros(3).long()),
        TensorDataset(torch.zeros(0, 4), torch.zeros(0).long()),
    )
    config = {"federation": {"num_clients": 3, "clients_per_round": 3}}
    with pytest.raises(DataError, match="client 1: has no data"):
        simulate(config, model=lambda: torch.nn.Linear(4, 2), client_data=[full, empty, full])
    with pytest.raises(ConfigError, match="client_data holds 2 data sets"):
        simulate(config, model=lambda: torch.nn.Linear(4, 2), client_data=[full, full])
    allowed = {
        "data": {"partition": {"kind": "dirichlet", "concentration": 0.01, "min_examples": 0}}
    }
    with pytest.raises(DataError, match=r"client \d+: has no data"):
        simulate(allowed)


@pytest.mark.parametrize("name", ["fedavg", "scaffold_m", "padamfed"])
def test_clients_with_one_example_or_less_than_a_batch_train(name: str) -> None:
    sizes = [1, 3, 40]
    datasets = [TensorDataset(torch.randn(n, 4), torch.arange(n) % 2) for n in sizes]
    config = {
        "algorithm": {"name": name},
        "federation": {"num_clients": 3, "clients_per_round": 3, "num_rounds": 20},
    }
    result = simulate(config, model=lambda: torch.nn.Linear(4, 2), client_data=datasets)
    assert sum(r.failures for r in result.rounds) == 0
    assert np.isfinite(result.parameters).all()

"""Batches made by the user's own function, read by processes, or from a stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import linear_model, small_config, three_datasets
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import served
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from fedopt_flwr import ConfigError, DataError, clients, simulate, strategies
from fedopt_flwr.algorithms import ALGORITHMS
from fedopt_flwr.clients import Client
from fedopt_flwr.data import Loading, as_client_data
from fedopt_flwr.engines.pairs import run_pair
from fedopt_flwr.errors import FedoptWarning

CPU = torch.device("cpu")


class Stream(IterableDataset[Any]):
    """The examples of a data set, one after the other; `read` counts them."""

    def __init__(self, dataset: Any, length: int | None = None) -> None:
        self.dataset, self.read = dataset, 0
        self.length = len(dataset) if length is None else length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        for position in range(len(self.dataset)):
            self.read += 1
            yield self.dataset[position]


def numbered(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(size).float().view(size, 1), torch.arange(size))


@given(st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=5), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_a_stream_gives_the_batches_of_a_map_style_data_set(batches: list[list[int]]) -> None:
    positions = [torch.tensor(batch) for batch in batches]
    stream = Stream(numbered(12))
    found = list(as_client_data(stream).batches(positions, CPU))
    known = list(as_client_data(numbered(12)).batches(positions, CPU))
    for (x, y), (x_known, y_known) in zip(found, known, strict=True):
        assert torch.equal(x, x_known)
        assert torch.equal(y, y_known)
    assert stream.read == 1 + max(map(max, batches))


def test_a_stream_holds_one_part_of_an_evaluation_at_a_time() -> None:
    stream = Stream(numbered(12))
    batches = as_client_data(stream).batches(list(torch.arange(12).split(3)), CPU)
    for number, (x, _) in enumerate(batches):
        assert x.flatten().tolist() == [3 * number, 3 * number + 1, 3 * number + 2]
        assert stream.read == 3 * number + 3


def test_shares_of_a_stream() -> None:
    data = as_client_data(Stream(numbered(6))).share(torch.tensor([5, 1, 3]))
    assert data.targets().tolist() == [5, 1, 3]
    assert data.num_examples == 3
    ((x, y),) = data.batches([torch.tensor([2, 0])], CPU)
    assert (x.flatten().tolist(), y.tolist()) == ([3, 5], [3, 5])


@pytest.mark.parametrize("rule", ["fedavg", "scaffold_m", "padamfed"])
def test_training_on_streams_ends_with_the_same_bits(rule: str) -> None:
    config = small_config(algorithm={"name": rule})
    plain = simulate(config, linear_model, three_datasets(), three_datasets()[0])
    streams = [Stream(dataset) for dataset in three_datasets()]
    read = simulate(config, linear_model, streams, Stream(three_datasets()[0]))
    assert read.parameters.tobytes() == plain.parameters.tobytes()
    assert read.rounds[-1].test_loss == plain.rounds[-1].test_loss


def test_a_stream_that_is_shorter_than_it_says() -> None:
    data = as_client_data(Stream(numbered(3), length=5))
    with pytest.raises(DataError, match=r"example 3 of 5, as many as len\(\) says,.* no more"):
        list(data.batches([torch.tensor([4])], CPU))


class NoLength(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield torch.zeros(1), 0


def test_a_stream_without_a_length_is_refused() -> None:
    with pytest.raises(DataError, match=r"client 0: .* without a length; give it a method __len_"):
        simulate(small_config(), linear_model, [NoLength()] * 3)
    with pytest.raises(DataError, match=r"data.loader_workers: got 2; an IterableDataset is read"):
        as_client_data(Stream(numbered(3)), Loading(workers=2))


class Texts(Dataset[Any]):
    """Word numbers of unlike lengths, with the class that the first word says."""

    def __init__(self, client: int) -> None:
        rng = np.random.default_rng(client)
        self.rows = [torch.from_numpy(rng.integers(1, 7, rng.integers(2, 9))) for _ in range(20)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, position: int) -> tuple[Tensor, int]:
        return self.rows[position], int(self.rows[position][0] > 3)


def padded(examples: list[tuple[Tensor, int]]) -> tuple[dict[str, Tensor], Tensor]:
    rows = nn.utils.rnn.pad_sequence([row for row, _ in examples], batch_first=True)
    inputs = {"input_ids": rows, "attention_mask": (rows > 0).float()}
    return inputs, torch.tensor([label for _, label in examples])


class OfWords(nn.Module):
    """Takes its inputs by name, as models of text do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(7, 4), nn.Linear(4, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask.unsqueeze(-1)
        return self.out((self.words(input_ids) * mask).sum(1) / mask.sum(1))


class ByName(nn.Module):
    """What README says of models that take their inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.model = OfWords()

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.model(**inputs)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", ["fedavg", "scaffold_m", "padamfed"])
def test_texts_of_unlike_lengths(rule: str, workers: int) -> None:
    config = small_config(algorithm={"name": rule}, data={"loader_workers": workers})
    config["federation"]["num_rounds"] = 20
    config["training"] = {"local_steps": 5, "batch_size": 4, "device": "cpu"}
    data = [Texts(client) for client in range(3)]
    if workers and rule != "fedavg":
        pytest.skip("one rule says it")
    if workers:
        config["federation"]["num_rounds"] = 2
    result = simulate(config, ByName, data, Texts(9), collate=padded)
    losses = [record.test_loss for record in result.rounds]
    assert losses[-1] < losses[0]


class Boxes(NamedTuple):
    """What a detector predicts or should, for one image."""

    corners: Tensor
    labels: Tensor


class Images(Dataset[Any]):
    """Images of unlike sizes with as many boxes as the position says."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, position: int) -> tuple[Tensor, Boxes]:
        count = 1 + position % 3
        boxes = torch.arange(4.0 * count).view(count, 4) / 10
        return torch.ones(1, 4 + position, 5), Boxes(boxes, torch.ones(count, dtype=torch.int64))


def as_lists(examples: list[Any]) -> tuple[list[Tensor], list[Boxes]]:
    images, boxes = zip(*examples, strict=True)
    return list(images), list(boxes)


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.box = nn.Linear(1, 4)

    def forward(self, images: list[Tensor]) -> list[Tensor]:
        return [self.box(image.mean().view(1)) for image in images]


def box_loss(outputs: list[Tensor], targets: list[Boxes]) -> Tensor:
    each = [(o - t.corners).square().mean() for o, t in zip(outputs, targets, strict=True)]
    return torch.stack(each).mean()


def test_detection_with_images_and_boxes_of_unlike_numbers() -> None:
    def share_near(outputs: list[Tensor], targets: list[Boxes]) -> dict[str, float]:
        errors = [(o - t.corners).abs().mean() for o, t in zip(outputs, targets, strict=True)]
        return {"boxes": sum(len(t.labels) for t in targets), "error": float(sum(errors))}

    result = simulate(
        small_config(),
        Detector,
        [Images() for _ in range(3)],
        Images(),
        loss=box_loss,
        metric=share_near,
        collate=as_lists,
    )
    first, last = result.rounds
    assert last.test_metrics["boxes"] == 15  # of all images
    assert last.test_loss < first.test_loss


class Graph(NamedTuple):
    features: Tensor  # of nodes
    edges: Tensor


class Graphs(Dataset[Any]):
    """Rings, and rings with all chords, whose features are noise: degrees tell them apart."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, position: int) -> tuple[Graph, int]:
        size = 4 + position % 4
        label = position % 2
        adjacent = torch.ones(size, size) if label else torch.eye(size).roll(1, 0)
        return Graph(torch.ones(size, 1), adjacent.nonzero().T), label


class GraphBatch(NamedTuple):
    features: Tensor
    edges: Tensor
    graph: Tensor  # of each node


def as_one_graph(examples: list[tuple[Graph, int]]) -> tuple[GraphBatch, Tensor]:
    sizes = [len(graph.features) for graph, _ in examples]
    starts = np.cumsum([0, *sizes[:-1]])
    edges = [g.edges + int(start) for (g, _), start in zip(examples, starts, strict=True)]
    graph = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    batch = GraphBatch(torch.cat([g.features for g, _ in examples]), torch.cat(edges, 1), graph)
    return batch, torch.tensor([label for _, label in examples])


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(1, 2)

    def forward(self, batch: GraphBatch) -> Tensor:
        source, target = batch.edges
        summed = torch.zeros_like(batch.features).index_add(0, target, batch.features[source])
        sizes = batch.graph.bincount().unsqueeze(1)
        pooled = torch.zeros(len(sizes), 1).index_add(0, batch.graph, summed) / sizes
        return self.out(pooled)


def test_graphs_of_unlike_sizes() -> None:
    config = small_config(algorithm={"name": "fedavg", "client_learning_rate": 0.5})
    config["federation"]["num_rounds"] = 20
    data = [Graphs() for _ in range(3)]
    result = simulate(config, GraphNet, data, Graphs(), collate=as_one_graph)
    assert result.rounds[-1].test_accuracy == 1.0


OWN = """
import numpy as np
import torch
from torch.utils.data import Dataset

class Rows(Dataset):
    def __init__(self, seed):
        self.seed = seed

    def __len__(self):
        return 12

    def __getitem__(self, i):
        row = np.random.default_rng([self.seed, i])
        return {"x": torch.from_numpy(row.normal(size=4).astype("float32")), "label": i % 3}

def load(num_clients, seed):
    return [Rows(i) for i in range(num_clients)], Rows(99)

def collate(rows):
    return torch.stack([r["x"] for r in rows]), torch.tensor([r["label"] for r in rows])
"""


@pytest.fixture
def own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (tmp_path / "ownrows.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    data = {"name": "ownrows:load", "collate": "ownrows:collate"}
    return small_config(data=data, model={"name": "logistic"})


@pytest.mark.parametrize("rule", ["fedavg", "scaffold_m", "padamfed"])
def test_a_named_collate_function_gives_the_same_bits_over_grpc(
    rule: str, own_config: dict[str, Any], tmp_path: Path
) -> None:
    config = own_config | {"algorithm": {"name": rule}}
    alone = simulate(config)
    result = served(config, tmp_path)
    assert result.parameters.tobytes() == alone.parameters.tobytes()
    assert result.rounds[-1].test_loss == alone.rounds[-1].test_loss


@pytest.mark.slow
def test_processes_that_read_change_no_bit(own_config: dict[str, Any]) -> None:
    alone = simulate(own_config)
    own_config["data"]["loader_workers"] = 2
    assert simulate(own_config).parameters.tobytes() == alone.parameters.tobytes()


def test_examples_that_are_dicts_need_no_collate_function(own_config: dict[str, Any]) -> None:
    collated = simulate(own_config)
    del own_config["data"]["collate"]
    assert simulate(own_config).parameters.tobytes() == collated.parameters.tobytes()


def test_examples_that_are_no_pairs_need_a_collate_function(own_config: dict[str, Any]) -> None:
    del own_config["data"]["collate"]
    module = Path("ownrows.py")
    module.write_text(module.read_text().replace('"label": i % 3', '"kind": i % 3'))
    own_config["data"]["name"] = "ownrows:load"
    text = r"got columns \['kind', 'x'\] without a 'label' or 'labels'.*give a collate function"
    with pytest.raises(DataError, match=text):
        simulate(own_config)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"collate": "padded"}, "data.collate: got 'padded'; must be 'module:function'"),
        ({"collate": "ownrows:none"}, "data.collate: cannot import 'ownrows:none'"),
        ({"name": "digits", "collate": "ownrows:collate"}, "is in memory as tensors"),
        ({"name": "digits", "loader_workers": 1}, "is in memory as tensors"),
        ({"loader_workers": 65}, "data.loader_workers: got 65"),
    ],
)
def test_loading_that_cannot_be_is_refused(
    data: dict[str, Any], text: str, own_config: dict[str, Any]
) -> None:
    config = own_config | {"data": own_config["data"] | data}
    with pytest.raises((ConfigError, DataError), match=text):
        simulate(config)


def test_what_a_collate_function_raises_is_one_clients_failure() -> None:
    def picky(examples: list[Any]) -> Any:
        if any(float(x[0]) == marked for x, _ in examples):
            raise ValueError("no such thing")
        return torch.utils.data.default_collate(examples)

    data = three_datasets()
    marked = float(data[2].tensors[0][0, 0])
    with pytest.warns(FedoptWarning, match="client 2"):
        result = simulate(small_config(), linear_model, data, collate=picky)
    errors = [error for record in result.rounds for error in record.errors]
    assert {error["client"] for error in errors} == {2}
    assert "no such thing" in errors[0]["error"]


def test_clients_of_ones_own_app_collate() -> None:
    client = Client(linear_model(), three_datasets()[0], client_id=0, collate=reversed_rows)
    loss, count, _ = client.evaluate([p.detach().numpy() for p in linear_model().parameters()], {})
    x, y = three_datasets()[0].tensors
    expected = functional.cross_entropy(linear_model()(x.flip(1)), y).detach()
    assert count == 9
    assert loss == pytest.approx(float(expected))


def reversed_rows(examples: list[Any]) -> Any:
    return torch.stack([x.flip(0) for x, _ in examples]), torch.stack([y for _, y in examples])


@pytest.mark.parametrize("rule", ["FedAvg", "ScaffoldM", "PAdaMFed"])
def test_ones_own_app_collates_as_a_simulation_does(rule: str) -> None:
    sizes = {"num_clients": 3, "clients_per_round": 2, "num_rounds": 3}
    data = [Texts(client) for client in range(3)]
    strategy = getattr(strategies, rule)(ByNameOfSeed(), **sizes, local_steps=2, batch_size=4)
    kind = getattr(clients, f"{rule}Client")
    members = [
        kind(ByNameOfSeed(), data[i], client_id=i, device="cpu", collate=padded) for i in range(3)
    ]
    run_pair(strategy, [member.to_client() for member in members], 3)
    name = next(n for n, known in ALGORITHMS.items() if known.__name__ == rule)
    config = {
        "algorithm": {"name": name},
        "federation": sizes,
        "training": {"local_steps": 2, "batch_size": 4, "device": "cpu"},
    }
    expected = simulate(config, ByNameOfSeed, data, collate=padded)
    assert strategy.rounds[-1].failures == 0
    assert strategy.model.vector.numpy().tobytes() == expected.parameters.tobytes()


class ByNameOfSeed(ByName):
    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            super().__init__()

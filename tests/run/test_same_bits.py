"""Small federations drawn at random end with the same bits in one process and in many."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streams import ClientThread, ServerThread

from fedopt_flwr import FedoptError, simulate
from fedopt_flwr.algorithms import ALGORITHMS
from fedopt_flwr.rounds.record import DIAGNOSTICS
from fedopt_flwr.run.result import Result

pytestmark = pytest.mark.filterwarnings(
    "ignore::fedopt_flwr.errors.FedoptWarning",  # of clients that fail, and of small federations
)
TESTS = Path(__file__).parents[1]
NUM_DRAWS, NUM_FAST, NUM_ON_RAY = 200, 10, 12
OWN = '''
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, TensorDataset

CENTRES = torch.randn(3, 4, generator=torch.Generator().manual_seed(7))


class Rows(Dataset):
    """Read one by one; perhaps with noise from all global generators; perhaps one is broken."""

    def __init__(self, data, noisy, broken):
        self.data, self.noisy, self.broken = data, noisy, broken

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        if index == self.broken:
            raise ValueError(f"example {index} is broken")
        x, y = self.data[index]
        if self.noisy:
            x = x + torch.randn(1) + float(np.random.normal()) + random.gauss(0, 1)
        return x, y


def examples(size, generator):
    labels = torch.randint(0, 3, (size,), generator=generator)
    return TensorDataset(CENTRES[labels] + torch.randn(size, 4, generator=generator), labels)


def load(
    num_clients,
    seed,
    sizes,
    lazy=False,
    noisy=(),
    broken=None,
    divided=False,
    careless=False,
    tested=True,
    classes=3,
):
    """`careless` draws from the global generators, without the seed."""
    own_seed = int(np.random.randint(1000)) + random.randrange(1000) if careless else seed
    generator = torch.Generator().manual_seed(own_seed)
    clients = [examples(size, generator) for size in sizes]
    test = examples(12, generator)
    test.tensors[1][:3] = torch.arange(3)  # a built-in model has as many classes as the test data
    test.tensors[1].clamp_(max=classes - 1)
    if lazy:
        which, index = broken or (None, None)
        clients = [
            Rows(data, i in noisy, index if i == which else None) if i in {*noisy, which} else data
            for i, data in enumerate(clients)
        ]
    return (ConcatDataset(clients) if divided else clients), (test if tested else None)


class Net(nn.Module):
    def __init__(self, norm=False, dropout=False, careless=False):
        super().__init__()
        scale = 1 + np.random.rand() + random.random() if careless else 1.0
        layers = [nn.Linear(4, 5), *([nn.BatchNorm1d(5)] * norm), nn.Tanh()]
        self.layers = nn.Sequential(*layers, *([nn.Dropout(0.3)] * dropout), nn.Linear(5, 3))
        self.layers[0].weight.data.mul_(scale)

    def forward(self, x):
        return self.layers(x)
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ownbits.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def draw(number: int) -> dict[str, Any]:
    """A federation of 2 to 5 clients with 1 to 12 examples each."""
    rng = np.random.default_rng([number, 2026])

    def often(share: float) -> bool:
        return bool(rng.random() < share)

    num_clients = int(rng.integers(2, 6))
    sizes = [1 if often(0.2) else int(rng.integers(1, 13)) for _ in range(num_clients)]
    data: dict[str, Any] = {"sizes": sizes, "lazy": often(0.5), "careless": often(0.2)}
    if data["lazy"] and often(0.5):
        data["noisy"] = [i for i in range(num_clients) if often(0.4)]
    if data["lazy"] and often(0.4):
        client = int(rng.integers(num_clients))
        data["broken"] = [client, int(rng.integers(sizes[client]))]
    model: dict[str, Any] = {"name": "ownbits:Net"}
    model["options"] = {"norm": often(0.6), "dropout": often(0.3), "careless": often(0.2)}
    if often(0.2):
        model = {"name": "mlp", "options": {"hidden": [5]}}
    elif often(0.2):
        data["tested"] = False
    training: dict[str, Any] = {"batch_size": int(rng.choice([0, 1, 2, 4])), "device": "cpu"}
    training["local_steps" if often(0.5) else "local_epochs"] = int(rng.integers(1, 4))
    training |= {"clip_norm": 0.5} if often(0.2) else {}
    training |= {"gradient_momentum": 0.5} if often(0.2) else {}
    config: dict[str, Any] = {
        "algorithm": {"name": str(rng.choice(sorted(ALGORITHMS)))},
        "federation": {
            "num_clients": num_clients,
            "clients_per_round": int(rng.integers(1, num_clients + 1)),
            "num_rounds": 2,
            "seed": int(rng.integers(1000)),
            "buffers": str(rng.choice(["average", "local"])),
        },
        "training": training,
        "model": model,
        "data": {"name": "ownbits:load", "options": data},
    }
    if often(0.2) and sum(sizes) >= 2 * num_clients and "broken" not in data:
        data["divided"] = True
        config["data"]["partition"] = {"kind": "iid"}
    if often(0.6):
        config["federation"]["weighting"] = str(rng.choice(["uniform", "examples"]))
    if often(0.4) and max(sizes) > 2:
        config["data"]["holdout"] = 0.4
        config["evaluation"] = {"on_clients": True, "metrics": ["f1", "auroc"]}
    if often(0.2):
        config["stop"] = {"metric": "train_loss", "patience": 1}
    if often(0.3) and model["name"] != "mlp":
        config["federation"]["local_parameters"] = ["layers.0.*"]
        training["local_learning_rate"] = 0.1
    elif often(0.5):
        config["output"] = {"diagnostics": True}
    return config


def facts(result: Result) -> list[Any]:
    """All that must be the same: vector, buffers, what records say of clients, losses, norms."""
    records = [
        (r.round, r.clients, r.failures, r.train_loss, r.test_loss, r.test_metrics, r.on_clients)
        for r in result.rounds
    ]
    found = [[getattr(r, n) for n in DIAGNOSTICS] + [r.each_client] for r in result.rounds]
    state = {name: value.numpy().tobytes() for name, value in result.model.state_dict().items()}
    return [result.parameters.tobytes(), state, records, found]


def in_process(config: dict[str, Any]) -> list[Any]:
    try:
        return facts(simulate(config))
    except FedoptError as error:
        return ["refused", str(error)]


class InTurn:
    """Processes do not share their global generators; here only one client works at a time."""

    def __init__(self, client: Any, lock: threading.Lock) -> None:
        self._client, self._lock = client, lock

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            return self._client.get_properties(config)

    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        with self._lock:
            return self._client.fit(parameters, config)


def on_streams(config: dict[str, Any], state: Path) -> list[Any]:
    """Each client with a host of its own, as if it were alone in its process."""
    lock = threading.Lock()
    try:
        with ServerThread(config) as server:
            clients = [
                ClientThread(server, i, state, wrap=lambda client: InTurn(client, lock))
                for i in range(config["federation"]["num_clients"])
            ]
            result = facts(server.result())
            for client in clients:
                client.join()
            return result
    except FedoptError as error:
        return ["refused", str(error)]


def compare(numbers: Iterator[int] | range, folder: Path) -> int:
    """Return how many of these federations ended with a model."""
    ended = 0
    for number in numbers:
        config = draw(number)
        alone = in_process(config)
        apart = on_streams(config, folder / f"state-{number}")
        assert alone == apart, (number, config)
        ended += alone[0] != "refused"
    return ended


def test_the_first_federations_have_the_same_bits(folder: Path) -> None:
    assert compare(range(NUM_FAST), folder) >= 0.9 * NUM_FAST


@pytest.mark.slow
def test_federations_have_the_same_bits_in_one_process_and_over_streams(folder: Path) -> None:
    numbers = range(NUM_FAST, NUM_DRAWS)
    assert compare(numbers, folder) >= 0.9 * len(numbers)


ON_RAY = """
import pickle, sys
from pathlib import Path
import test_same_bits as same
from fedopt_flwr import RunConfig
from fedopt_flwr.run.flower_apps import simulate_on_ray
from fedopt_flwr.run.run import Silent

number, result = int(sys.argv[1]), Path(sys.argv[2])
config = RunConfig(**same.draw_for_ray(number)).looking_in(Path.cwd())
found = simulate_on_ray(config, Silent(), cpus_per_client=1.0, gpus_per_client=0.0)
result.write_bytes(pickle.dumps(same.facts(found)))
"""


def draw_for_ray(number: int) -> dict[str, Any]:
    """Without what draws from Python's generator, as Ray's threads do (docs/flower.md)."""
    config = draw(number)
    federation = config["federation"]
    if number % 3 == 0:  # over gRPC those count that reply first
        federation["over_sample"] = federation["num_clients"] / federation["clients_per_round"]
    config["data"]["options"] |= {"careless": False, "noisy": []}
    if config["model"]["name"] != "mlp":
        config["model"]["options"]["careless"] = False
    return config


def on_ray(number: int, folder: Path) -> list[Any]:
    """In a process of its own, as threads of an earlier run on Ray draw from Python's generator."""
    path = os.pathsep.join(str(place) for place in (TESTS, TESTS / "run"))
    command = [sys.executable, "-W", "ignore", "-c", ON_RAY, str(number), "result"]
    run = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    found: list[Any] = pickle.loads((folder / "result").read_bytes())
    return found


@pytest.mark.slow
def test_federations_have_the_same_bits_on_ray(folder: Path) -> None:
    for number in range(NUM_ON_RAY):
        alone = in_process(draw_for_ray(number))
        assert on_ray(number, folder) == alone, (number, draw_for_ray(number))


def test_a_built_in_model_is_made_for_the_test_data_wherever_it_is_made(folder: Path) -> None:
    """A server has no other data, so a simulation must not count the clients' classes."""
    config = draw(0)
    config["model"] = {"name": "mlp"}
    config["data"] = {"name": "ownbits:load", "options": {"sizes": [9, 9], "classes": 2}}
    config["federation"] |= {"num_clients": 2, "clients_per_round": 2, "local_parameters": []}
    config["training"].pop("local_learning_rate", None)
    with pytest.raises(
        FedoptError, match=r"example of class 2; the model has 2 outputs.*of the test data\)"
    ):
        simulate(config)


def test_draws_are_of_many_kinds() -> None:
    draws = [draw(number) for number in range(NUM_DRAWS)]
    assert {d["algorithm"]["name"] for d in draws} == set(ALGORITHMS)
    options = [d["data"]["options"] for d in draws]
    assert sum("broken" in o for o in options) > 20
    assert sum("holdout" in d["data"] for d in draws) > 20
    assert sum("stop" in d for d in draws) > 20
    assert sum("output" in d for d in draws) > 20
    assert sum("noisy" in o for o in options) > 20
    assert (
        sum(
            max(o["sizes"]) == 1 or d["training"]["batch_size"] == 1
            for o, d in zip(options, draws, strict=True)
        )
        > 20
    )

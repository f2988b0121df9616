"""What several tests need: small federations with an open view of both sides, and NumPy maths."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedopt_flwr import RunConfig, simulate
from fedopt_flwr.algorithm import Algorithm, Plan
from fedopt_flwr.algorithms import ALGORITHMS
from fedopt_flwr.conformance.harness import Federation, Toy, linear
from fedopt_flwr.data import from_datasets
from fedopt_flwr.engines.in_process import run_in_process
from fedopt_flwr.flower import FederatedClient, FederatedStrategy, MemoryStates
from fedopt_flwr.rounds.record import RoundRecord, as_json
from fedopt_flwr.run.experiment import Experiment
from fedopt_flwr.run.run import Silent

FEATURES, CLASSES = 4, 3


def on_slopes(
    rule: Algorithm,
    x: Sequence[float],
    slopes: Sequence[Sequence[float]],
    steps: int | Sequence[int] = 2,
) -> Federation:
    """A federation whose client i has the gradient slopes[i] everywhere, K (or K_i) times."""
    counts = [steps] * len(slopes) if isinstance(steps, int) else steps
    toys = [linear(slope, count) for slope, count in zip(slopes, counts, strict=True)]
    return Federation(rule, toys, x, num_rounds=10)


def on_toys(rule: Algorithm, x: float, toys: Sequence[Toy]) -> Federation:
    """A federation of clients with one weight each."""
    return Federation(rule, toys, [x], num_rounds=10)


def bowl(curvatures: Sequence[float], centre: float = 0.0) -> Toy:
    """F(y) = mean over its minibatches of ½h_b(y − m)²: the gradient of one is h_b(y − m)."""
    return Toy([centre], [(h, 0.0) for h in curvatures])


def make_plan(
    num_clients: int, steps: Sequence[int], num_rounds: int = 10, sampled: int | None = None
) -> Plan:
    """A plan with uniform importance."""
    return Plan(
        num_clients=num_clients,
        clients_per_round=sampled or num_clients,
        num_rounds=num_rounds,
        num_examples=dict.fromkeys(range(num_clients), 1),
        local_steps=dict(enumerate(steps)),
        importance=dict.fromkeys(range(num_clients), 1 / num_clients),
    )


def checkpoint_file(run: Path) -> Path:
    """The newest checkpoint of a run's folder."""
    return max(run.glob("checkpoint-*.safetensors"))


def break_checkpoints(run: Path) -> None:
    """Cut all checkpoints of a run's folder short."""
    for file in run.glob("checkpoint-*.safetensors"):
        file.write_bytes(file.read_bytes()[:50])


def write_run_at_work(folder: Path, *records: RoundRecord, **sections: dict[str, Any]) -> Path:
    """A run's folder as it is while the run is at work; the file of its records."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(tomli_w.dumps(RunConfig(**sections).to_dict()))
    lines = [json.dumps(as_json(record.to_dict())) + "\n" for record in records]
    (folder / "rounds.jsonl").write_text("".join(lines))
    return folder / "rounds.jsonl"


def softmax_clients(sizes: Sequence[int], seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Unlike clients of unlike size: each has its own centre and its own favourite class."""
    rng = np.random.default_rng(seed)
    clients = []
    for i, size in enumerate(sizes):
        x = rng.normal(rng.normal(0, 1, FEATURES), 1, (size, FEATURES)).astype(np.float32)
        y = np.where(rng.random(size) < 0.6, i % CLASSES, rng.integers(0, CLASSES, size))
        clients.append((x, y.astype(np.int64)))
    return clients


def softmax_gradient(theta: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Gradient of the mean cross-entropy of softmax regression, in float64."""
    weight = theta[: CLASSES * FEATURES].reshape(CLASSES, FEATURES)
    scores = x @ weight.T + theta[CLASSES * FEATURES :]
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    p /= len(y)
    return np.concatenate([(p.T @ x).ravel(), p.sum(axis=0)])


def linear_model() -> nn.Module:
    """Softmax regression at a fixed point that is not zero."""
    layer = nn.Linear(FEATURES, CLASSES)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-0.5, 0.5, CLASSES * FEATURES).view(CLASSES, FEATURES))
        layer.bias.copy_(torch.linspace(0.1, 0.3, CLASSES))
    return layer


def as_datasets(clients: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[TensorDataset]:
    return [TensorDataset(torch.from_numpy(x), torch.from_numpy(y)) for x, y in clients]


@dataclass
class OpenRun:
    """A finished run with the server's state and the clients' stored states."""

    strategy: FederatedStrategy
    states: MemoryStates
    records: list[RoundRecord]

    def client_vector(self, client_id: int, name: str) -> Tensor:
        """The state that counts: of the last counted reply, else the initial one."""
        version = self.strategy.versions.get(client_id)
        if version is None:
            return self.strategy.rule.init_client(self.strategy.model.size)[name]
        return self.states.load(client_id, version)[name]

    def mean_control_variate(self) -> Tensor:
        importance = self.strategy.state.plan.importance
        return sum(
            p * self.client_vector(i, "control_variate").double() for i, p in importance.items()
        )


def open_run(
    config: dict[str, Any],
    datasets: Sequence[Any],
    model: Callable[[], nn.Module] = linear_model,
    *,
    workers: int = 1,
    wrap: Callable[[FederatedClient], FederatedClient] = lambda client: client,
    on_round: Callable[[OpenRun], None] | None = None,
    test_data: Any = None,
) -> OpenRun:
    """Run a federation in process; `wrap` may replace clients by faulty ones."""
    run_config = RunConfig(**config)
    experiment = Experiment(
        run_config, model=model, data=from_datasets(datasets, test_data, run_config)
    )
    states, records = MemoryStates(), []

    def take(record: RoundRecord) -> None:
        records.append(record)
        if on_round is not None:
            on_round(run)

    strategy = FederatedStrategy(
        experiment.rule,
        experiment.model,
        run_config,
        template=experiment.template(),
        evaluate=experiment.evaluate if test_data is not None else None,
        on_round=take,
        in_memory=True,
    )
    run = OpenRun(strategy, states, records)
    pool = experiment.pool(workers)
    clients = [
        wrap(FederatedClient(i, d, pool, states)) for i, d in enumerate(experiment.data.clients)
    ]
    run_in_process(
        strategy,
        clients,
        states,
        num_rounds=run_config.federation.num_rounds,
        workers=workers,
        round_timeout=run_config.federation.timeout_seconds,
    )
    strategy.write_to_model()
    return run


SOFTMAX_SIZES = [30, 5, 12, 50, 8, 20]
SOFTMAX_CLIENTS = softmax_clients(SOFTMAX_SIZES)
SOFTMAX_DATA = as_datasets(SOFTMAX_CLIENTS)
WITH_CONTROL_VARIATES = [
    name for name, rule in ALGORITHMS.items() if "control_variate" in rule.client_state
]


def softmax_config(
    name: str, sampled: int = 3, rounds: int = 10, **hyperparameters: object
) -> dict[str, Any]:
    """A run of a rule on SOFTMAX_DATA."""
    return {
        "algorithm": {"name": name, **hyperparameters},
        "federation": {"num_clients": 6, "clients_per_round": sampled, "num_rounds": rounds},
        "training": {"local_steps": 4, "batch_size": 4},
    }


def final_parameters(settings: dict[str, Any]) -> np.ndarray:
    """The parameters at the end of a run on SOFTMAX_DATA."""
    return simulate(settings, model=linear_model, client_data=SOFTMAX_DATA).parameters


def digits_config(name: str, directory: Path | None = None, **sections: Any) -> dict[str, Any]:
    """A short run of a rule on digits."""
    return {
        "algorithm": {"name": name},
        "federation": {"num_clients": 8, "clients_per_round": 4, "num_rounds": 9, "seed": 3},
        "training": {"local_steps": 4, "batch_size": 8},
        "model": {"options": {"hidden": [16]}},
        "output": {"directory": directory} if directory else {},
    } | sections


def model_bytes(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


# one rule of each kind of state in the fast suite, all of them in the slow one
SOME_FAST = [
    name
    if name in ("fedavg", "scaffold_m", "padamfed", "fadamgc")
    else pytest.param(name, marks=pytest.mark.slow)
    for name in ALGORITHMS
]


def without_times(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if "seconds" not in k} for line in lines]


def checkpointed(folder: Path, name: str = "scaffold_m", every: int = 4) -> dict[str, Any]:
    return digits_config(name, output={"directory": folder, "checkpoint_every": every})


class At(Silent):
    """Does something when a round is over."""

    def __init__(self, number: int, action: Callable[[], Any]) -> None:
        self._number, self._action = number, action

    def on_round(self, record: RoundRecord) -> None:
        if record.round == self._number:
            self._action()


def small_config(num_clients: int = 3, **sections: Any) -> dict[str, Any]:
    return {
        "algorithm": {"name": "fedavg"},
        "federation": {
            "num_clients": num_clients,
            "clients_per_round": num_clients,
            "num_rounds": 2,
        },
        "training": {"local_steps": 2, "batch_size": 4},
    } | sections


def three_datasets(size: int = 9) -> list[TensorDataset]:
    return as_datasets(softmax_clients([size] * 3))

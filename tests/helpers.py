"""What several tests need: small federations with an open view of both sides, and NumPy maths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedopt_flwr import RunConfig
from fedopt_flwr.algorithm import Algorithm, Plan, Reply
from fedopt_flwr.data import from_datasets
from fedopt_flwr.engines.in_process import run_in_process
from fedopt_flwr.experiment import Experiment
from fedopt_flwr.flower import FederatedClient, FederatedStrategy, MemoryStates
from fedopt_flwr.metrics import RoundRecord

FEATURES, CLASSES = 4, 3


class ConstantGradient:
    """An objective with a linear loss: the gradient is the same everywhere."""

    num_examples = 1

    def __init__(self, gradient: Sequence[float], num_steps: int) -> None:
        self._gradient, self.num_steps = torch.tensor(gradient), num_steps

    def working_copy(self, x: Tensor) -> Tensor:
        return x.clone()

    def batches(self) -> Iterator[int]:
        return iter(range(self.num_steps))

    def gradient(self, y: Tensor, batch: Any) -> Tensor:
        return self._gradient.clone()

    def full_gradient(self, y: Tensor, num_examples: int = 0) -> Tensor:
        return self._gradient.clone()


class Quadratic:
    """F(y) = mean over its batches of ½h_b(y − m)²: the gradient of a batch is h_b(y − m)."""

    num_examples = 1

    def __init__(self, curvatures: Sequence[float], centre: float = 0.0) -> None:
        self._curvatures, self._centre = list(curvatures), centre
        self.num_steps = len(self._curvatures)

    def working_copy(self, x: Tensor) -> Tensor:
        return x.clone()

    def batches(self) -> Iterator[float]:
        return iter(self._curvatures)

    def gradient(self, y: Tensor, batch: float) -> Tensor:
        return batch * (y - self._centre)

    def full_gradient(self, y: Tensor, num_examples: int = 0) -> Tensor:
        return self.gradient(y, sum(self._curvatures) / len(self._curvatures))


def on_quadratics(rule: Algorithm, x: float, objectives: Sequence[Quadratic]) -> HandRun:
    """A HandRun whose client i minimises objectives[i]."""
    steps = [objective.num_steps for objective in objectives]
    return HandRun(rule, [x], [[0.0]] * len(steps), steps, objectives)


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


class HandRun:
    """Rounds of a rule on constant gradients, without Flower: the arithmetic alone."""

    def __init__(
        self,
        rule: Algorithm,
        x: Sequence[float],
        gradients: Sequence[Sequence[float]],
        steps: int | Sequence[int] = 2,
        objectives: Sequence[Any] | None = None,
    ) -> None:
        counts = [steps] * len(gradients) if isinstance(steps, int) else list(steps)
        self.plan = make_plan(len(gradients), counts)
        self.rule = rule.resolve(self.plan)
        self.objectives = objectives or [
            ConstantGradient(g, k) for g, k in zip(gradients, counts, strict=True)
        ]
        self.server = self.rule.init_server(torch.tensor(x), self.plan)
        self.clients = [self.rule.init_client(len(x)) for _ in gradients]
        self.uploads: dict[int, dict[str, Tensor]] = {}
        self.rounds, self.now = 0, self.rule
        self.replies: list[Reply] = []
        if self.rule.start_names:
            self._round(range(len(counts)), "client_start", {"model": self.server["model"]})
            self.server = self.rule.server_start(self.server, self.replies)

    def round(self, sampled: Sequence[int]) -> None:
        """One round; the order of `sampled` is the clients' random order."""
        self.rounds += 1
        self.now = self.rule.at_round(self.server, self.rounds)
        self._round(sampled, "client_update", self.now.broadcast(self.server))
        self.server = self.now.server_update(self.server, self.replies)

    def _round(self, sampled: Sequence[int], half: str, received: dict[str, Tensor]) -> None:
        self.uploads, self.replies = {}, []
        for rank, i in enumerate(sampled):
            told = getattr(self.now.for_client(rank), half)
            upload, self.clients[i] = told(received, self.clients[i], self.objectives[i])
            self.uploads[i] = upload
            weight, importance = 1 / len(sampled), 1 / len(self.clients)
            steps = self.plan.local_steps[i]
            self.replies.append(Reply(i, upload, weight, importance, steps, rank))

    def value(self, name: str) -> list[float]:
        return self.server[name].tolist()


def checkpoint_file(run: Path) -> Path:
    """The one checkpoint of a run's folder."""
    (file,) = run.glob("checkpoint-*.safetensors")
    return file


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
        round_timeout=run_config.federation.round_timeout,
    )
    strategy.write_to_model()
    return run

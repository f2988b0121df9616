"""Small federations with known answers, run without Flower: the rule's arithmetic alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..algorithm import Algorithm, ClientId, ClientState, Plan, Reply, ServerState
from ..rounds.sampling import reply_weights

START = [1.0, -1.0]  # the model before round 1
RATES = {"client_learning_rate": 0.1, "server_learning_rate": 1.0}
Batch = tuple[float, Tensor | float]  # curvature h and slope a: the gradient is h(y − centre) + a


class Toy:
    """F(y) = the mean over its minibatches of ½h‖y − centre‖² + a·y."""

    num_examples = 1

    def __init__(self, centre: Sequence[float], batches: Sequence[Batch], scale: float = 1) -> None:
        self.centre = torch.tensor(centre, dtype=torch.float32)
        self._batches = list(batches)
        self._scale = scale
        self.seen: set[int] = set()  # minibatches whose gradient was taken

    @property
    def num_steps(self) -> int:
        return len(self._batches)

    def working_copy(self, x: Tensor) -> Tensor:
        return x.clone()

    def batches(self) -> Iterator[Any]:
        return iter(range(len(self._batches)))

    def gradient(self, y: Tensor, batch: Any) -> Tensor:
        self.seen.add(batch)
        curvature, slope = self._batches[batch]
        gradient: Tensor = (curvature * (y - self.centre) + slope) * self._scale
        return gradient

    def full_gradient(self, y: Tensor, num_examples: int = 0) -> Tensor:
        return torch.stack([self.gradient(y, b) for b in self.batches()]).mean(dim=0)


def quadratic(
    centre: Sequence[float], curvature: float = 1.0, steps: int = 3, scale: float = 1
) -> Toy:
    """Full-batch quadratic: every minibatch is the whole."""
    return Toy(centre, [(curvature, torch.zeros(len(centre)))] * steps, scale)


def linear(slope: Sequence[float], steps: int = 3, noise: Sequence[float] = ()) -> Toy:
    """Linear loss; minibatch b has the slope plus noise[b] in every direction (noise sums to 0)."""
    base = torch.tensor(slope, dtype=torch.float32)
    spread = list(noise) or [0.0] * steps
    return Toy([0.0] * len(slope), [(0.0, base + n) for n in spread])


class Federation:
    """A rule at work on toys; every state and every upload can be looked at."""

    def __init__(
        self,
        rule: Algorithm,
        toys: Sequence[Toy],
        x: Sequence[float],
        *,
        sampled: int | None = None,
        num_rounds: int = 400,
        importance: Sequence[float] = (),
    ) -> None:
        count = len(toys)
        shares = list(importance) or [1 / count] * count
        self.toys = list(toys)
        self.number = 0  # of the last round
        self.plan = Plan(
            num_clients=count,
            clients_per_round=sampled or count,
            num_rounds=num_rounds,
            num_examples=dict.fromkeys(range(count), 1),
            local_steps={i: toy.num_steps for i, toy in enumerate(toys)},
            importance=dict(enumerate(shares)),
        )
        self.rule = self.now = rule.resolve(self.plan)
        self.server = self.rule.init_server(torch.tensor(x, dtype=torch.float32), self.plan)
        self.states: list[ClientState] = [self.rule.init_client(len(x)) for _ in toys]
        self.replies: list[Reply] = []
        if self.rule.start_names:
            received = {"model": self.server["model"]}
            self._ask(range(count), lambda rule: rule.client_start, received)
            self.server = self.rule.server_start(self.server, self.replies)

    @property
    def x(self) -> Tensor:
        return self.server["model"]

    def run(self, rounds: int, sampled: Callable[[int], Sequence[int]] | None = None) -> Tensor:
        """Run rounds; `sampled` names the clients of each. Return the model."""
        for number in range(rounds):
            self.round(range(len(self.toys)) if sampled is None else sampled(number))
        return self.x

    def round(
        self,
        asked: Sequence[int],
        arrange: Callable[[list[Reply]], list[Reply]] = lambda replies: replies,
        change: Callable[[Algorithm], Algorithm] = lambda rule: rule,
    ) -> None:
        """One round of these clients, whose replies `arrange` may reorder, whose rule `change`."""
        self.number += 1
        self.now = change(self.rule.at_round(self.server, self.number))
        received = self.now.broadcast(self.server)
        self._ask(asked, lambda rule: rule.client_update, received)
        self.server = self.now.server_update(self.server, arrange(self.replies))

    def _ask(
        self, asked: Sequence[int], half: Callable[[Algorithm], Any], received: dict[str, Tensor]
    ) -> None:
        counts: dict[ClientId, int] = dict.fromkeys(asked, 1)
        weights = reply_weights(counts, self.plan.importance, "uniform", self.rule.unbiased_weights)
        self.replies = []
        for rank, i in enumerate(asked):
            client_half = half(self.now.for_client(rank))
            upload, self.states[i] = client_half(received, self.states[i], self.toys[i])
            kept = {name: array.clone() for name, array in upload.items()}
            steps = self.toys[i].num_steps
            self.replies.append(Reply(i, kept, weights[i], self.plan.importance[i], steps, rank))

    def mean_control_variate(self) -> Tensor:
        """Return Σ p_i c_i over all clients."""
        parts = [p * s["control_variate"] for p, s in zip(self.shares, self.states, strict=True)]
        return torch.stack(parts).sum(dim=0)

    @property
    def shares(self) -> list[float]:
        return list(self.plan.importance.values())


def build_rule(kind: type[Algorithm], **wanted: Any) -> Algorithm:
    """Return the rule with those of the wanted hyperparameters that it has."""
    return kind(**{name: v for name, v in wanted.items() if name in kind.model_fields})


def unlike_clients(rule: Algorithm, sampled: int = 4) -> Federation:
    """Return four clients with their own minima, curvatures and importance."""
    toys = [quadratic([c, -c], 0.5 + 0.5 * i) for i, c in enumerate((-2.0, 0.0, 1.0, 3.0))]
    return Federation(rule, toys, START, sampled=sampled, importance=[0.1, 0.2, 0.3, 0.4])


def is_close(one: Tensor, other: Tensor, tolerance: float = 1e-4) -> bool:
    """Return whether two vectors differ by at most `tolerance`, relative to numbers above 1."""
    return bool((one - other).abs().max() <= tolerance * max(1.0, float(other.abs().max())))


def copy_vectors(state: ServerState) -> dict[str, Tensor]:
    """Return copies of the server's vectors."""
    return {name: vector.clone() for name, vector in state.vectors.items()}

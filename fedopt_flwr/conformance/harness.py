"""Small federations with known answers, run without Flower: the rule's arithmetic alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..algorithm import Algorithm, ClientId, ClientState, Plan, Reply
from ..rounds.sampling import reply_weights
from .checks import Kind, require

START = [1.0, -1.0]  # the model before round 1
RATES = {"client_learning_rate": 0.1, "server_learning_rate": 1.0}
Batch = tuple[float, Tensor | float]  # curvature h and slope a: the gradient is h(y − centre) + a


@dataclass
class Toy:
    """F(y) = the mean over its minibatches of ½h‖y − centre‖² + a·y + constant."""

    centre: Sequence[float]
    minibatches: Sequence[Batch]
    seen: set[int] = field(default_factory=set)  # minibatches whose gradient was taken
    num_examples: int = 1
    constant: float = 0.0
    last_loss: Tensor = field(default_factory=lambda: torch.zeros(()))

    @property
    def num_steps(self) -> int:
        return len(self.minibatches)

    def working_copy(self, x: Tensor) -> Tensor:
        return x.clone()

    def batches(self) -> Iterator[Any]:
        return iter(range(self.num_steps))

    def gradient(self, y: Tensor, batch: Any) -> Tensor:
        self.seen.add(batch)
        curvature, slope = self.minibatches[batch]
        away = y - torch.tensor(self.centre)
        self.last_loss = (curvature / 2 * away.square() + slope * y).sum() + self.constant
        gradient: Tensor = curvature * away + slope
        return gradient

    def full_gradient(self, y: Tensor, num_examples: int = 0) -> Tensor:
        return torch.stack([self.gradient(y, b) for b in self.batches()]).mean(dim=0)


def quadratic(centre: Sequence[float], curvature: float = 1.0, steps: int = 3) -> Toy:
    """Full-batch quadratic: every minibatch is the whole."""
    return Toy(centre, [(curvature, 0.0)] * steps)


def linear(slope: Sequence[float], steps: int = 3) -> Toy:
    """Linear loss, above 0 near START: the gradient is the slope, for every minibatch."""
    return Toy([0.0] * len(slope), [(0.0, torch.tensor(slope))] * steps, constant=10.0)


class Federation:
    """A rule at work on toys; every state and every upload can be looked at."""

    def __init__(
        self,
        rule: Algorithm,
        toys: Sequence[Toy],
        x: Sequence[float] = START,
        *,
        sampled: int | None = None,
        num_rounds: int = 400,
        importance: Sequence[float] = (),
    ) -> None:
        count = len(toys)
        self.toys = list(toys)
        self.number = 0  # of the last round
        self.plan = Plan(
            num_clients=count,
            clients_per_round=sampled or count,
            num_rounds=num_rounds,
            num_examples=dict.fromkeys(range(count), 1),
            local_steps={i: toy.num_steps for i, toy in enumerate(toys)},
            importance=dict(enumerate(importance or [1 / count] * count)),
        )
        self.rule = self.now = rule.resolve(self.plan)
        self.server = self.rule.init_server(torch.tensor(x, dtype=torch.float32), self.plan)
        self.states: list[ClientState] = [self.rule.init_client(len(x)) for _ in toys]
        self.replies: list[Reply] = []
        if self.rule.start_names:
            self._ask(range(count), lambda rule: rule.client_start, {"model": self.x})
            self.server = self.rule.server_start(self.server, self.replies)

    @property
    def x(self) -> Tensor:
        return self.server["model"]

    def run(self, rounds: int) -> Tensor:
        """Run rounds of all clients; return the model."""
        for _ in range(rounds):
            self.round(range(len(self.toys)))
        return self.x

    def round(
        self,
        asked: Sequence[int],
        arrange: Callable[[list[Reply]], list[Reply]] = lambda replies: replies,
        **changed: float,
    ) -> None:
        """One round of these clients; `arrange` may reorder replies, a schedule may change η."""
        self.number += 1
        self.now = self.rule.at_round(self.server, self.number).model_copy(update=changed)
        self._ask(asked, lambda rule: rule.client_update, self.now.broadcast(self.server))
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
            toy, importance = self.toys[i], self.plan.importance[i]
            loss = float(toy.last_loss)
            self.replies.append(Reply(i, kept, weights[i], importance, toy.num_steps, rank, loss))


def build_rule(kind: Kind, **wanted: Any) -> Algorithm:
    """Return the rule with those of the wanted hyperparameters that it has."""
    return kind(**{name: v for name, v in wanted.items() if name in kind.model_fields})


def unlike_clients(rule: Algorithm, sampled: int = 4) -> Federation:
    """Return four clients with their own minima, curvatures and importance."""
    toys = [quadratic([c, -c], 0.5 + 0.5 * i) for i, c in enumerate((-2.0, 0.0, 1.0, 3.0))]
    return Federation(rule, toys, sampled=sampled, importance=[0.1, 0.2, 0.3, 0.4])


def movement(kind: Kind, toys: Sequence[Toy], rounds: int = 1, /, **wanted: Any) -> Tensor:
    """Return how far the last of so many rounds moves the model, at RATES if not wanted else."""
    federation = Federation(build_rule(kind, **{**RATES, **wanted}), toys)
    before = federation.run(rounds - 1)
    return federation.run(1) - before


def is_close(one: Tensor, other: Tensor, tolerance: float = 1e-4) -> bool:
    """Return whether two vectors differ by at most `tolerance`, relative to numbers above 1."""
    return bool((one - other).abs().max() <= tolerance * max(1.0, float(other.abs().max())))


def require_close(
    found: Tensor, expected: Tensor | Sequence[float], what: str, tolerance: float = 1e-4
) -> None:
    """Raise Failed, with "`what` found, not expected", unless two vectors are close."""
    wanted = torch.as_tensor(expected)
    close = is_close(found, wanted, tolerance)
    require(close, f"{what} {found.tolist()}, not {wanted.tolist()}")

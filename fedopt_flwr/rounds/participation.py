"""From the connected clients to a plan, and from the plan to who is asked in each round."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from ..algorithm import Algorithm, ClientId, Plan, Reply, ServerState
from ..config.run_config import RunConfig
from ..config.sections import FederationSection
from ..errors import FedoptWarning
from ..randomness import derive
from ..training.objective import num_steps
from .record import Upload
from .sampling import (
    by_cluster,
    by_share,
    cluster,
    fill_slots,
    importances,
    reply_weights,
    sample_uniform,
    sample_weighted,
)

_NEARLY_ALL = 0.9  # of the weight of all clients
CLUSTERS = "clusters"  # among the server's vectors: a label for each client


def make_plan(rule: Algorithm, config: RunConfig, num_examples: Mapping[ClientId, int]) -> Plan:
    """Return what is fixed before round 1."""
    federation = config.federation
    training = config.training
    steps = {
        i: num_steps(n, training.batch_size, training.local_steps, training.local_epochs)
        for i, n in num_examples.items()
    }
    return Plan(
        num_clients=len(num_examples),
        clients_per_round=federation.clients_per_round,
        num_rounds=federation.num_rounds,
        num_examples=num_examples,
        local_steps=steps,
        importance=importances(num_examples, federation.weighting or rule.weighting),
        constant_rates=config.schedule.is_constant,
        steps_may_change=federation.is_open and training.local_epochs is not None,
    )


def warn_of_one_weight(plan: Plan) -> None:
    """Warn if one of several clients decides nearly alone: as many examples are easily claimed."""
    for client_id, share in plan.importance.items():
        if share > _NEARLY_ALL and plan.num_clients > 1:
            warnings.warn(
                f"client {client_id}: holds {share:.1%} of all weight, with "
                f"{plan.num_examples[client_id]} examples by its own account; the others hardly "
                "count; check that client, lower limits.examples or set federation.weighting = "
                "'uniform'",
                FedoptWarning,
                stacklevel=2,
            )


class Participation:
    """Who is asked in the current round, how often each was drawn, and what its reply weighs."""

    def __init__(self, rule: Algorithm, federation: FederationSection, plan: Plan) -> None:
        self._federation = federation
        self._unbiased = rule.unbiased_weights
        self._by_examples = (federation.weighting or rule.weighting) == "examples"
        self.renew(plan)
        if federation.sampler == "clustered" and federation.warmup_rounds >= plan.num_rounds:
            warnings.warn(
                f"federation.warmup_rounds: got {federation.warmup_rounds} of {plan.num_rounds} "
                "rounds; all clients train in every round and are never grouped; lower it or raise "
                "federation.num_rounds",
                FedoptWarning,
                stacklevel=2,
            )

    def renew(self, plan: Plan) -> None:
        """Draw from the clients of this plan from now on, with its weights."""
        self._plan = plan
        self._ids = list(plan.num_examples)
        self._shares = {i: n if self._by_examples else 1 for i, n in plan.num_examples.items()}
        self.choose_all()

    def choose_all(self) -> list[ClientId]:
        """Choose all N, each once, and return them."""
        self._sampler = "uniform"
        self._drawn = list(self._ids)
        self._counts = dict.fromkeys(self._ids, 1)
        self._ranks = dict.fromkeys(self._ids, 0)
        return list(self._ids)

    def needs_clusters(self, state: ServerState, number: int) -> bool:
        """Whether the warm-up is over and the clients are not grouped yet."""
        late = number > self._federation.warmup_rounds
        return self._federation.sampler == "clustered" and late and CLUSTERS not in state.vectors

    def group(self, state: ServerState, gradients: Mapping[ClientId, torch.Tensor]) -> ServerState:
        """Return the state with a cluster for each client; those without a gradient have one.

        With fewer than half of the gradients nothing changes, and the warm-up continues.
        """
        if 2 * len(gradients) < len(self._ids):
            return state
        missing = torch.zeros_like(state["model"])
        rows = [gradients.get(i, missing) for i in self._ids]
        labels = cluster(rows, self._plan.clients_per_round)
        return state.replace(**{CLUSTERS: torch.tensor(labels, dtype=torch.float32)})

    def choose(
        self, state: ServerState, number: int, is_connected: Callable[[ClientId], bool]
    ) -> list[ClientId]:
        """Draw the clients of a round and return them in the order of ids, each once.

        Uniform sampling passes over those that are away; the others draw from all.
        """
        federation = self._federation
        warming_up = federation.sampler == "clustered" and CLUSTERS not in state.vectors
        self._sampler = "uniform" if warming_up else federation.sampler
        if warming_up:
            drawn = list(self._ids)
        elif self._sampler == "uniform":
            order = sample_uniform(self._ids, federation.seed, number)
            drawn = [i for i in order if is_connected(i)][: federation.num_asked]
        else:
            drawn = sample_weighted(self._slots(state), federation.seed, number)
        self._drawn = drawn
        self._counts = dict(Counter(drawn))
        chosen = [i for i in self._ids if i in self._counts]
        # those that were drawn to be asked in case another is late come last
        likely = set(drawn[: self._plan.clients_per_round]) if federation.over_sample > 1 else drawn
        shuffled = [i for i in chosen if i in likely]
        generator = random.Random(derive(federation.seed, "ranks", number))  # nosec B311  # no secret
        generator.shuffle(shuffled)
        shuffled += [i for i in chosen if i not in likely]
        self._ranks = {client: rank for rank, client in enumerate(shuffled)}
        return chosen

    def evaluators(
        self, number: int, clients: int | None, is_free: Callable[[ClientId], bool]
    ) -> list[ClientId]:
        """Return who evaluates after a round, in the order of ids: all that are free, or so many of
        them, drawn anew each time."""
        order = sample_uniform(self._ids, derive(self._federation.seed, "evaluators"), number)
        chosen = [i for i in order if is_free(i)][:clients]
        return [i for i in self._ids if i in chosen]

    def _slots(self, state: ServerState) -> Sequence[Mapping[ClientId, int]]:
        if self._sampler == "multinomial":
            return [self._shares] * self._plan.clients_per_round
        if self._sampler == "adaptive":
            order = by_share(self._ids, self._shares)
        else:
            labels = [int(label) for label in state[CLUSTERS].tolist()]
            order = by_cluster(self._ids, labels, self._shares)
        return fill_slots(order, self._shares, self._plan.clients_per_round)

    def surplus(self, replied: Collection[ClientId]) -> list[ClientId]:
        """Return those of the repliers that do not count, as others were drawn before them."""
        if self._federation.over_sample == 1:
            return []
        return [i for i in self._drawn if i in replied][self._plan.clients_per_round :]

    def rank(self, client_id: ClientId) -> int:
        """Return a client's place in the round's random order, from 0."""
        return self._ranks[client_id]

    def weigh(self, uploads: Mapping[ClientId, Upload]) -> list[Reply]:
        """Return replies in the order of ids, with their weights."""
        plan = self._plan
        counts = {i: self._counts[i] for i in self._ids if i in uploads}
        weights = reply_weights(counts, plan.importance, self._sampler, self._unbiased)
        return [
            Reply(
                client_id=i,
                upload=uploads[i].arrays,
                weight=weights[i],
                importance=plan.importance[i],
                num_steps=plan.local_steps[i],
                rank=self._ranks[i],
                loss=uploads[i].loss,
            )
            for i in counts
        ]

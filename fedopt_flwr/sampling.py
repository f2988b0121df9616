"""Who takes part in a round, and with which weights."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise

from .algorithm import ClientId
from .errors import RunError
from .seeding import derive


def sorted_ids(ids: Sequence[ClientId]) -> list[ClientId]:
    """Return client ids in the order in which everything sums: numbers by size, names by letter.

    Raises RunError when numbers and names are mixed or an id occurs twice.
    """
    if len({type(i) for i in ids}) > 1:
        raise RunError(
            f"client ids: got numbers and names, {list(ids)}; use only one kind in a run"
        )
    ordered = sorted(ids)
    for one, other in pairwise(ordered):
        if one == other:
            raise RunError(f"client ids: {one!r} is there twice; each client needs its own id")
    return ordered


def sample_uniform(ids: Sequence[ClientId], seed: int, round_number: int) -> list[ClientId]:
    """Return a permutation of all N ids; the first S that are connected take part.

    `ids` must be in the order of `sorted_ids`, so that the draw depends on nothing but its values.
    """
    order = list(ids)
    random.Random(derive(seed, "sampling", round_number)).shuffle(order)
    return order


def importances(num_examples: Mapping[ClientId, int], weighting: str) -> dict[ClientId, float]:
    """Return p_i: 1/N under "uniform", n_i/Σn under "examples"; they sum to 1."""
    if weighting == "uniform":
        return {i: 1 / len(num_examples) for i in num_examples}
    total = sum(num_examples.values())
    return {i: n / total for i, n in num_examples.items()}

"""Who takes part in a round, and with which weights.

The samplers of FedMoS (Wang et al., INFOCOM 2023), for every rule: each draws M = S clients, with
E[w_i] = p_i for the weights of `reply_weights`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from ..algorithm import ClientId
from ..errors import RunError
from ..randomness import derive

if TYPE_CHECKING:
    from torch import Tensor


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
            raise RunError(f"client ids: {one!r} occurs twice; each client needs its own id")
    return ordered


def sample_uniform(ids: Sequence[ClientId], seed: int, round_number: int) -> list[ClientId]:
    """Return a permutation of all N ids; the first S that are connected take part.

    `ids` must be in the order of `sorted_ids`, so that the draw depends on nothing but its values.
    """
    order = list(ids)
    generator = random.Random(derive(seed, "sampling", round_number))  # nosec B311  # to repeat
    generator.shuffle(order)
    return order


def sample_weighted(
    slots: Sequence[Mapping[ClientId, int]], seed: int, round_number: int
) -> list[ClientId]:
    """Return one client for each draw, from that draw's own distribution (units by client)."""
    generator = random.Random(derive(seed, "sampling", round_number))  # nosec B311  # to repeat
    return [generator.choices(list(slot), list(slot.values()))[0] for slot in slots]


def fill_slots(
    order: Iterable[ClientId], shares: Mapping[ClientId, int], draws: int
) -> list[dict[ClientId, int]]:
    """Return the M distributions of adaptive client selection (FedMoS, Algorithm 2), in units.

    Client i brings M·n_i units, a draw has room for Σn: Σ_m p_{i,m} = M p_i and Σ_i p_{i,m} = 1
    hold exactly. Clients are poured in the given order, each draw filled before the next begins.
    """
    capacity = sum(shares.values())
    slots: list[dict[ClientId, int]] = [{}]
    free = capacity
    for client in order:
        units = draws * shares[client]
        while units:
            part = min(units, free)
            slots[-1][client] = part
            units = units - part
            free = free - part
            if free == 0:
                slots.append({})
                free = capacity
    return slots[:draws]


def cluster(gradients: Sequence[Tensor], num_clusters: int) -> list[int]:
    """Return a label for each gradient: Ward's linkage of unit vectors, at most M clusters.

    Their squared Euclidean distance is twice the cosine distance. Gradients of zero length, such as
    those that are missing, have no direction and are a cluster of their own.
    """
    import numpy as np
    from sklearn.cluster import AgglomerativeClustering

    rows = np.stack([gradient.cpu().numpy() for gradient in gradients])
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    known = norms[:, 0] > 0
    groups = max(1, num_clusters - int(not known.all()))
    labels = np.full(len(rows), num_clusters - 1)
    if known.sum() <= groups:
        labels[known] = np.arange(known.sum())
    else:
        clustering = AgglomerativeClustering(n_clusters=groups, linkage="ward")
        labels[known] = clustering.fit_predict(rows[known] / norms[known])
    return [int(label) for label in labels]


def by_share(ids: Iterable[ClientId], shares: Mapping[ClientId, int]) -> list[ClientId]:
    """Return ids by descending share; those with equal shares stay in their order."""
    return sorted(ids, key=lambda i: -shares[i])


def by_cluster(
    ids: Sequence[ClientId], labels: Sequence[int], shares: Mapping[ClientId, int]
) -> list[ClientId]:
    """Return ids cluster by cluster, by descending share of clusters, then of clients."""
    members: dict[int, list[ClientId]] = {}
    for client, label in zip(ids, labels, strict=True):
        members.setdefault(label, []).append(client)
    groups = sorted(members.values(), key=lambda group: -sum(shares[i] for i in group))
    return [client for group in groups for client in by_share(group, shares)]


def reply_weights(
    counts: Mapping[ClientId, int],
    importance: Mapping[ClientId, float],
    sampler: str,
    unbiased: bool,
) -> dict[ClientId, float]:
    """Return w_i of the replies that were counted, from how often each client was drawn.

    Under uniform sampling p_i/Σp over the repliers or, `unbiased`, N p_i over their number; under
    the other samplers count_i/Σcounts. Who failed is as if it had not been drawn.
    """
    if sampler != "uniform":
        total = sum(counts.values())
        return {i: count / total for i, count in counts.items()}
    share = len(counts) / len(importance) if unbiased else sum(importance[i] for i in counts)
    return {i: importance[i] / share for i in counts}


def importances(num_examples: Mapping[ClientId, int], weighting: str) -> dict[ClientId, float]:
    """Return p_i: 1/N under "uniform", n_i/Σn under "examples"; they sum to 1."""
    if weighting == "uniform":
        return {i: 1 / len(num_examples) for i in num_examples}
    total = sum(num_examples.values())
    return {i: n / total for i, n in num_examples.items()}

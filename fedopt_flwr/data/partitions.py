"""Ways to divide a labelled data set among clients; all reproducible from a seed."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config.sections import PartitionSection
from ..errors import ConfigError, DataError
from ..problems import needing

Rows = NDArray[np.int64]


def partition(
    targets: np.ndarray,
    num_clients: int,
    section: PartitionSection,
    *,
    seed: int,
    natural: np.ndarray | None = None,
) -> list[Rows]:
    """Return the rows of each client.

    `targets` are class indices of shape [n]; `natural` names the owner of each row where the data
    has owners, and is the default then. Raises DataError when a client would get fewer than
    `min_examples` rows, ConfigError when the kind does not fit the data.
    """
    kind = section.kind or ("dirichlet" if natural is None else "natural")
    section = section.model_copy(update={"kind": kind})
    if kind == "natural":
        rows = _natural(natural, num_clients)
    elif num_clients > len(targets):
        raise DataError(
            f"federation.num_clients: got {num_clients}; the training data has only "
            f"{len(targets)} examples; lower it"
        )
    else:
        if kind != "iid" and (targets.dtype.kind not in "iub" or targets.ndim != 1):
            raise ConfigError(
                f"data.partition.kind: got {kind!r}; these targets are no class indices; use 'iid'"
            )
        classes = len(np.unique(targets)) if kind in ("classes", "subsample") else math.inf
        if section.classes_per_client > classes:
            raise ConfigError(
                f"data.partition.classes_per_client: got {section.classes_per_client}; the data "
                f"has {classes} classes; lower it"
            )
        divide, _ = _BY_KIND[kind]
        rows = divide(targets, num_clients, section, seed)
    size, client = min((len(part), i) for i, part in enumerate(rows))
    if size < section.min_examples:
        raise _too_small(num_clients, section, f"client {client} with {size}")
    return rows


def _iid(targets: np.ndarray, num_clients: int, _: PartitionSection, seed: int) -> list[Rows]:
    return np.array_split(np.random.default_rng(seed).permutation(len(targets)), num_clients)


def _by_flower(
    targets: np.ndarray, num_clients: int, section: PartitionSection, seed: int
) -> list[Rows]:
    """dirichlet: shares of each class drawn from Dirichlet(α), as in Yurochkin et al. 2019;
    classes: each client holds examples of exactly `classes_per_client` classes."""
    with needing("flwr-datasets", f"data.partition.kind: {section.kind!r}"):
        from datasets import Dataset
        from flwr_datasets.partitioner import DirichletPartitioner, PathologicalPartitioner
    common: dict[str, Any] = {"num_partitions": num_clients, "partition_by": "label", "seed": seed}
    if section.kind == "classes":
        common["class_assignment_mode"] = "first-deterministic"
        divider = PathologicalPartitioner(
            num_classes_per_partition=section.classes_per_client, **common
        )
    else:
        limits = {"min_partition_size": section.min_examples, "self_balancing": False}
        divider = DirichletPartitioner(alpha=section.concentration, **limits, **common)
    table = Dataset.from_dict({"label": targets, "row": np.arange(len(targets))})
    divider.dataset = table.with_format("numpy")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each further attempt warns; the last one raises
        try:
            parts = [divider.load_partition(i)["row"] for i in range(num_clients)]
        except ValueError:
            raise _too_small(num_clients, section, "a client with too few") from None
    return [np.asarray(part, dtype=np.int64) for part in parts]


def _subsample(
    targets: np.ndarray, num_clients: int, section: PartitionSection, seed: int
) -> list[Rows]:
    """FedMoS (Wang et al. 2023): n_i drawn from a range, its examples from k classes; clients may
    hold the same example."""
    rng = np.random.default_rng(seed)
    labels = np.unique(targets)
    low, high = section.examples_per_client
    rows = []
    for client in range(num_clients):
        size = int(rng.integers(low, high, endpoint=True))
        chosen = rng.choice(labels, size=section.classes_per_client, replace=False)
        pool = np.flatnonzero(np.isin(targets, chosen))
        if size > len(pool):
            raise DataError(
                f"data.partition.examples_per_client: client {client} wants {size} examples of "
                f"classes {chosen.tolist()}, which have only {len(pool)}; lower the upper bound"
            )
        rows.append(rng.choice(pool, size=size, replace=False))
    return rows


def _beta(
    targets: np.ndarray, num_clients: int, section: PartitionSection, seed: int
) -> list[Rows]:
    """Each class is shared out in proportion to one draw from Beta(a, b) for each client."""
    rng = np.random.default_rng(seed)
    parts: list[list[Rows]] = [[] for _ in range(num_clients)]
    for label in np.unique(targets):
        rows = rng.permutation(np.flatnonzero(targets == label))
        shares = rng.beta(*section.shape, size=num_clients)
        ends = (np.cumsum(shares / shares.sum()) * len(rows)).astype(int)[:-1]
        for part, piece in zip(parts, np.split(rows, ends), strict=True):
            part.append(piece)
    return [np.concatenate(part) for part in parts]


def _natural(natural: np.ndarray | None, num_clients: int) -> list[Rows]:
    if natural is None:
        raise ConfigError(
            "data.partition.kind: got 'natural'; this data set has no owner for its examples; "
            "use 'iid', 'dirichlet', 'classes', 'subsample' or 'beta'"
        )
    owners = np.unique(natural)
    if len(owners) != num_clients:
        raise ConfigError(
            f"federation.num_clients: got {num_clients}; the data's own partition has "
            f"{len(owners)} clients; set it to that number or choose another data.partition.kind"
        )
    return [np.flatnonzero(natural == owner) for owner in owners]


# kind -> how it divides, and the field that decides how evenly
_BY_KIND = {
    "iid": (_iid, ""),
    "dirichlet": (_by_flower, "concentration"),
    "classes": (_by_flower, "classes_per_client"),
    "subsample": (_subsample, "examples_per_client"),
    "beta": (_beta, "shape"),
}


def _too_small(num_clients: int, section: PartitionSection, whom: str) -> DataError:
    _, field = _BY_KIND.get(str(section.kind), (None, ""))
    setting = f"{field} {getattr(section, field)} and " if field else ""
    remedy = f"raise {field}, or lower" if field else "lower"
    return DataError(
        f"data.partition: kind {section.kind!r} with {setting}num_clients {num_clients} leaves "
        f"{whom} examples, fewer than min_examples ({section.min_examples}); {remedy} num_clients "
        "or min_examples"
    )

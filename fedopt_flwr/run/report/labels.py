"""Who holds which labels, as a run's configuration divides its data on this machine."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from ...config.run_config import RunConfig
from ...errors import FedoptError
from ...own_code import is_import_path
from ...problems import foreign_text
from ..reading import RecordedRun

_MOST_LOADED = 3  # divisions of a page; loading data takes its time
_MOST_ROWS = 100
_MOST_CLASSES = 200
_MOST_CLIENTS = 100_000


class Labels:
    """Label counts by configuration; each division of data is loaded once."""

    def __init__(self) -> None:
        self._found: dict[str, np.ndarray | str] = {}

    def of(self, run: RecordedRun) -> np.ndarray | str:
        """Return counts [clients, classes], or why there are none. Nothing is downloaded, and no
        code of the user's is run."""
        config = run.config
        facts = (config.data, config.federation.num_clients, config.federation.seed)
        key = json.dumps([str(fact) for fact in facts])
        if key not in self._found:
            loaded = sum(not isinstance(found, str) for found in self._found.values())
            if loaded >= _MOST_LOADED:
                return f"only the labels of the first {_MOST_LOADED} divisions of data are counted"
            self._found[key] = _counts(config)
        return self._found[key]


def _counts(config: RunConfig) -> np.ndarray | str:
    if config.federation.is_open:
        return "the federation is open: each client has data of its own"
    if (number := config.federation.fixed_number("a picture of labels")) > _MOST_CLIENTS:
        return f"{number:,} clients are too many for a picture of their labels"
    name = config.data.name
    if is_import_path(name) or config.data.collate is not None:
        return f"{name} is code of your own, which a report does not run"
    if name == "huggingface":
        return f"{name} data may lie in the network, and a report downloads nothing"
    from ...data import load_federated_data

    try:
        data = load_federated_data(config, may_download=False)
        targets = [client.known_targets() for client in data.clients]
        if not all(_are_classes(own) for own in targets):
            return f"{name} has no classes to count"
        return data.label_counts()
    except (FedoptError, OSError, ValueError) as error:
        return f"the data cannot be read here: {foreign_text(error, 300)}"


def _are_classes(targets: np.ndarray | None) -> bool:
    if targets is None or targets.ndim != 1 or targets.dtype.kind not in "iub":
        return False
    return int(targets.min(initial=0)) >= 0


def picture_of(counts: np.ndarray) -> dict[str, Any]:
    """Return the counts in blocks of clients, of not too many classes."""
    each = math.ceil(len(counts) / _MOST_ROWS)
    starts = range(0, len(counts), each)
    blocks = np.add.reduceat(counts, [*starts], axis=0)[:, :_MOST_CLASSES]
    names = [str(n) if each == 1 else f"{n} to {min(n + each, len(counts)) - 1}" for n in starts]
    return {"clients": names, "counts": blocks.tolist(), "classes": counts.shape[1], "each": each}

"""What runs have in common, in words: for the titles of pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...config.run_config import RunConfig


class Subject(NamedTuple):
    """What was trained on."""

    data: str
    setting: str  # model, clients, rounds; what differs between the runs is left out


def subject_of(configs: Sequence[RunConfig]) -> Subject:
    """Return data sets and whatever else all runs share."""
    settings = [_setting(config) for config in configs]
    shared = [part for part in settings[0] if all(part in setting for setting in settings)]
    data = list(dict.fromkeys(config.data.name for config in configs))
    seeds = sorted({config.federation.seed for config in configs})
    shared.append(f"seed{'s' if len(seeds) > 1 else ''} {in_words(map(str, seeds))}")
    return Subject(in_words(data), ", ".join(shared))


def _setting(config: RunConfig) -> list[str]:
    federation = config.federation
    clients = "open federation" if federation.is_open else f"{federation.num_clients} clients"
    return [
        config.model.name,
        clients,
        f"{federation.clients_per_round} a round",
        f"{federation.num_rounds} rounds",
    ]


def in_words(names: Iterable[str]) -> str:
    """Join names as in "a, b and c"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last

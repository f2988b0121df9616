"""Runs that differ in their seed alone, together; and what differs between the others, as names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..algorithms import ALGORITHMS
from ..config.run_config import RunConfig
from .plots.curves import Curve, Trace
from .reading import RecordedRun

_RULE = "algorithm.name"
# what decides where and how fast a run is computed, and not what comes out
_INDIFFERENT = {
    "federation.seed",
    "training.device",
    "training.threads",
    "data.path",
    "data.loader_workers",
}
_INDIFFERENT_SECTIONS = ("rules", "output", "transport", "limits")
_Settings = Mapping[str, Any]  # by section.key


def curves_of(runs: Sequence[RecordedRun]) -> list[Curve]:
    """Return a curve for each configuration, in the order of the runs."""
    groups: dict[str, list[RecordedRun]] = {}
    settings: dict[str, _Settings] = {}
    for run in runs:
        own = _decisive(run.config)
        key = json.dumps(own, sort_keys=True, default=str)
        groups.setdefault(key, []).append(run)
        settings[key] = own
    names = distinct_names([settings[key] for key in groups])
    return [
        Curve(name, [Trace(run.rounds, run.diverged_at, run.is_finished) for run in group])
        for name, group in zip(names, groups.values(), strict=True)
    ]


def _decisive(config: RunConfig) -> dict[str, Any]:
    """Return what decides a run's result but for the seed, by section.key."""
    values = config.to_dict()
    name = config.algorithm.name
    if name in ALGORITHMS:
        hyperparameters = config.make_rule().model_dump(mode="json")
    else:
        hyperparameters = {**config.rules.get(name, {}), **config.algorithm.hyperparameters}
    values["algorithm"] = {**hyperparameters, "name": name}
    kept = {s: v for s, v in values.items() if s not in _INDIFFERENT_SECTIONS}
    return {key: value for key, value in flat_settings(kept) if key not in _INDIFFERENT}


def flat_settings(values: Mapping[str, Any], start: str = "") -> Iterable[tuple[str, Any]]:
    """Yield each value of a configuration with its section.key, 1.0 as 1: either is written."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat_settings(value, f"{start}{key}.")
        else:
            yield f"{start}{key}", _whole(value)


def _whole(value: Any) -> Any:
    if isinstance(value, list):
        return [_whole(item) for item in value]
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 1e15
    return int(value) if is_whole else value


def distinct_names(groups: Sequence[_Settings]) -> list[str]:
    """Name each of these settings by what differs: the rule, hyperparameters between settings of
    the same rule, and all other keys between any; names that are still equal are numbered."""
    of_all = _differing(groups)
    names = []
    for own in groups:
        alike = [other for other in groups if other[_RULE] == own[_RULE]]
        keys = {key for key in of_all if not key.startswith("algorithm.")}
        keys |= {key for key in _differing(alike) if key.startswith("algorithm.")}
        chosen = {key: own[key] for key in sorted(keys) if own.get(key) is not None}
        parts = [_part(key, value, chosen) for key, value in chosen.items()]
        names.append(", ".join([own[_RULE], *parts] if _RULE in of_all or not parts else parts))
    return numbered(names)


def numbered(names: Sequence[str]) -> list[str]:
    """Return names of which the second of two equal ones ends with (2), and so on."""
    earlier = [names[:place].count(name) for place, name in enumerate(names)]
    return [f"{name} ({n + 1})" if n else name for name, n in zip(names, earlier, strict=True)]


def _differing(groups: Sequence[_Settings]) -> set[str]:
    keys = {key for own in groups for key in own}
    return {key for key in keys if any(own.get(key) != groups[0].get(key) for own in groups)}


def _part(key: str, value: Any, chosen: _Settings) -> str:
    """Write a setting with the shortest key that tells it from the others."""
    text = str(value)
    last = key.rpartition(".")[2]
    if last in ("name", "kind"):
        return text
    is_clear = sum(other.rpartition(".")[2] == last for other in chosen) == 1
    return f"{last if is_clear else key}={text}"

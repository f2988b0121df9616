"""The table of rules: one name, one file, one class."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..algorithm import Algorithm
from ..errors import ConfigError, unknown_name
from ..imports import is_import_path, load_attribute
from .fedavg import FedAvg
from .fedavg_m import FedAvgWithMomentum
from .fedprox import FedProx
from .padamfed import PAdaMFed
from .scaffold import Scaffold
from .scaffold_m import ScaffoldM

ALGORITHMS: dict[str, type[Algorithm]] = {
    rule.name: rule for rule in (FedAvg, FedProx, FedAvgWithMomentum, Scaffold, ScaffoldM, PAdaMFed)
}


def find_rule(name: str, folders: Iterable[Path] = ()) -> type[Algorithm]:
    """Return the rule of that name; one's own, `module:attribute`, is imported and registered."""
    if is_import_path(name):
        kind = load_attribute("algorithm.name", name, folders)
        if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
            raise ConfigError(f"algorithm.name: {name!r} is no subclass of fedopt_flwr's Algorithm")
        return register(kind)
    if name not in ALGORITHMS:
        raise ConfigError(unknown_name("algorithm.name", name, ALGORITHMS))
    return ALGORITHMS[name]


def register(kind: type[Algorithm]) -> type[Algorithm]:
    """Make a rule of your own known under its `name`; ConfigError if another one has that name."""
    known = ALGORITHMS.setdefault(kind.name, kind)
    if known.__module__ != kind.__module__:
        raise ConfigError(
            f"algorithm {kind.name!r} of {kind.__module__}: is the name of a rule in "
            f"{known.__module__}; give the class another `name`"
        )
    ALGORITHMS[kind.name] = kind
    return kind


__all__ = [
    "ALGORITHMS",
    "FedAvg",
    "FedAvgWithMomentum",
    "FedProx",
    "PAdaMFed",
    "Scaffold",
    "ScaffoldM",
    "find_rule",
    "register",
]

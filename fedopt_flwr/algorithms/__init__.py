"""The table of rules: one name, one file, one class."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..algorithm import Algorithm
from ..errors import ConfigError, unknown_name
from ..imports import is_import_path, load_attribute
from .fa_nt import FANT
from .fadamgc import FAdamGC
from .fedadagrad import FedAdagrad
from .fedadam import FedAdam
from .fedams import FedAMS
from .fedavg import FedAvg
from .fedavg_m import FedAvgWithMomentum
from .fedavg_m_vr import FedAvgWithMomentumVR
from .fedavgm import FedAvgM
from .fedmos import FedMoS
from .fedprox import FedProx
from .fedyogi import FedYogi
from .local_adam import LocalAdam
from .mb_storm import MBSTORM
from .padamfed import PAdaMFed
from .padamfed_dog import PAdaMFedDoG
from .padamfed_vr import PAdaMFedVR
from .scaffold import Scaffold
from .scaffold_m import ScaffoldM
from .scaffold_m_vr import ScaffoldMVR
from .stem import STEM

ALGORITHMS: dict[str, type[Algorithm]] = {
    rule.name: rule
    for rule in (
        FedAvg,
        FedProx,
        FedAvgM,
        FedAdagrad,
        FedAdam,
        FedYogi,
        FedAMS,
        FedAvgWithMomentum,
        FedAvgWithMomentumVR,
        Scaffold,
        ScaffoldM,
        ScaffoldMVR,
        PAdaMFed,
        PAdaMFedVR,
        PAdaMFedDoG,
        FedMoS,
        STEM,
        LocalAdam,
        FANT,
        FAdamGC,
        MBSTORM,
    )
}


def load_rule(name: str, folders: Iterable[Path] = ()) -> type[Algorithm]:
    """Return the rule of that name; your own, `module:attribute`, is imported and registered."""
    if is_import_path(name):
        kind = load_attribute("algorithm.name", name, folders)
        if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
            raise ConfigError(f"algorithm.name: {name!r} is no subclass of fedopt_flwr's Algorithm")
        if not isinstance(getattr(kind, "name", None), str):
            raise ConfigError(
                f"algorithm.name: the class {name!r} has no `name`; declare it in the class: "
                'name: ClassVar[str] = "my_rule"'
            )
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
    "FANT",
    "MBSTORM",
    "STEM",
    "FAdamGC",
    "FedAMS",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedAvgWithMomentum",
    "FedAvgWithMomentumVR",
    "FedMoS",
    "FedProx",
    "FedYogi",
    "LocalAdam",
    "PAdaMFed",
    "PAdaMFedDoG",
    "PAdaMFedVR",
    "Scaffold",
    "ScaffoldM",
    "ScaffoldMVR",
    "load_rule",
    "register",
]

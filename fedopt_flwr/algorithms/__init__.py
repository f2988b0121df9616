"""The table of rules: one name, one file, one class."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..algorithm import Algorithm
from ..errors import ConfigError
from ..own_code import is_import_path, load_attribute
from ..problems import unknown_name

# The table, in the order in which rules are shown: one line a rule.
# isort: off
from .fedavg import FedAvg as FedAvg
from .fedprox import FedProx as FedProx
from .fedavgm import FedAvgM as FedAvgM
from .fednova import FedNova as FedNova
from .fedexp import FedExP as FedExP
from .feddyn import FedDyn as FedDyn
from .mimelite import MimeLite as MimeLite
from .fedadagrad import FedAdagrad as FedAdagrad
from .fedadam import FedAdam as FedAdam
from .fedyogi import FedYogi as FedYogi
from .fedams import FedAMS as FedAMS
from .fedavg_m import FedAvgWithMomentum as FedAvgWithMomentum
from .fedavg_m_vr import FedAvgWithMomentumVR as FedAvgWithMomentumVR
from .scaffold import Scaffold as Scaffold
from .scaffold_m import ScaffoldM as ScaffoldM
from .scaffold_m_vr import ScaffoldMVR as ScaffoldMVR
from .padamfed import PAdaMFed as PAdaMFed
from .padamfed_vr import PAdaMFedVR as PAdaMFedVR
from .padamfed_dog import PAdaMFedDoG as PAdaMFedDoG
from .autofed import AutoFed as AutoFed
from .fedsps import FedSPS as FedSPS
from .delta_sgd import DeltaSGD as DeltaSGD
from .fedmos import FedMoS as FedMoS
from .stem import STEM as STEM
from .local_adam import LocalAdam as LocalAdam
from .fa_nt import FANT as FANT
from .fadamgc import FAdamGC as FAdamGC
from .mb_storm import MBSTORM as MBSTORM
# isort: on

ALGORITHMS: dict[str, type[Algorithm]] = {
    rule.name: rule
    for rule in list(globals().values())
    if isinstance(rule, type) and issubclass(rule, Algorithm) and rule is not Algorithm
}


def load_rule(name: str, folders: Iterable[Path] = ()) -> type[Algorithm]:
    """Return the rule of that name; your own, `module:attribute`, is imported and registered."""
    if is_import_path(name):
        kind = load_attribute("algorithm.name", name, folders)
        if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
            raise ConfigError(f"algorithm.name: {name!r} is no subclass of fedopt_flwr's Algorithm")
        return register(kind)
    if name not in ALGORITHMS:
        raise ConfigError(unknown_name("algorithm.name", name, ALGORITHMS))
    return ALGORITHMS[name]


def register(kind: type[Algorithm]) -> type[Algorithm]:
    """Make a rule of your own known under its `name`; ConfigError if it has none, or another one
    has that name."""
    if not isinstance(getattr(kind, "name", None), str):
        raise ConfigError(
            f"algorithm.name: the class {kind.__module__}:{kind.__qualname__} has no `name`; "
            'declare it in the class: name: ClassVar[str] = "my_rule"'
        )
    known = ALGORITHMS.setdefault(kind.name, kind)
    if known.__module__ != kind.__module__:
        raise ConfigError(
            f"algorithm {kind.name!r} of {kind.__module__}: is the name of a rule in "
            f"{known.__module__}; give the class another `name`"
        )
    ALGORITHMS[kind.name] = kind
    return kind

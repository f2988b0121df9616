"""The table of rules: one name, one file, one class."""

from __future__ import annotations

from ..algorithm import Algorithm
from .fedavg import FedAvg
from .fedavg_m import FedAvgWithMomentum
from .fedprox import FedProx
from .padamfed import PAdaMFed
from .scaffold import Scaffold
from .scaffold_m import ScaffoldM

ALGORITHMS: dict[str, type[Algorithm]] = {
    rule.name: rule for rule in (FedAvg, FedProx, FedAvgWithMomentum, Scaffold, ScaffoldM, PAdaMFed)
}

__all__ = [
    "ALGORITHMS",
    "FedAvg",
    "FedAvgWithMomentum",
    "FedProx",
    "PAdaMFed",
    "Scaffold",
    "ScaffoldM",
]

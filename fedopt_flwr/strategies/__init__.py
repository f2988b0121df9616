"""A Flower strategy for every rule: for your own ServerApp, with your module and functions.

    strategy = PAdaMFed(Net(), num_clients=10, clients_per_round=5, num_rounds=50, local_steps=10)
    ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=50))

Every strategy takes `model`, an nn.Module whose parameters are where training starts; its rule's
hyperparameters (formula and source stand in its docstring, details in the module of the same name
in `fedopt_flwr.algorithms`); and the keywords of `StrategyOptions`, N, S and T among them.
`num_rounds` must be that of the ServerConfig. Raises ConfigError with all that is wrong. After a
run `strategy.model` holds the server's model, `strategy.rounds` the records.
"""

from __future__ import annotations

from ..flower.app_strategy import StrategyOptions
from .averages import FedAdagrad, FedAdam, FedAMS, FedAvg, FedAvgM, FedProx, FedYogi
from .directions import (
    MBSTORM,
    STEM,
    FedAvgWithMomentum,
    FedAvgWithMomentumVR,
    FedMoS,
    Scaffold,
    ScaffoldM,
    ScaffoldMVR,
)
from .local_adam import FANT, FAdamGC, LocalAdam
from .parameter_free import PAdaMFed, PAdaMFedDoG, PAdaMFedVR

__all__ = [
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
    "StrategyOptions",
]

"""A Flower client for every rule: for your own ClientApp, with your module, loss and data.

    def client_fn(context):
        return PAdaMFedClient(Net(), my_data(context), context=context).to_client()

The arguments are those of `AppClient`, for all the same; what a rule needs to know comes from the
strategy of the same name in `fedopt_flwr.strategies`.
"""

from __future__ import annotations

from .flower.app_client import AppClient

__all__ = [
    "FedAvgClient",
    "FedAvgWithMomentumClient",
    "FedProxClient",
    "PAdaMFedClient",
    "ScaffoldClient",
    "ScaffoldMClient",
]


class FedAvgClient(AppClient):
    """Client half of `strategies.FedAvg`."""

    algorithm = "fedavg"


class FedProxClient(AppClient):
    """Client half of `strategies.FedProx`."""

    algorithm = "fedprox"


class FedAvgWithMomentumClient(AppClient):
    """Client half of `strategies.FedAvgWithMomentum`."""

    algorithm = "fedavg_m"


class ScaffoldClient(AppClient):
    """Client half of `strategies.Scaffold`; keeps c_i."""

    algorithm = "scaffold"


class ScaffoldMClient(AppClient):
    """Client half of `strategies.ScaffoldM`; keeps c_i."""

    algorithm = "scaffold_m"


class PAdaMFedClient(AppClient):
    """Client half of `strategies.PAdaMFed`; keeps c_i."""

    algorithm = "padamfed"

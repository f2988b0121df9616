"""A Flower client for every rule: for your own ClientApp, with your module, loss and data.

    def client_fn(context):
        return PAdaMFedClient(Net(), my_data(context), context=context).to_client()

The arguments are those of `AppClient`, for all the same; what a rule needs to know comes from the
strategy of the same name in `fedopt_flwr.strategies`.
"""

from __future__ import annotations

from .flower.app_client import AppClient

__all__ = [
    "FANTClient",
    "FAdamGCClient",
    "FedAMSClient",
    "FedAdagradClient",
    "FedAdamClient",
    "FedAvgClient",
    "FedAvgMClient",
    "FedAvgWithMomentumClient",
    "FedAvgWithMomentumVRClient",
    "FedMoSClient",
    "FedProxClient",
    "FedYogiClient",
    "LocalAdamClient",
    "MBSTORMClient",
    "PAdaMFedClient",
    "PAdaMFedDoGClient",
    "PAdaMFedVRClient",
    "STEMClient",
    "ScaffoldClient",
    "ScaffoldMClient",
    "ScaffoldMVRClient",
]


class FedAvgClient(AppClient):
    """Client half of `strategies.FedAvg`."""

    algorithm = "fedavg"


class FedProxClient(AppClient):
    """Client half of `strategies.FedProx`."""

    algorithm = "fedprox"


class FedAvgMClient(AppClient):
    """Client half of `strategies.FedAvgM`."""

    algorithm = "fedavgm"


class FedAdagradClient(AppClient):
    """Client half of `strategies.FedAdagrad`."""

    algorithm = "fedadagrad"


class FedAdamClient(AppClient):
    """Client half of `strategies.FedAdam`."""

    algorithm = "fedadam"


class FedYogiClient(AppClient):
    """Client half of `strategies.FedYogi`."""

    algorithm = "fedyogi"


class FedAMSClient(AppClient):
    """Client half of `strategies.FedAMS`."""

    algorithm = "fedams"


class FedAvgWithMomentumClient(AppClient):
    """Client half of `strategies.FedAvgWithMomentum`."""

    algorithm = "fedavg_m"


class FedAvgWithMomentumVRClient(AppClient):
    """Client half of `strategies.FedAvgWithMomentumVR`."""

    algorithm = "fedavg_m_vr"


class ScaffoldClient(AppClient):
    """Client half of `strategies.Scaffold`; keeps c_i."""

    algorithm = "scaffold"


class ScaffoldMClient(AppClient):
    """Client half of `strategies.ScaffoldM`; keeps c_i."""

    algorithm = "scaffold_m"


class ScaffoldMVRClient(AppClient):
    """Client half of `strategies.ScaffoldMVR`; keeps c_i."""

    algorithm = "scaffold_m_vr"


class PAdaMFedClient(AppClient):
    """Client half of `strategies.PAdaMFed`; keeps c_i."""

    algorithm = "padamfed"


class PAdaMFedVRClient(AppClient):
    """Client half of `strategies.PAdaMFedVR`; keeps c_i."""

    algorithm = "padamfed_vr"


class PAdaMFedDoGClient(AppClient):
    """Client half of `strategies.PAdaMFedDoG`, which is experimental; keeps c_i."""

    algorithm = "padamfed_dog"


class FedMoSClient(AppClient):
    """Client half of `strategies.FedMoS`."""

    algorithm = "fedmos"


class STEMClient(AppClient):
    """Client half of `strategies.STEM`."""

    algorithm = "stem"


class MBSTORMClient(AppClient):
    """Client half of `strategies.MBSTORM`."""

    algorithm = "mb_storm"


class LocalAdamClient(AppClient):
    """Client half of `strategies.LocalAdam`; keeps v."""

    algorithm = "local_adam"


class FANTClient(AppClient):
    """Client half of `strategies.FANT`; keeps c_i and v."""

    algorithm = "fa_nt"


class FAdamGCClient(AppClient):
    """Client half of `strategies.FAdamGC`; keeps c_i and v."""

    algorithm = "fadamgc"

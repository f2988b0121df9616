"""A Flower client for every rule: for your own ClientApp, with your module, loss and data.

    def client_fn(context):
        return PAdaMFedClient(Net(), my_data(context), context=context).to_client()

The arguments are those of `Client`, for all the same; what a rule needs to know comes from the
strategy of the same name in `fedopt_flwr.strategies`. `Client` itself answers every rule.
"""

from __future__ import annotations

from . import algorithms
from .flower.app_client import Client as Client


class FedAvgClient(Client):
    kind = algorithms.FedAvg


class FedProxClient(Client):
    kind = algorithms.FedProx


class FedAvgMClient(Client):
    kind = algorithms.FedAvgM


class FedNovaClient(Client):
    kind = algorithms.FedNova


class FedExPClient(Client):
    kind = algorithms.FedExP


class FedDynClient(Client):
    kind = algorithms.FedDyn


class MimeLiteClient(Client):
    kind = algorithms.MimeLite


class FedAdagradClient(Client):
    kind = algorithms.FedAdagrad


class FedAdamClient(Client):
    kind = algorithms.FedAdam


class FedYogiClient(Client):
    kind = algorithms.FedYogi


class FedAMSClient(Client):
    kind = algorithms.FedAMS


class FedAvgWithMomentumClient(Client):
    kind = algorithms.FedAvgWithMomentum


class FedAvgWithMomentumVRClient(Client):
    kind = algorithms.FedAvgWithMomentumVR


class ScaffoldClient(Client):
    kind = algorithms.Scaffold


class ScaffoldMClient(Client):
    kind = algorithms.ScaffoldM


class ScaffoldMVRClient(Client):
    kind = algorithms.ScaffoldMVR


class PAdaMFedClient(Client):
    kind = algorithms.PAdaMFed


class PAdaMFedVRClient(Client):
    kind = algorithms.PAdaMFedVR


class PAdaMFedDoGClient(Client):
    kind = algorithms.PAdaMFedDoG


class AutoFedClient(Client):
    kind = algorithms.AutoFed


class FedSPSClient(Client):
    kind = algorithms.FedSPS


class DeltaSGDClient(Client):
    kind = algorithms.DeltaSGD


class FedMoSClient(Client):
    kind = algorithms.FedMoS


class STEMClient(Client):
    kind = algorithms.STEM


class LocalAdamClient(Client):
    kind = algorithms.LocalAdam


class FANTClient(Client):
    kind = algorithms.FANT


class FAdamGCClient(Client):
    kind = algorithms.FAdamGC


class MBSTORMClient(Client):
    kind = algorithms.MBSTORM

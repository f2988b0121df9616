"""A Flower strategy for every rule: for your own ServerApp, with your module and functions.

    strategy = PAdaMFed(Net(), num_clients=10, clients_per_round=5, num_rounds=50, local_steps=10)
    ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=50))

Every strategy takes `model`, an nn.Module whose parameters are where training starts; N, S and T;
its rule's hyperparameters (formula and source stand in its docstring, details in the module of the
same name in `fedopt_flwr.algorithms`); and the keywords of `StrategyOptions`. `num_rounds` must be
that of the ServerConfig. Raises ConfigError with all that is wrong. After a run `strategy.model`
holds the server's model, `strategy.rounds` the records.
"""

from __future__ import annotations

from typing import Literal, Unpack

from torch import nn

from . import algorithms
from .flower.app_strategy import AppStrategy, StrategyOptions, make_rule

__all__ = [
    "FedAvg",
    "FedAvgWithMomentum",
    "FedProx",
    "PAdaMFed",
    "Scaffold",
    "ScaffoldM",
    "StrategyOptions",
]


class FedAvg(AppStrategy):
    """y ← y − η∇F(y;ξ), K times; x ← x + η_g Δ̄. McMahan et al., AISTATS 2017, Algorithm 1."""

    def __init__(
        self,
        model: nn.Module,
        *,
        num_clients: int,
        clients_per_round: int,
        num_rounds: int,
        client_learning_rate: float = 0.05,
        server_learning_rate: float = 1.0,
        **options: Unpack[StrategyOptions],
    ) -> None:
        hyperparameters = {
            "client_learning_rate": client_learning_rate,
            "server_learning_rate": server_learning_rate,
        }
        rule = make_rule(algorithms.FedAvg, hyperparameters)
        super().__init__(rule, model, num_clients, clients_per_round, num_rounds, options)


class FedProx(AppStrategy):
    """y ← y − η(∇F(y;ξ) + μ(y − x)), K times; x ← x + η_g Δ̄. Li et al., MLSys 2020, Algorithm 2."""

    def __init__(
        self,
        model: nn.Module,
        *,
        num_clients: int,
        clients_per_round: int,
        num_rounds: int,
        client_learning_rate: float = 0.05,
        server_learning_rate: float = 1.0,
        proximal_strength: float = 0.01,
        **options: Unpack[StrategyOptions],
    ) -> None:
        hyperparameters = {
            "client_learning_rate": client_learning_rate,
            "server_learning_rate": server_learning_rate,
            "proximal_strength": proximal_strength,
        }
        rule = make_rule(algorithms.FedProx, hyperparameters)
        super().__init__(rule, model, num_clients, clients_per_round, num_rounds, options)


class FedAvgWithMomentum(AppStrategy):
    """y ← y − η(β∇F(y;ξ) + (1−β)g), K times; g ← −Σ w_i Δ_i/(ηK_i); x ← x + η_g Δ̄.

    FedAvg-M of Cheng et al., ICLR 2024, Algorithm 1; the same as FedCM.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_clients: int,
        clients_per_round: int,
        num_rounds: int,
        client_learning_rate: float = 0.05,
        server_learning_rate: float = 1.0,
        momentum: float = 0.2,
        **options: Unpack[StrategyOptions],
    ) -> None:
        hyperparameters = {
            "client_learning_rate": client_learning_rate,
            "server_learning_rate": server_learning_rate,
            "momentum": momentum,
        }
        rule = make_rule(algorithms.FedAvgWithMomentum, hyperparameters)
        super().__init__(rule, model, num_clients, clients_per_round, num_rounds, options)


class Scaffold(AppStrategy):
    """y ← y − η(∇F(y;ξ) − c_i + c), K times; x ← x + η_g Δ̄; c ← c + Σ p_i (c_i⁺ − c_i).

    Karimireddy et al., ICML 2020, Algorithm 1, option II.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_clients: int,
        clients_per_round: int,
        num_rounds: int,
        client_learning_rate: float = 0.05,
        server_learning_rate: float = 1.0,
        control_variate_start: Literal["gradient", "zero"] = "gradient",
        lean_uplink: bool | None = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        hyperparameters = {
            "client_learning_rate": client_learning_rate,
            "server_learning_rate": server_learning_rate,
            "control_variate_start": control_variate_start,
            "lean_uplink": lean_uplink,
        }
        rule = make_rule(algorithms.Scaffold, hyperparameters)
        super().__init__(rule, model, num_clients, clients_per_round, num_rounds, options)


class ScaffoldM(AppStrategy):
    """y ← y − η(β(∇F(y;ξ) − c_i + c) + (1−β)g), K times; g ← −Σ w_i Δ_i/(ηK_i).

    SCAFFOLD-M of Cheng et al., ICLR 2024, Algorithm 2; x and c as SCAFFOLD.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_clients: int,
        clients_per_round: int,
        num_rounds: int,
        client_learning_rate: float = 0.05,
        server_learning_rate: float = 1.0,
        momentum: float = 0.2,
        control_variate_start: Literal["gradient", "zero"] = "gradient",
        lean_uplink: bool | None = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        hyperparameters = {
            "client_learning_rate": client_learning_rate,
            "server_learning_rate": server_learning_rate,
            "momentum": momentum,
            "control_variate_start": control_variate_start,
            "lean_uplink": lean_uplink,
        }
        rule = make_rule(algorithms.ScaffoldM, hyperparameters)
        super().__init__(rule, model, num_clients, clients_per_round, num_rounds, options)


class PAdaMFed(AppStrategy):
    """u = β(∇F(y;ξ) − c_i + c) + (1−β)g; y ← y − η u/‖u‖, K times; x ← x + η_g Δ̄.

    Yan et al., ICLR 2025, Algorithm 1. Rates left at None are those of its Theorem 1, computed from
    S, K and T alone: η = 1/(K√T), β = √(SK/T), η_g = γ/(ηK) with γ = (SK)^¼/T^¾.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_clients: int,
        clients_per_round: int,
        num_rounds: int,
        client_learning_rate: float | None = None,
        server_learning_rate: float | None = None,
        momentum: float | None = None,
        control_variate_start: Literal["gradient", "zero"] = "gradient",
        normalize: bool = True,
        **options: Unpack[StrategyOptions],
    ) -> None:
        hyperparameters = {
            "client_learning_rate": client_learning_rate,
            "server_learning_rate": server_learning_rate,
            "momentum": momentum,
            "control_variate_start": control_variate_start,
            "normalize": normalize,
        }
        rule = make_rule(algorithms.PAdaMFed, hyperparameters)
        super().__init__(rule, model, num_clients, clients_per_round, num_rounds, options)

"""FedAvg and the rules that change only its server."""

from __future__ import annotations

from typing import Unpack

from torch import nn

from .. import algorithms
from ..flower.app_strategy import AppStrategy, StrategyOptions


class FedAvg(AppStrategy):
    """y ← y − η∇F(y;ξ), K times; x ← x + η_g Δ̄.

    McMahan et al., AISTATS 2017, Algorithm 1.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        client_learning_rate: float = 0.05,
        server_learning_rate: float = 1.0,
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__(
            algorithms.FedAvg,
            model,
            options,
            client_learning_rate=client_learning_rate,
            server_learning_rate=server_learning_rate,
        )


class FedProx(AppStrategy):
    """y ← y − η(∇F(y;ξ) + μ(y − x)), K times; x ← x + η_g Δ̄.

    Li et al., MLSys 2020, Algorithm 2.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        client_learning_rate: float = 0.05,
        server_learning_rate: float = 1.0,
        proximal_strength: float = 0.01,
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__(
            algorithms.FedProx,
            model,
            options,
            client_learning_rate=client_learning_rate,
            server_learning_rate=server_learning_rate,
            proximal_strength=proximal_strength,
        )


class FedAvgM(AppStrategy):
    """y ← y − η∇F(y;ξ), K times; m ← β₁m + Δ̄; x ← x + η_g m.

    Hsu et al., arXiv:1909.06335.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        client_learning_rate: float = 0.05,
        server_learning_rate: float = 1.0,
        momentum: float = 0.9,
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__(
            algorithms.FedAvgM,
            model,
            options,
            client_learning_rate=client_learning_rate,
            server_learning_rate=server_learning_rate,
            momentum=momentum,
        )


class FedAdagrad(AppStrategy):
    """y ← y − η∇F(y;ξ), K times; m ← β₁m + (1−β₁)Δ̄; v ← v + Δ̄²; x ← x + η_g m/(√v + τ).

    Reddi et al., ICLR 2021, Algorithm 2.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        client_learning_rate: float = 0.05,
        server_learning_rate: float = 0.01,
        first_decay: float = 0.9,
        adaptivity: float = 0.001,
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__(
            algorithms.FedAdagrad,
            model,
            options,
            client_learning_rate=client_learning_rate,
            server_learning_rate=server_learning_rate,
            first_decay=first_decay,
            adaptivity=adaptivity,
        )


class FedAdam(AppStrategy):
    """Clients as FedAvg; m ← β₁m + (1−β₁)Δ̄; v ← β₂v + (1−β₂)Δ̄²; x ← x + η_g m/(√v + τ).

    Reddi et al., ICLR 2021, Algorithm 2.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        client_learning_rate: float = 0.05,
        server_learning_rate: float = 0.01,
        first_decay: float = 0.9,
        adaptivity: float = 0.001,
        second_decay: float = 0.99,
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__(
            algorithms.FedAdam,
            model,
            options,
            client_learning_rate=client_learning_rate,
            server_learning_rate=server_learning_rate,
            first_decay=first_decay,
            adaptivity=adaptivity,
            second_decay=second_decay,
        )


class FedYogi(AppStrategy):
    """m as FedAdam; v ← v − (1−β₂)Δ̄² sign(v − Δ̄²); x ← x + η_g m/(√v + τ).

    Reddi et al., ICLR 2021, Algorithm 2.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        client_learning_rate: float = 0.05,
        server_learning_rate: float = 0.01,
        first_decay: float = 0.9,
        adaptivity: float = 0.001,
        second_decay: float = 0.99,
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__(
            algorithms.FedYogi,
            model,
            options,
            client_learning_rate=client_learning_rate,
            server_learning_rate=server_learning_rate,
            first_decay=first_decay,
            adaptivity=adaptivity,
            second_decay=second_decay,
        )


class FedAMS(AppStrategy):
    """m ← β₁m + (1−β₁)Δ̄; v ← β₂v + (1−β₂)Δ̄²; v̂ ← max(v̂, v, ε); x ← x + η_g m/√v̂.

    Wang et al., ICML 2022, Algorithm 1.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        client_learning_rate: float = 0.05,
        server_learning_rate: float = 0.01,
        first_decay: float = 0.9,
        second_decay: float = 0.99,
        adaptivity: float = 0.001,
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__(
            algorithms.FedAMS,
            model,
            options,
            client_learning_rate=client_learning_rate,
            server_learning_rate=server_learning_rate,
            first_decay=first_decay,
            second_decay=second_decay,
            adaptivity=adaptivity,
        )

"""Rules whose clients take Adam steps."""

from __future__ import annotations

from typing import Literal, Unpack

from torch import nn

from .. import algorithms
from ..flower.app_strategy import AppStrategy, StrategyOptions


class LocalAdam(AppStrategy):
    """m ← β₁m + (1−β₁)∇F; v ← β₂v + (1−β₂)∇F²; v̂ ← max(v̂, v); y ← y − η m/(√v̂ + ε), K times;
    x ← x + η_g Δ̄.

    A baseline of the FAdamGC paper: `algorithms.local_adam`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        client_learning_rate: float = 0.001,
        server_learning_rate: float = 1.0,
        first_decay: float = 0.9,
        second_decay: float = 0.99,
        adaptivity: float = 1e-08,
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__(
            algorithms.LocalAdam,
            model,
            options,
            client_learning_rate=client_learning_rate,
            server_learning_rate=server_learning_rate,
            first_decay=first_decay,
            second_decay=second_decay,
            adaptivity=adaptivity,
        )


class FANT(AppStrategy):
    """y ← y − η(m/(√v̂ + ε) + c − c_i), K times; c_i⁺ = c_i − c + (x − y_K)/(Kη);
    x ← x + η_g Δ̄; c ← c + Σ_tracked p_i (c_i⁺ − c_i).

    FA-NT of the FAdamGC paper, Algorithm 2.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        client_learning_rate: float = 0.001,
        server_learning_rate: float = 1.0,
        first_decay: float = 0.9,
        second_decay: float = 0.99,
        adaptivity: float = 1e-08,
        control_variate_start: Literal["zero"] = "zero",
        tracked_clients: int | None = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__(
            algorithms.FANT,
            model,
            options,
            client_learning_rate=client_learning_rate,
            server_learning_rate=server_learning_rate,
            first_decay=first_decay,
            second_decay=second_decay,
            adaptivity=adaptivity,
            control_variate_start=control_variate_start,
            tracked_clients=tracked_clients,
        )


class FAdamGC(AppStrategy):
    """ĝ = ∇F(y;ξ) + c − c_i goes through Adam (RMSProp, AdamW); c_i⁺ = (1/K) Σ ∇F(y_k;ξ_k);
    x ← x + η_g Δ̄; c ← c + Σ_tracked p_i (c_i⁺ − c_i).

    FAdamGC paper, Algorithm 1.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        client_learning_rate: float = 0.001,
        server_learning_rate: float = 1.0,
        first_decay: float = 0.9,
        second_decay: float = 0.99,
        adaptivity: float = 1e-08,
        control_variate_start: Literal["gradient", "zero", "full_gradient"] = "gradient",
        tracked_clients: int | None = None,
        optimizer: Literal["adam", "rmsprop", "adamw"] = "adam",
        decoupled_weight_decay: float = 0.01,
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__(
            algorithms.FAdamGC,
            model,
            options,
            client_learning_rate=client_learning_rate,
            server_learning_rate=server_learning_rate,
            first_decay=first_decay,
            second_decay=second_decay,
            adaptivity=adaptivity,
            control_variate_start=control_variate_start,
            tracked_clients=tracked_clients,
            optimizer=optimizer,
            decoupled_weight_decay=decoupled_weight_decay,
        )

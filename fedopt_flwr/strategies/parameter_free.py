"""PAdaMFed and what came of it: rules that compute their own step sizes."""

from __future__ import annotations

from typing import Literal, Unpack

from torch import nn

from .. import algorithms
from ..flower.app_strategy import AppStrategy, StrategyOptions


class PAdaMFed(AppStrategy):
    """u = β(∇F(y;ξ) − c_i + c) + (1−β)g; y ← y − η u/‖u‖, K times; x ← x + η_g Δ̄;
    g ← β(Σ w_i(c_i⁺ − c_i) + c) + (1−β)g; c ← c + Σ p_i(c_i⁺ − c_i).

    Yan et al., ICLR 2025, Algorithm 1 and Theorem 1; open step sizes are derived.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        control_variate_start: Literal["gradient", "zero"] = "gradient",
        client_learning_rate: float | None = None,
        server_learning_rate: float | None = None,
        momentum: float | None = None,
        normalize: bool = True,
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__(
            algorithms.PAdaMFed,
            model,
            options,
            control_variate_start=control_variate_start,
            client_learning_rate=client_learning_rate,
            server_learning_rate=server_learning_rate,
            momentum=momentum,
            normalize=normalize,
        )


class PAdaMFedVR(AppStrategy):
    """u = ∇F(y;ξ) + β(c − c_i) + (1−β)(g − ∇F(x⁻;ξ)); y ← y − η u/‖u‖, K times; x, c as PAdaMFed;
    g as PAdaMFed ("printed") or g ← Σ w_i ū_i, ū_i the mean of the client's u ("proved").

    Yan et al., ICLR 2025, PAdaMFed-VR and Theorem 2; open step sizes are derived.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        control_variate_start: Literal["gradient", "zero"] = "gradient",
        client_learning_rate: float | None = None,
        server_learning_rate: float | None = None,
        momentum: float | None = None,
        normalize: bool = True,
        momentum_rule: Literal["printed", "proved"] = "printed",
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__(
            algorithms.PAdaMFedVR,
            model,
            options,
            control_variate_start=control_variate_start,
            client_learning_rate=client_learning_rate,
            server_learning_rate=server_learning_rate,
            momentum=momentum,
            normalize=normalize,
            momentum_rule=momentum_rule,
        )


class PAdaMFedDoG(AppStrategy):
    """As PAdaMFed, with η_t = γ_t/(K√β), x ← x + γ_t ḡ_t, ḡ_t = Δ̄_t/(η_t K),
    γ_t = D_t/√(Σ_{s<t} ‖ḡ_s‖²)·(1 − t/T), D_t the largest distance from x⁰ so far.

    Experimental, ours: `algorithms.padamfed_dog`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        control_variate_start: Literal["gradient", "zero"] = "gradient",
        client_learning_rate: float | None = None,
        server_learning_rate: float | None = None,
        momentum: float = 0.3,
        normalize: bool = True,
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__(
            algorithms.PAdaMFedDoG,
            model,
            options,
            control_variate_start=control_variate_start,
            client_learning_rate=client_learning_rate,
            server_learning_rate=server_learning_rate,
            momentum=momentum,
            normalize=normalize,
        )

"""Rules with control variates, momentum or variance reduction."""

from __future__ import annotations

from typing import Literal, Unpack

from torch import nn

from .. import algorithms
from ..flower.app_strategy import AppStrategy, StrategyOptions


class FedAvgWithMomentum(AppStrategy):
    """y ← y − η(β∇F(y;ξ) + (1−β)g), K times; g ← −Σ w_i Δ_i/(ηK_i); x ← x + η_g Δ̄.

    FedAvg-M of Cheng et al., ICLR 2024, Algorithm 1; the same as FedCM.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        client_learning_rate: float = 0.05,
        server_learning_rate: float = 1.0,
        momentum: float = 0.2,
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__(
            algorithms.FedAvgWithMomentum,
            model,
            options,
            client_learning_rate=client_learning_rate,
            server_learning_rate=server_learning_rate,
            momentum=momentum,
        )


class FedAvgWithMomentumVR(AppStrategy):
    """y ← y − η(∇F(y;ξ) + (1−β)(g − ∇F(x⁻;ξ))), K times; g ← −Σ w_i Δ_i/(ηK_i); x ← x + η_g Δ̄.

    FedAvg-M-VR of Cheng et al., ICLR 2024, Algorithm 3.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        client_learning_rate: float = 0.05,
        server_learning_rate: float = 1.0,
        momentum: float = 0.2,
        initial_batches: int | None = None,
        previous_model: Literal["sent", "recovered", "same"] | None = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__(
            algorithms.FedAvgWithMomentumVR,
            model,
            options,
            client_learning_rate=client_learning_rate,
            server_learning_rate=server_learning_rate,
            momentum=momentum,
            initial_batches=initial_batches,
            previous_model=previous_model,
        )


class Scaffold(AppStrategy):
    """y ← y − η(∇F(y;ξ) − c_i + c), K times; x ← x + η_g Δ̄; c ← c + Σ p_i (c_i⁺ − c_i).

    Karimireddy et al., ICML 2020, Algorithm 1, option II.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        control_variate_start: Literal["gradient", "zero"] = "gradient",
        client_learning_rate: float = 0.05,
        server_learning_rate: float = 1.0,
        lean_uplink: bool | None = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__(
            algorithms.Scaffold,
            model,
            options,
            control_variate_start=control_variate_start,
            client_learning_rate=client_learning_rate,
            server_learning_rate=server_learning_rate,
            lean_uplink=lean_uplink,
        )


class ScaffoldM(AppStrategy):
    """y ← y − η(β(∇F(y;ξ) − c_i + c) + (1−β)g), K times; g ← −Σ w_i Δ_i/(ηK_i); x, c as SCAFFOLD.

    The client's half is that of `Scaffold`, written there for any β and d.

    Cheng et al., ICLR 2024, Algorithm 2.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        control_variate_start: Literal["gradient", "zero"] = "gradient",
        client_learning_rate: float = 0.05,
        server_learning_rate: float = 1.0,
        lean_uplink: bool | None = None,
        momentum: float = 0.2,
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__(
            algorithms.ScaffoldM,
            model,
            options,
            control_variate_start=control_variate_start,
            client_learning_rate=client_learning_rate,
            server_learning_rate=server_learning_rate,
            lean_uplink=lean_uplink,
            momentum=momentum,
        )


class ScaffoldMVR(AppStrategy):
    """u = ∇F(y;ξ) + β(c − c_i) + (1−β)(g − ∇F(x⁻;ξ)); y ← y − ηu, K times; x ← x + η_g Δ̄;
    g ← −Σ w_i Δ_i/(ηK_i); c ← c + Σ p_i (c_i⁺ − c_i).

    Cheng et al., ICLR 2024, Algorithm 4.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        control_variate_start: Literal["gradient", "zero"] = "gradient",
        client_learning_rate: float = 0.05,
        server_learning_rate: float = 1.0,
        momentum: float = 0.2,
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__(
            algorithms.ScaffoldMVR,
            model,
            options,
            control_variate_start=control_variate_start,
            client_learning_rate=client_learning_rate,
            server_learning_rate=server_learning_rate,
            momentum=momentum,
        )


class FedMoS(AppStrategy):
    """d = ∇F_i(x), then d ← ∇F(y;ξ) + (1−a)(d − ∇F(y_prev;ξ)); y ← y − ηd − μ(y − x), K times;
    b ← βb + Σ w_i Δ_i; x ← x + η_g b.

    Wang et al., INFOCOM 2023, Algorithm 1; p_i by examples unless `weighting` says otherwise.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        client_learning_rate: float = 0.05,
        server_learning_rate: float = 1.0,
        local_momentum: float = 0.1,
        momentum: float = 0.8,
        proximal_strength: float = 0.001,
        initial_batch_size: int = 0,
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__(
            algorithms.FedMoS,
            model,
            options,
            client_learning_rate=client_learning_rate,
            server_learning_rate=server_learning_rate,
            local_momentum=local_momentum,
            momentum=momentum,
            proximal_strength=proximal_strength,
            initial_batch_size=initial_batch_size,
        )


class STEM(AppStrategy):
    """u ← ∇F(y;ξ) + (1−a)(u − ∇F(y_prev;ξ)); y_prev ← y; y ← y − ηu, K times;
    ȳ, ū are the means of y and u; x = ȳ − ηū; clients begin at y = x, y_prev = x + ηū, u = ū.

    Khanduri et al., NeurIPS 2021; a reconstruction.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        client_learning_rate: float = 0.05,
        server_learning_rate: float = 1.0,
        local_momentum: float = 0.1,
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__(
            algorithms.STEM,
            model,
            options,
            client_learning_rate=client_learning_rate,
            server_learning_rate=server_learning_rate,
            local_momentum=local_momentum,
        )


class MBSTORM(AppStrategy):
    """q_i = h_i(x) − (1−β)h_i(x⁻), h_i the mean of K minibatch gradients;
    g ← Σ w_i q_i + (1−β)g; x⁻ ← x; x ← x − η_g·ηK·g. Clients take no local steps.

    Patel et al., NeurIPS 2022; a reconstruction.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        client_learning_rate: float = 0.05,
        server_learning_rate: float = 1.0,
        momentum: float = 0.2,
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__(
            algorithms.MBSTORM,
            model,
            options,
            client_learning_rate=client_learning_rate,
            server_learning_rate=server_learning_rate,
            momentum=momentum,
        )

"""Rules that become simpler ones with certain hyperparameters, on whole runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import (
    SOFTMAX_CLIENTS,
    SOFTMAX_DATA,
    OpenRun,
    final_parameters,
    linear_model,
    open_run,
    softmax_config,
    softmax_gradient,
)

RATES = {"client_learning_rate": 0.05, "server_learning_rate": 1.0}  # FedAvg's own


def test_zero_proximal_strength_is_fedavg() -> None:
    plain = final_parameters(softmax_config("fedavg"))
    np.testing.assert_array_equal(
        final_parameters(softmax_config("fedprox", proximal_strength=0)), plain
    )


def test_full_momentum_coefficient_turns_fedavg_m_into_fedavg() -> None:
    np.testing.assert_allclose(
        final_parameters(softmax_config("fedavg_m", momentum=1.0)),
        final_parameters(softmax_config("fedavg")),
        atol=1e-6,
    )


@pytest.mark.parametrize(
    ("name", "plain"),
    [("fedavgm", {"momentum": 0.0}), ("fedavg_m_vr", {"momentum": 1.0, **RATES})],
)
def test_without_momentum_it_is_fedavg(name: str, plain: dict[str, float]) -> None:
    np.testing.assert_allclose(
        final_parameters(softmax_config(name, **plain)),
        final_parameters(softmax_config("fedavg")),
        atol=1e-6,
    )


def test_full_momentum_coefficient_turns_scaffold_m_into_scaffold() -> None:
    np.testing.assert_allclose(
        final_parameters(softmax_config("scaffold_m", momentum=1.0)),
        final_parameters(softmax_config("scaffold")),
        atol=1e-5,
    )


def test_scaffold_m_vr_with_full_weight_on_the_new_gradient_is_scaffold() -> None:
    ours = final_parameters(softmax_config("scaffold_m_vr", momentum=1.0, **RATES))
    np.testing.assert_allclose(ours, final_parameters(softmax_config("scaffold")), atol=1e-5)


def test_padamfed_without_normalisation_is_scaffold_m_started_at_c() -> None:
    """With g = c after the start pass, and before any round, both servers hold the same numbers."""
    steps = {"client_learning_rate": 0.1, "server_learning_rate": 1.0, "momentum": 0.4}
    ours = open_run(softmax_config("padamfed", normalize=False, **steps), SOFTMAX_DATA)

    def start_at_c(run: OpenRun) -> None:
        if run.records[-1].round == 0:
            state = run.strategy.state
            run.strategy.state = state.replace(server_momentum=state["control_variate"])

    theirs = open_run(softmax_config("scaffold_m", **steps), SOFTMAX_DATA, on_round=start_at_c)
    for name in ("model", "control_variate", "server_momentum"):
        torch.testing.assert_close(
            ours.strategy.state[name], theirs.strategy.state[name], atol=2e-5, rtol=0
        )


def test_padamfed_vr_proved_without_normalisation_is_scaffold_m_vr() -> None:
    steps = {"client_learning_rate": 0.1, "server_learning_rate": 0.8, "momentum": 0.4}
    ours = final_parameters(
        softmax_config("padamfed_vr", normalize=False, momentum_rule="proved", **steps)
    )
    np.testing.assert_allclose(
        ours, final_parameters(softmax_config("scaffold_m_vr", **steps)), atol=1e-5
    )


def test_fedmos_without_its_parts_is_fedavg_whose_first_step_is_full_batch() -> None:
    parts = {"local_momentum": 1.0, "momentum": 0.0, "proximal_strength": 0.0}
    mos = softmax_config("fedmos", 6, **parts)
    mos["federation"]["weighting"] = "uniform"
    one_step = {"local_steps": 1, "batch_size": 3}
    full = {"local_steps": 1, "batch_size": 0}
    ours = final_parameters({**mos, "training": one_step})
    np.testing.assert_allclose(
        ours, final_parameters({**softmax_config("fedavg", 6), "training": full}), atol=1e-6
    )
    small = {**mos["algorithm"], "initial_batch_size": 3}
    assert (
        np.abs(final_parameters({**mos, "algorithm": small, "training": one_step}) - ours).max()
        > 1e-3
    )


def test_mb_storm_without_memory_is_minibatch_sgd() -> None:
    """β = 1, one step, everyone: gradient descent, as FedAvg with K = 1."""
    settings = [
        softmax_config(name, 6, **RATES, **own)
        for name, own in (("mb_storm", {"momentum": 1}), ("fedavg", {}))
    ]
    ends = [
        final_parameters({**s, "training": {"local_steps": 1, "batch_size": 0}}) for s in settings
    ]
    np.testing.assert_allclose(*ends, atol=1e-6)


def test_one_full_batch_step_of_everyone_is_gradient_descent_under_scaffold() -> None:
    settings = softmax_config("scaffold", 6, 8, client_learning_rate=0.3)
    settings["training"] = {"local_steps": 1, "batch_size": 0}
    theta = np.concatenate([p.detach().numpy().ravel() for p in linear_model().parameters()])
    theta = theta.astype(float)
    for _ in range(8):
        theta = theta - 0.3 * np.mean(
            [softmax_gradient(theta, *c) for c in SOFTMAX_CLIENTS], axis=0
        )
    np.testing.assert_allclose(final_parameters(settings), theta, atol=1e-5)

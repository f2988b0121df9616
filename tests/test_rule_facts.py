"""What the papers prove or what follows from the formulas, on whole runs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import (
    CLASSES,
    FEATURES,
    OpenRun,
    as_datasets,
    linear_model,
    open_run,
    softmax_clients,
    softmax_gradient,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from fedopt_flwr import simulate

SIZES = [30, 5, 12, 50, 8, 20]
CLIENTS = softmax_clients(SIZES)
pytestmark = pytest.mark.filterwarnings("ignore:algorithm.momentum")


def config(name: str, sampled: int = 3, rounds: int = 10, **hyperparameters: object) -> dict:
    return {
        "algorithm": {"name": name, **hyperparameters},
        "federation": {"num_clients": 6, "clients_per_round": sampled, "num_rounds": rounds},
        "training": {"local_steps": 4, "batch_size": 4},
    }


def final(settings: dict) -> np.ndarray:
    return simulate(settings, model=linear_model, client_data=as_datasets(CLIENTS)).parameters


def test_zero_proximal_strength_is_fedavg() -> None:
    plain = final(config("fedavg"))
    np.testing.assert_array_equal(final(config("fedprox", proximal_strength=0)), plain)


def test_full_momentum_coefficient_turns_fedavg_m_into_fedavg() -> None:
    np.testing.assert_allclose(
        final(config("fedavg_m", momentum=1.0)), final(config("fedavg")), atol=1e-6
    )


def test_full_momentum_coefficient_turns_scaffold_m_into_scaffold() -> None:
    np.testing.assert_allclose(
        final(config("scaffold_m", momentum=1.0)), final(config("scaffold")), atol=1e-5
    )


def test_padamfed_without_normalisation_is_scaffold_m_started_at_c() -> None:
    """With g = c after the start pass, and before any round, both servers hold the same numbers."""
    steps = {"client_learning_rate": 0.1, "server_learning_rate": 1.0, "momentum": 0.4}
    ours = open_run(config("padamfed", normalize=False, **steps), as_datasets(CLIENTS))

    def start_at_c(run: OpenRun) -> None:
        if run.records[-1].round == 0:
            state = run.strategy.state
            run.strategy.state = state.replace(server_momentum=state["control_variate"])

    theirs = open_run(config("scaffold_m", **steps), as_datasets(CLIENTS), on_round=start_at_c)
    for name in ("model", "control_variate", "server_momentum"):
        torch.testing.assert_close(
            ours.strategy.state[name], theirs.strategy.state[name], atol=2e-5, rtol=0
        )


@pytest.mark.parametrize("start", ["gradient", "zero"])
@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize("sampled", [6, 2])
@pytest.mark.parametrize("name", ["scaffold", "scaffold_m", "padamfed"])
def test_server_control_variate_is_the_mean_of_the_clients_at_every_round(
    name: str, sampled: int, weighting: str, start: str
) -> None:
    settings = config(name, sampled, control_variate_start=start)
    settings["federation"]["weighting"] = weighting
    gaps, sizes = [], []

    def compare(run: OpenRun) -> None:
        c = run.strategy.state["control_variate"]
        gaps.append(float((run.mean_control_variate() - c).abs().max()))
        sizes.append(float(c.abs().max()))

    open_run(settings, as_datasets(CLIENTS), on_round=compare)
    assert len(gaps) == 10 + (start == "gradient")
    assert max(gaps) < 1e-6
    assert max(sizes) > 1e-2


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("name", ["scaffold", "scaffold_m"])
def test_lean_and_full_uplink_agree_and_keep_c_the_mean_after_200_rounds(
    name: str, lean: bool
) -> None:
    run = open_run(config(name, 2, 200, lean_uplink=lean), as_datasets(CLIENTS))
    c = run.strategy.state["control_variate"]
    assert float((run.mean_control_variate() - c).abs().max()) < 1e-5
    other = open_run(config(name, 2, 200, lean_uplink=not lean), as_datasets(CLIENTS))
    torch.testing.assert_close(
        run.strategy.state["model"], other.strategy.state["model"], atol=2e-5, rtol=0
    )
    uplink = [r.uplink_vectors for r in run.records if r.round > 0]
    assert set(uplink) == {2 if lean else 4}


def test_one_full_batch_step_of_everyone_is_gradient_descent_under_scaffold() -> None:
    settings = config("scaffold", 6, 8, client_learning_rate=0.3)
    settings["training"] = {"local_steps": 1, "batch_size": 0}
    theta = np.concatenate([p.detach().numpy().ravel() for p in linear_model().parameters()])
    theta = theta.astype(float)
    for _ in range(8):
        theta = theta - 0.3 * np.mean([softmax_gradient(theta, *c) for c in CLIENTS], axis=0)
    np.testing.assert_allclose(final(settings), theta, atol=1e-5)


def test_padamfed_movements_are_bounded() -> None:
    settings = config("padamfed", 3, 40)
    models: list[torch.Tensor] = []
    run = open_run(
        settings,
        as_datasets(CLIENTS),
        on_round=lambda run: models.append(run.strategy.state["model"].clone()),
    )
    rule = run.strategy.rule
    gamma = rule.server_learning_rate * rule.client_learning_rate * 4
    assert gamma == pytest.approx((3 * 4) ** 0.25 / 40**0.75)
    steps = [float((b - a).norm()) for a, b in pairwise(models)]
    assert len(steps) == 40
    assert max(steps) <= gamma * (1 + 1e-5)
    assert min(steps) > 0


@pytest.mark.parametrize("name", ["padamfed", "padamfed_vr"])
def test_padamfed_movements_are_bounded_where_squares_of_the_gradient_vanish(name: str) -> None:
    """A saturated softmax: gradients of about 1e-26, whose squares float32 does not hold."""

    def sure() -> nn.Module:
        layer = nn.Linear(1, 2, bias=False)
        layer.weight.data[:] = torch.tensor([[30.0], [-30.0]])
        return layer

    data = [TensorDataset(torch.ones(4, 1), torch.zeros(4).long())] * 2
    settings = config(name, 2, 10)
    settings["federation"]["num_clients"] = 2
    result = simulate(settings, model=sure, client_data=data)
    chosen = result.summary["hyperparameters"]
    gamma = chosen["server_learning_rate"] * chosen["client_learning_rate"] * 4
    moved = float(np.linalg.norm(result.parameters - [30, -30]))
    assert gamma < moved <= 10 * gamma * (1 + 1e-4)


@settings(max_examples=8, deadline=None)
@given(st.floats(-28, 25))
@example(-28)
@example(-20)
@example(25)
def test_padamfed_does_not_see_the_scale_of_the_loss(exponent: float) -> None:
    scale = 10.0**exponent

    def scaled(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return scale * functional.cross_entropy(outputs, targets)

    settings = config("padamfed", 3, 12)
    data = as_datasets(CLIENTS)
    plain = simulate(settings, model=linear_model, client_data=data).parameters
    other = simulate(settings, model=linear_model, client_data=data, loss=scaled).parameters
    assert np.linalg.norm(plain - other) <= 1e-4 * np.linalg.norm(plain)


def test_control_variates_reach_the_minimiser_where_fedavg_stops_at_its_bias() -> None:
    """Two quadratics with different curvature: ½h_i(y − m_i)², minimiser Σh_i m_i/Σh_i.

    As least squares: inputs √h_i, targets √h_i·m_i, and a model with one weight.
    """
    curvature, centre = [1.0, 5.0], [-1.0, 2.0]
    minimiser = sum(h * m for h, m in zip(curvature, centre, strict=True)) / sum(curvature)
    datasets = [
        torch.utils.data.TensorDataset(torch.tensor([[h**0.5]]), torch.tensor([[h**0.5 * m]]))
        for h, m in zip(curvature, centre, strict=True)
    ]

    def run(name: str, **hyperparameters: object) -> float:
        result = simulate(
            {
                "algorithm": {"name": name, "client_learning_rate": 0.05, **hyperparameters},
                "federation": {"num_clients": 2, "clients_per_round": 2, "num_rounds": 300},
                "training": {"local_steps": 10, "batch_size": 0},
            },
            model=lambda: torch.nn.Linear(1, 1, bias=False),
            client_data=datasets,
            loss=lambda outputs, targets: 0.5 * functional.mse_loss(outputs, targets),
            metric=lambda outputs, targets: 0.0,
        )
        return float(result.parameters[0])

    # FedAvg's fixed point weighs each centre by 1 − (1 − ηh_i)^K
    pulls = [1 - (1 - 0.05 * h) ** 10 for h in curvature]
    biased = sum(p * m for p, m in zip(pulls, centre, strict=True)) / sum(pulls)
    assert run("fedavg") == pytest.approx(biased, abs=1e-4)
    assert abs(biased - minimiser) > 0.3
    for name in ("scaffold", "scaffold_m"):
        assert run(name) == pytest.approx(minimiser, abs=1e-3)


@pytest.mark.parametrize("name", ["fedavg", "scaffold_m", "padamfed"])
def test_local_epochs_give_each_client_its_own_number_of_steps(name: str) -> None:
    settings = config(name)
    settings["training"] = {"local_epochs": 2, "batch_size": 8}
    run = open_run(settings, as_datasets(CLIENTS))
    expected = {i: 2 * -(-n // 8) if n > 8 else 2 for i, n in enumerate(SIZES)}
    assert run.strategy.state.plan.local_steps == expected
    assert run.strategy.state["model"].numel() == CLASSES * (FEATURES + 1)
    assert run.records[-1].failures == 0

"""What PAdaMFed and its variants promise of their steps, on whole runs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import SOFTMAX_DATA, linear_model, open_run, softmax_config
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from fedopt_flwr import simulate


def test_padamfed_movements_are_bounded() -> None:
    settings = softmax_config("padamfed", 3, 40)
    models: list[torch.Tensor] = []
    run = open_run(
        settings,
        SOFTMAX_DATA,
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
    settings = softmax_config(name, 2, 10)
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

    settings = softmax_config("padamfed", 3, 12)
    data = SOFTMAX_DATA
    plain = simulate(settings, model=linear_model, client_data=data).parameters
    other = simulate(settings, model=linear_model, client_data=data, loss=scaled).parameters
    assert np.linalg.norm(plain - other) <= 1e-4 * np.linalg.norm(plain)


@pytest.mark.parametrize("name", ["padamfed", "padamfed_vr"])
def test_a_thousandfold_loss_leaves_the_trajectory_unchanged(name: str) -> None:
    def scaled(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 1000 * functional.cross_entropy(outputs, targets)

    settings = softmax_config(name, 3, 30)
    models: dict[bool, list[np.ndarray]] = {True: [], False: []}
    for loss in (None, scaled):
        for rounds in (10, 20, 30):
            own = {**settings, "federation": {**settings["federation"], "num_rounds": rounds}}
            run = simulate(own, model=linear_model, client_data=SOFTMAX_DATA, loss=loss)
            models[loss is None].append(run.parameters)
    for plain, other in zip(models[True], models[False], strict=True):
        assert np.linalg.norm(plain - other) <= 1e-4 * np.linalg.norm(plain)


def test_padamfed_dog_records_its_step_and_its_distance() -> None:
    result = simulate(softmax_config("padamfed_dog"), model=linear_model, client_data=SOFTMAX_DATA)
    chosen = [record.chosen for record in result.rounds if record.round > 0]
    assert all(set(c) >= {"gamma", "distance", "client_learning_rate"} for c in chosen)
    assert [c["distance"] for c in chosen] == sorted(c["distance"] for c in chosen)
    x0 = np.concatenate([p.detach().numpy().ravel() for p in linear_model().parameters()])
    assert chosen[0]["gamma"] == pytest.approx(0.01 * (1 + np.linalg.norm(x0)), rel=1e-5)
    eta = chosen[3]["client_learning_rate"]
    assert eta == pytest.approx(chosen[3]["gamma"] / (4 * 0.3**0.5))


def test_padamfed_dog_records_the_step_that_it_takes() -> None:
    given = {"client_learning_rate": 0.1, "server_learning_rate": 2.0}
    for options in (given, {"step_scale": 3.0}):
        config = softmax_config("padamfed_dog", **options)
        result = simulate(config, model=linear_model, client_data=SOFTMAX_DATA)
        chosen = [record.chosen for record in result.rounds if record.round > 0]
        assert all("step_scale" not in found for found in chosen)
        if options is given:
            assert [found["gamma"] for found in chosen] == [pytest.approx(0.2 * 4)] * len(chosen)


@pytest.mark.slow
def test_the_proved_momentum_rule_falls_at_the_theorems_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """E‖∇f − g‖ ~ T^(−1/3) under "proved"; "printed" does not fall like that."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import gradient_error

    slopes = {
        rule: gradient_error.slope(
            [gradient_error.error(rule, t, seed=0) for t in gradient_error.HORIZONS]
        )
        for rule in ("proved", "printed")
    }
    assert -0.45 < slopes["proved"] < -0.22
    assert slopes["printed"] > -0.15

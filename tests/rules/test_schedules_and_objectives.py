"""Schedules of the learning rates; clipping, weight decay and momentum of every gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    CLASSES,
    FEATURES,
    SOFTMAX_CLIENTS,
    SOFTMAX_DATA,
    WITH_CONTROL_VARIATES,
    final_parameters,
    linear_model,
    open_run,
    softmax_config,
)
from torch import nn
from torch.nn import functional

from fedopt_flwr.algorithms import ALGORITHMS
from fedopt_flwr.config.sections import ScheduleSection
from fedopt_flwr.errors import FedoptWarning
from fedopt_flwr.rounds.schedules import rate_factor, scheduled
from fedopt_flwr.training.flat_model import FlatModel
from fedopt_flwr.training.objective import ModelObjective, batch_positions


def with_training(settings: dict[str, Any], **training: object) -> dict[str, Any]:
    return {**settings, "training": {**settings["training"], **training}}


def test_schedules_by_hand() -> None:
    section = ScheduleSection(step_rounds=3, step_factor=0.5)
    cosine = [rate_factor("cosine", section, t, 4) for t in (1, 2, 3, 4)]
    assert cosine == pytest.approx([1, 0.5 + 0.5 * 0.5**0.5, 0.5, 0.5 - 0.5 * 0.5**0.5])
    assert [rate_factor("cosine", section, t, 4) for t in (5, 9)] == [cosine[-1]] * 2
    assert [rate_factor("step", section, t, 9) for t in (1, 3, 4, 7)] == [1, 1, 0.5, 0.25]
    assert rate_factor("inverse_sqrt", section, 4, 9) == 0.5
    assert rate_factor("constant", section, 4, 9) == 1
    rule = ALGORITHMS["fedavg"](client_learning_rate=0.4)
    changed = scheduled(rule, ScheduleSection(client="inverse_sqrt"), 4, 9)
    assert (changed.client_learning_rate, changed.server_learning_rate) == (0.2, 1.0)


WITHOUT_RATE = {"fedsps", "delta_sgd", "autofed"}  # on the client


def test_a_schedule_of_a_step_size_that_a_rule_has_not_is_said_to_be_idle() -> None:
    settings = {**softmax_config("delta_sgd", 3, 2), "schedule": {"client": "cosine"}}
    with pytest.warns(
        FedoptWarning, match="schedule.client: got 'cosine'; delta_sgd has no client"
    ):
        open_run(settings, SOFTMAX_DATA)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in WITHOUT_RATE])
@pytest.mark.filterwarnings("ignore:schedule.server")
def test_every_rule_runs_under_a_schedule_and_keeps_c(name: str) -> None:
    settings = {
        **softmax_config(name, 3, 8),
        "schedule": {"client": "cosine", "server": "inverse_sqrt"},
    }
    run = open_run(settings, SOFTMAX_DATA)
    assert all(record.failures == 0 for record in run.records)
    rates = [r.chosen.get("client_learning_rate") for r in run.records if r.round > 1]
    assert len(set(rates)) == 7
    assert None not in rates
    if name in WITH_CONTROL_VARIATES:
        c = run.strategy.state["control_variate"]
        gap = float((run.mean_control_variate() - c).abs().max())
        assert gap < 1e-5 * max(1.0, float(c.abs().max()))
    constant = open_run(softmax_config(name, 3, 8), SOFTMAX_DATA).strategy.state["model"]
    assert not torch.equal(run.strategy.state["model"], constant)


def test_a_schedule_sends_what_could_no_longer_be_derived() -> None:
    settings = {**softmax_config("scaffold", 3, 5), "schedule": {"client": "cosine"}}
    assert open_run(settings, SOFTMAX_DATA).records[-1].uplink_vectors == 6
    assert open_run(softmax_config("scaffold", 3, 5), SOFTMAX_DATA).records[-1].uplink_vectors == 3
    settings = {**softmax_config("fedavg_m_vr", 3, 5), "schedule": {"client": "cosine"}}
    assert open_run(settings, SOFTMAX_DATA).records[-1].downlink_vectors == 9
    assert (
        open_run(softmax_config("fedavg_m_vr", 3, 5), SOFTMAX_DATA).records[-1].downlink_vectors
        == 6
    )


def test_objective_options_are_those_of_torchs_sgd() -> None:
    inputs, targets = (torch.from_numpy(part) for part in SOFTMAX_CLIENTS[3])
    plain = linear_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3, momentum=0.7, weight_decay=0.1)
    positions = batch_positions(50, 8, 6, None, seed=1)
    for rows in positions:
        optimizer.zero_grad()
        functional.cross_entropy(plain(inputs[rows]), targets[rows]).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.4)
        optimizer.step()
    model = FlatModel(linear_model(), torch.device("cpu"))
    from fedopt_flwr.data import as_client_data

    objective = ModelObjective(
        model,
        functional.cross_entropy,
        as_client_data(SOFTMAX_DATA[3]),
        positions,
        weight_decay=0.1,
        clip_norm=0.4,
        gradient_momentum=0.7,
    )
    y = objective.working_copy(model.vector.clone())
    for batch in objective.batches():
        y.sub_(objective.gradient(y, batch), alpha=0.3)
    expected = torch.cat([p.detach().ravel() for p in plain.parameters()])
    torch.testing.assert_close(y, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["scaffold", "scaffold_m"])
def test_the_lean_uplink_stays_exact_with_clipping_momentum_and_decay(name: str) -> None:
    ends = []
    for lean in (True, False):
        settings = with_training(
            softmax_config(name, 3, 20, lean_uplink=lean),
            clip_norm=0.3,
            weight_decay=0.01,
            gradient_momentum=0.5,
        )
        run = open_run(settings, SOFTMAX_DATA)
        c = run.strategy.state["control_variate"]
        assert float((run.mean_control_variate() - c).abs().max()) < 1e-5
        ends.append(run.strategy.state["model"])
    torch.testing.assert_close(*ends, atol=1e-4, rtol=0)
    assert ends[0].numel() == CLASSES * (FEATURES + 1)


def test_two_points_of_a_batch_have_a_momentum_each() -> None:
    """A VR rule at x⁻ = x must find both sums alike, so that its correction vanishes."""
    one = with_training(softmax_config("scaffold_m_vr", 6, 1, momentum=0.5), gradient_momentum=0.6)
    one["training"]["local_steps"] = 1
    plain = with_training(softmax_config("scaffold", 6, 1), gradient_momentum=0.6)
    plain["training"]["local_steps"] = 1
    one["training"]["batch_size"] = plain["training"]["batch_size"] = 0
    np.testing.assert_allclose(final_parameters(one), final_parameters(plain), atol=1e-6)

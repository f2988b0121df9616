"""What whole runs of every rule allow: unequal local steps, models with buffers."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    CLASSES,
    FEATURES,
    SOFTMAX_DATA,
    SOFTMAX_SIZES,
    WITH_CONTROL_VARIATES,
    open_run,
    softmax_config,
)
from torch import nn

from fedopt_flwr.algorithms import ALGORITHMS
from fedopt_flwr.algorithms.autofed import _SCALARS


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_rule_bears_unequal_numbers_of_steps(name: str) -> None:
    settings = {**softmax_config(name, 3, 5), "training": {"local_epochs": 2, "batch_size": 8}}
    run = open_run(settings, SOFTMAX_DATA)
    assert len(set(run.strategy.state.plan.local_steps.values())) > 2
    assert all(record.failures == 0 for record in run.records)
    if name in WITH_CONTROL_VARIATES:
        c = run.strategy.state["control_variate"]
        gap = float((run.mean_control_variate() - c).abs().max())
        assert gap < 1e-5 * max(1.0, float(c.abs().max()))


@pytest.mark.parametrize("name", ["fedavg", "scaffold_m", "padamfed"])
def test_local_epochs_give_each_client_its_own_number_of_steps(name: str) -> None:
    settings = softmax_config(name)
    settings["training"] = {"local_epochs": 2, "batch_size": 8}
    run = open_run(settings, SOFTMAX_DATA)
    expected = {i: 2 * -(-n // 8) if n > 8 else 2 for i, n in enumerate(SOFTMAX_SIZES)}
    assert run.strategy.state.plan.local_steps == expected
    assert run.strategy.state["model"].numel() == CLASSES * (FEATURES + 1)
    assert run.records[-1].failures == 0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_rule_leaves_batch_norm_to_the_adapter(name: str) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES))

    run = open_run(softmax_config(name, 3, 3), SOFTMAX_DATA, model)
    assert all(record.failures == 0 for record in run.records)
    run.strategy.write_to_model()
    scalars = {"distance", "squared_gradients", *_SCALARS}
    sizes = {v.numel() for n, v in run.strategy.state.vectors.items() if n not in scalars}
    assert sizes == {run.strategy.model.size}
    norm = run.strategy.model.module[1]
    assert float(norm.running_var.min()) > 0
    assert float(norm.running_mean.abs().max()) > 0
    assert int(norm.num_batches_tracked) > 0

"""Control variates on whole runs: c is the mean of the c_i, and what they correct."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import SOFTMAX_DATA, WITH_CONTROL_VARIATES, OpenRun, open_run, softmax_config
from torch.nn import functional

from fedopt_flwr import simulate
from fedopt_flwr.flower import MemoryStates


def test_nine_rules_keep_control_variates() -> None:
    assert sorted(WITH_CONTROL_VARIATES) == [
        *("autofed", "fa_nt", "fadamgc", "padamfed", "padamfed_dog", "padamfed_vr"),
        *("scaffold", "scaffold_m", "scaffold_m_vr"),
    ]


@pytest.mark.parametrize("start", ["gradient", "zero"])
@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize("sampled", [6, 2])
@pytest.mark.parametrize("name", ["scaffold", "scaffold_m", "padamfed"])
def test_server_control_variate_is_the_mean_of_the_clients_at_every_round(
    name: str, sampled: int, weighting: str, start: str
) -> None:
    settings = softmax_config(name, sampled, control_variate_start=start)
    settings["federation"]["weighting"] = weighting
    gaps, sizes = [], []

    def compare(run: OpenRun) -> None:
        c = run.strategy.state["control_variate"]
        gaps.append(float((run.mean_control_variate() - c).abs().max()))
        sizes.append(float(c.abs().max()))

    open_run(settings, SOFTMAX_DATA, on_round=compare)
    assert len(gaps) == 10 + (start == "gradient")
    assert max(gaps) < 1e-6
    assert max(sizes) > 1e-2


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize("name", WITH_CONTROL_VARIATES)
def test_c_is_the_mean_of_the_clients_at_every_round(name: str, weighting: str) -> None:
    settings = softmax_config(name, 2)
    settings["federation"]["weighting"] = weighting
    gaps, sizes = [], []

    def compare(run: OpenRun) -> None:
        c = run.strategy.state["control_variate"]
        gaps.append(float((run.mean_control_variate() - c).abs().max()))
        sizes.append(float(c.abs().max()))

    open_run(settings, SOFTMAX_DATA, on_round=compare)
    assert max(gaps) < 1e-6 * max(1.0, *sizes)
    assert max(sizes) > 1e-2


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("name", ["scaffold", "scaffold_m"])
def test_lean_and_full_uplink_agree_and_keep_c_the_mean_after_200_rounds(
    name: str, lean: bool
) -> None:
    run = open_run(softmax_config(name, 2, 200, lean_uplink=lean), SOFTMAX_DATA)
    c = run.strategy.state["control_variate"]
    assert float((run.mean_control_variate() - c).abs().max()) < 1e-5
    other = open_run(softmax_config(name, 2, 200, lean_uplink=not lean), SOFTMAX_DATA)
    torch.testing.assert_close(
        run.strategy.state["model"], other.strategy.state["model"], atol=2e-5, rtol=0
    )
    uplink = [r.uplink_vectors for r in run.records if r.round > 0]
    assert set(uplink) == {2 if lean else 4}


def test_tracking_half_of_the_clients_costs_three_and_a_half_vectors() -> None:
    run = open_run(softmax_config("fadamgc", 4, tracked_clients=2), SOFTMAX_DATA)
    rounds = [record for record in run.records if record.round > 0]
    assert {record.vectors_per_client for record in rounds} == {3.5}
    gap = run.mean_control_variate() - run.strategy.state["control_variate"]
    assert float(gap.abs().max()) < 1e-6
    fa_nt = open_run(softmax_config("fa_nt", 4, tracked_clients=2), SOFTMAX_DATA)
    assert {record.vectors_per_client for record in fa_nt.records} == {3.0}
    gap = fa_nt.mean_control_variate() - fa_nt.strategy.state["control_variate"]
    assert float(gap.abs().max()) < 1e-5


def test_a_state_that_stays_is_not_written_over_with_its_older_version() -> None:
    states, tensor = MemoryStates(), torch.ones(3)
    states.save(0, 1, {"control_variate": tensor})
    states.save(0, 2, {"control_variate": tensor})
    states.prune(0, {2})
    states.save(1, 3, {"control_variate": torch.zeros(3)})  # in the memory of version 1
    assert states.load(0, 2)["control_variate"].tolist() == [1.0] * 3


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


def test_who_reaches_the_minimiser_of_two_unlike_quadratics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What docs/experiments.md says and draws, after 400 rounds."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from heterogeneity import distances

    for rule in ("scaffold", "scaffold_m", "scaffold_m_vr", "fadamgc", "padamfed_dog"):
        assert distances(rule)[-1] < 1e-3, rule
    for rule in ("fedavg", "local_adam", "fa_nt"):  # fa_nt corrects after the moments
        assert distances(rule)[-1] > 0.3, rule

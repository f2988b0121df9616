"""Facts of the larger rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.common import (
    Code,
    FitRes,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.server import strategy as flower
from helpers import (
    CLASSES,
    FEATURES,
    OpenRun,
    as_datasets,
    linear_model,
    make_plan,
    open_run,
    softmax_clients,
)
from torch import nn
from torch.nn import functional

from fedopt_flwr import simulate
from fedopt_flwr.algorithm import Reply
from fedopt_flwr.algorithms import ALGORITHMS, FedAdagrad, FedAdam, FedYogi
from fedopt_flwr.flower import MemoryStates

SIZES = [30, 5, 12, 50, 8, 20]
CLIENTS = softmax_clients(SIZES)
DATA = as_datasets(CLIENTS)
pytestmark = pytest.mark.filterwarnings("ignore:algorithm.momentum")
WITH_CONTROL_VARIATES = [
    name for name, rule in ALGORITHMS.items() if "control_variate" in rule().init_client(1)
]


def config(name: str, sampled: int = 3, rounds: int = 10, **hyperparameters: object) -> dict:
    return {
        "algorithm": {"name": name, **hyperparameters},
        "federation": {"num_clients": 6, "clients_per_round": sampled, "num_rounds": rounds},
        "training": {"local_steps": 4, "batch_size": 4},
    }


def final(settings: dict[str, Any]) -> np.ndarray:
    return simulate(settings, model=linear_model, client_data=DATA).parameters


def with_training(settings: dict[str, Any], **training: object) -> dict[str, Any]:
    return {**settings, "training": {**settings["training"], **training}}


def test_eight_rules_keep_control_variates() -> None:
    assert sorted(WITH_CONTROL_VARIATES) == [
        *("fa_nt", "fadamgc", "padamfed", "padamfed_dog", "padamfed_vr"),
        *("scaffold", "scaffold_m", "scaffold_m_vr"),
    ]


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize("name", WITH_CONTROL_VARIATES)
def test_c_is_the_mean_of_the_clients_at_every_round(name: str, weighting: str) -> None:
    settings = config(name, 2)
    settings["federation"]["weighting"] = weighting
    gaps, sizes = [], []

    def compare(run: OpenRun) -> None:
        c = run.strategy.state["control_variate"]
        gaps.append(float((run.mean_control_variate() - c).abs().max()))
        sizes.append(float(c.abs().max()))

    open_run(settings, DATA, on_round=compare)
    assert max(gaps) < 1e-6 * max(1.0, *sizes)
    assert max(sizes) > 1e-2


@pytest.mark.parametrize(
    ("name", "plain"),
    [("fedavgm", {"momentum": 0.0}), ("fedavg_m_vr", {"momentum": 1.0})],
)
def test_without_momentum_it_is_fedavg(name: str, plain: dict[str, float]) -> None:
    np.testing.assert_allclose(final(config(name, **plain)), final(config("fedavg")), atol=1e-6)


def test_scaffold_m_vr_with_full_weight_on_the_new_gradient_is_scaffold() -> None:
    ours = final(config("scaffold_m_vr", momentum=1.0))
    np.testing.assert_allclose(ours, final(config("scaffold")), atol=1e-5)


def test_padamfed_vr_proved_without_normalisation_is_scaffold_m_vr() -> None:
    steps = {"client_learning_rate": 0.1, "server_learning_rate": 0.8, "momentum": 0.4}
    ours = final(config("padamfed_vr", normalize=False, momentum_rule="proved", **steps))
    np.testing.assert_allclose(ours, final(config("scaffold_m_vr", **steps)), atol=1e-5)


def test_mb_storm_without_memory_is_minibatch_sgd() -> None:
    """β = 1, one step, everyone: gradient descent, as FedAvg with K = 1."""
    settings = [config(name, 6, **o) for name, o in (("mb_storm", {"momentum": 1}), ("fedavg", {}))]
    ends = [final({**s, "training": {"local_steps": 1, "batch_size": 0}}) for s in settings]
    np.testing.assert_allclose(*ends, atol=1e-6)


def test_fedmos_without_its_parts_is_fedavg_whose_first_step_is_full_batch() -> None:
    parts = {"local_momentum": 1.0, "momentum": 0.0, "proximal_strength": 0.0}
    mos = config("fedmos", 6, **parts)
    mos["federation"]["weighting"] = "uniform"
    one_step = {"local_steps": 1, "batch_size": 3}
    full = {"local_steps": 1, "batch_size": 0}
    ours = final({**mos, "training": one_step})
    np.testing.assert_allclose(ours, final({**config("fedavg", 6), "training": full}), atol=1e-6)
    small = {**mos["algorithm"], "initial_batch_size": 3}
    assert np.abs(final({**mos, "algorithm": small, "training": one_step}) - ours).max() > 1e-3


@pytest.mark.parametrize("name", ["padamfed", "padamfed_vr"])
def test_a_thousandfold_loss_leaves_the_trajectory_unchanged(name: str) -> None:
    def scaled(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 1000 * functional.cross_entropy(outputs, targets)

    settings = config(name, 3, 30)
    models: dict[bool, list[np.ndarray]] = {True: [], False: []}
    for loss in (None, scaled):
        for rounds in (10, 20, 30):
            own = {**settings, "federation": {**settings["federation"], "num_rounds": rounds}}
            run = simulate(own, model=linear_model, client_data=DATA, loss=loss)
            models[loss is None].append(run.parameters)
    for plain, other in zip(models[True], models[False], strict=True):
        assert np.linalg.norm(plain - other) <= 1e-4 * np.linalg.norm(plain)


def test_tracking_half_of_the_clients_costs_three_and_a_half_vectors() -> None:
    run = open_run(config("fadamgc", 4, tracked_clients=2), DATA)
    rounds = [record for record in run.records if record.round > 0]
    assert {record.vectors_per_client for record in rounds} == {3.5}
    gap = run.mean_control_variate() - run.strategy.state["control_variate"]
    assert float(gap.abs().max()) < 1e-6
    fa_nt = open_run(config("fa_nt", 4, tracked_clients=2), DATA)
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


def test_padamfed_dog_records_its_step_and_its_distance() -> None:
    result = simulate(config("padamfed_dog"), model=linear_model, client_data=DATA)
    chosen = [record.chosen for record in result.rounds if record.round > 0]
    assert all(set(c) >= {"gamma", "distance", "client_learning_rate"} for c in chosen)
    assert [c["distance"] for c in chosen] == sorted(c["distance"] for c in chosen)
    x0 = np.concatenate([p.detach().numpy().ravel() for p in linear_model().parameters()])
    assert chosen[0]["gamma"] == pytest.approx(0.01 * (1 + np.linalg.norm(x0)), rel=1e-5)
    eta = chosen[3]["client_learning_rate"]
    assert eta == pytest.approx(chosen[3]["gamma"] / (4 * 0.3**0.5))


def answers(deltas: list[np.ndarray], x: np.ndarray) -> list[Any]:
    ok = Status(Code.OK, "")
    return [(None, FitRes(ok, ndarrays_to_parameters([x + d]), 1, {})) for d in deltas]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (FedAdagrad, flower.FedAdagrad),
        (FedYogi, flower.FedYogi),
        (FedAdam, flower.FedAdam),
    ],
)
def test_server_rules_against_flowers_own(ours: Any, theirs: Any) -> None:
    """Alike but for two things: Flower starts v at 0, and its FedAdam corrects the step."""
    x, rng = np.array([1.0, -2.0, 0.5]), np.random.default_rng(0)
    rates = {"eta": 0.1, "beta_1": 0.6, "tau": 1e-2}
    if ours is not FedAdagrad:
        rates["beta_2"] = 0.9
    else:
        del rates["beta_1"]
    other = theirs(initial_parameters=ndarrays_to_parameters([x]), **rates)
    hyperparameters = {"first_decay": rates.get("beta_1", 0.0), "adaptivity": 1e-2}
    rule = ours(
        server_learning_rate=0.1,
        **hyperparameters,
        **({"second_decay": 0.9} if "beta_2" in rates else {}),
    )
    state = rule.init_server(torch.tensor(x), make_plan(2, [1, 1]))
    state = state.replace(second_moment=torch.zeros(3, dtype=torch.float64))
    for server_round in range(1, 6):
        deltas = [rng.normal(size=3), rng.normal(size=3)]
        found, _ = other.aggregate_fit(server_round, answers(deltas, x), [])
        theirs_x = parameters_to_ndarrays(found)[0]
        replies = [Reply(i, {"delta": torch.tensor(d)}, 0.5, 0.5, 1) for i, d in enumerate(deltas)]
        following = rule.server_update(state, replies)
        step = following["model"].numpy() - state["model"].numpy()
        if ours is FedAdam:
            step *= np.sqrt(1 - 0.9 ** (server_round + 1)) / (1 - 0.6 ** (server_round + 1))
        np.testing.assert_allclose(step, theirs_x - x, rtol=1e-6)
        x = theirs_x
        state = following.replace(model=torch.tensor(x))


def test_fedavgm_is_flowers_own() -> None:
    x, rng = np.array([1.0, -2.0, 0.5]), np.random.default_rng(1)
    other = flower.FedAvgM(
        initial_parameters=ndarrays_to_parameters([x]),
        server_learning_rate=0.5,
        server_momentum=0.6,
    )
    rule = ALGORITHMS["fedavgm"](server_learning_rate=0.5, momentum=0.6)
    state = rule.init_server(torch.tensor(x), make_plan(2, [1, 1]))
    for server_round in range(1, 6):
        deltas = [rng.normal(size=3), rng.normal(size=3)]
        found, _ = other.aggregate_fit(server_round, answers(deltas, x), [])
        replies = [Reply(i, {"delta": torch.tensor(d)}, 0.5, 0.5, 1) for i, d in enumerate(deltas)]
        state = rule.server_update(state, replies)
        x = parameters_to_ndarrays(found)[0]
        np.testing.assert_allclose(state["model"].numpy(), x, rtol=1e-9)


def test_who_reaches_the_minimiser_of_two_unlike_quadratics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What docs/experiments.md says and draws, after 400 rounds."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    from heterogeneity import distances

    for rule in ("scaffold", "scaffold_m", "scaffold_m_vr", "fadamgc", "padamfed_dog"):
        assert distances(rule)[-1] < 1e-3, rule
    for rule in ("fedavg", "local_adam", "fa_nt"):  # fa_nt corrects after the moments
        assert distances(rule)[-1] > 0.3, rule


@pytest.mark.slow
def test_the_proved_momentum_rule_falls_at_the_theorems_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """E‖∇f − g‖ ~ T^(−1/3) under "proved"; "printed" does not fall like that."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    import gradient_error

    slopes = {
        rule: gradient_error.slope([gradient_error.error(rule, t) for t in gradient_error.HORIZONS])
        for rule in ("proved", "printed")
    }
    assert -0.45 < slopes["proved"] < -0.22
    assert slopes["printed"] > -0.15


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_rule_bears_unequal_numbers_of_steps(name: str) -> None:
    settings = {**config(name, 3, 5), "training": {"local_epochs": 2, "batch_size": 8}}
    run = open_run(settings, DATA)
    assert len(set(run.strategy.state.plan.local_steps.values())) > 2
    assert all(record.failures == 0 for record in run.records)
    if name in WITH_CONTROL_VARIATES:
        c = run.strategy.state["control_variate"]
        gap = float((run.mean_control_variate() - c).abs().max())
        assert gap < 1e-5 * max(1.0, float(c.abs().max()))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_rule_leaves_batch_norm_to_the_adapter(name: str) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES))

    run = open_run(config(name, 3, 3), DATA, model)
    assert all(record.failures == 0 for record in run.records)
    run.strategy.write_to_model()
    scalars = ("distance", "squared_gradients")
    sizes = {v.numel() for n, v in run.strategy.state.vectors.items() if n not in scalars}
    assert sizes == {run.strategy.model.size}
    norm = run.strategy.model.module[1]
    assert float(norm.running_var.min()) > 0
    assert float(norm.running_mean.abs().max()) > 0
    assert int(norm.num_batches_tracked) > 0

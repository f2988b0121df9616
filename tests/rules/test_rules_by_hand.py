"""One round or two of each rule on linear losses, against numbers worked out by hand.

Two clients with gradients a₁ and a₂ everywhere; η = 0.1 and K = 2 unless said otherwise.
"""

from __future__ import annotations

import math

import pytest
import torch
from helpers import make_plan, on_slopes

from fedopt_flwr.algorithm import Reply
from fedopt_flwr.algorithms import (
    FedAvg,
    FedAvgM,
    FedAvgWithMomentum,
    FedProx,
    PAdaMFed,
    PAdaMFedDoG,
    PAdaMFedVR,
    Scaffold,
    ScaffoldM,
)
from fedopt_flwr.conformance.harness import linear
from fedopt_flwr.errors import FedoptWarning

ETA = {"client_learning_rate": 0.1}


def test_fedavg_moves_by_the_mean_movement() -> None:
    run = on_slopes(FedAvg(**ETA), [1.0], [[1.0], [3.0]])
    run.round([0, 1])  # Δ = −0.2, −0.6
    assert run.x.tolist() == pytest.approx([0.6])


def test_fedavg_server_step_multiplies_the_mean_movement() -> None:
    run = on_slopes(FedAvg(**ETA, server_learning_rate=0.5), [1.0], [[1.0], [3.0]])
    run.round([1])  # only Δ = −0.6, halved
    assert run.x.tolist() == pytest.approx([0.7])


def test_fedprox_pulls_back_to_the_server_model() -> None:
    run = on_slopes(FedProx(**ETA, proximal_strength=0.5), [1.0], [[1.0], [3.0]])
    run.round([0, 1])
    # client 1: 1 → 0.9 → 0.9 − 0.1(1 + 0.5(0.9 − 1)) = 0.805; client 2: 1 → 0.7 → 0.415
    assert run.replies[0].upload["delta"].tolist() == pytest.approx([-0.195])
    assert run.replies[1].upload["delta"].tolist() == pytest.approx([-0.585])
    assert run.x.tolist() == pytest.approx([0.61])


def test_fedavg_m_mixes_gradient_and_momentum() -> None:
    run = on_slopes(FedAvgWithMomentum(**ETA, momentum=0.25), [1.0], [[1.0], [3.0]])
    run.round([0, 1])  # g = 0: u = 0.25 and 0.75, Δ = −0.05 and −0.15
    assert run.x.tolist() == pytest.approx([0.9])
    assert run.server["server_momentum"].tolist() == pytest.approx([0.5])  # 0.1/(ηK)
    run.round([1])  # u = 0.75 + 0.75·0.5 = 1.125, Δ = −0.225
    assert run.x.tolist() == pytest.approx([0.675])
    assert run.server["server_momentum"].tolist() == pytest.approx([1.125])


def test_fedavg_m_momentum_divides_by_each_clients_own_steps() -> None:
    run = on_slopes(FedAvgWithMomentum(**ETA, momentum=1.0), [0.0], [[1.0], [3.0]], steps=[2, 4])
    run.round([0, 1])  # Δ = −0.2, −1.2; g = ½·0.2/0.2 + ½·1.2/0.4 = 2
    assert run.x.tolist() == pytest.approx([-0.7])
    assert run.server["server_momentum"].tolist() == pytest.approx([2.0])


def test_fedavgm_keeps_part_of_the_last_movement() -> None:
    run = on_slopes(FedAvgM(**ETA, momentum=0.5), [1.0], [[1.0], [3.0]])
    run.round([0, 1])
    assert run.x.tolist() == pytest.approx([0.6])
    run.round([0, 1])  # m = −0.2 − 0.4
    assert run.x.tolist() == pytest.approx([0.0], abs=1e-6)


@pytest.mark.parametrize("lean", [True, False])
def test_scaffold_corrects_by_the_control_variates(lean: bool) -> None:
    rule = Scaffold(**ETA, control_variate_start="zero", lean_uplink=lean)
    run = on_slopes(rule, [1.0], [[1.0], [3.0]])
    run.round([0, 1])  # c = c_i = 0, so as FedAvg
    assert run.x.tolist() == pytest.approx([0.6])
    assert [float(c["control_variate"]) for c in run.states] == pytest.approx([1.0, 3.0])
    assert run.server["control_variate"].tolist() == pytest.approx([2.0])
    run.round([0])  # u = 1 − 1 + 2 = 2, Δ = −0.4
    assert run.replies[0].upload["delta"].tolist() == pytest.approx([-0.4])
    assert run.x.tolist() == pytest.approx([0.2])
    assert run.server["control_variate"].tolist() == pytest.approx([2.0])
    assert len(run.replies[0].upload) == (1 if lean else 2)


def test_scaffold_counts_an_absent_clients_change_not_at_all() -> None:
    run = on_slopes(Scaffold(**ETA, control_variate_start="zero"), [1.0], [[1.0], [3.0]])
    run.round([1])  # c = ½(3 − 0): the factor is 1/N, not 1/S
    assert run.server["control_variate"].tolist() == pytest.approx([1.5])


def test_gradient_start_sets_every_control_variate() -> None:
    run = on_slopes(Scaffold(**ETA), [1.0], [[1.0], [3.0]])
    assert [float(c["control_variate"]) for c in run.states] == [1.0, 3.0]
    assert run.server["control_variate"].tolist() == [2.0]
    assert run.x.tolist() == [1.0]


@pytest.mark.parametrize("lean", [True, False])
def test_scaffold_m_mixes_correction_and_momentum(lean: bool) -> None:
    rule = ScaffoldM(**ETA, momentum=0.5, control_variate_start="zero", lean_uplink=lean)
    run = on_slopes(rule, [1.0], [[1.0], [3.0]])
    run.round([0, 1])  # u = 0.5, 1.5; Δ = −0.1, −0.3
    assert run.x.tolist() == pytest.approx([0.8])
    assert run.server["server_momentum"].tolist() == pytest.approx([1.0])
    assert run.server["control_variate"].tolist() == pytest.approx([2.0])
    run.round([0])  # d = 0.5·2 + 0.5·1 = 1.5; u = 0.5(1 − 1) + 1.5, Δ = −0.3
    assert run.x.tolist() == pytest.approx([0.5])
    assert run.server["server_momentum"].tolist() == pytest.approx([1.5])
    assert float(run.states[0]["control_variate"]) == pytest.approx(1.0)


def test_padamfed_normalises_each_local_step() -> None:
    rule = PAdaMFed(**ETA, server_learning_rate=2.0, momentum=0.5, control_variate_start="zero")
    run = on_slopes(rule, [1.0, 1.0], [[3.0, 4.0], [0.0, 2.0]])
    run.round([0, 1])  # u/‖u‖ = (0.6, 0.8) and (0, 1); Δ = (−0.12, −0.16) and (0, −0.2)
    assert run.replies[0].upload["delta"].tolist() == pytest.approx([-0.12, -0.16])
    assert run.replies[1].upload["delta"].tolist() == pytest.approx([0.0, -0.2])
    assert run.x.tolist() == pytest.approx([0.88, 0.64])
    assert run.server["control_variate"].tolist() == pytest.approx([1.5, 3.0])
    assert run.server["server_momentum"].tolist() == pytest.approx([0.75, 1.5])  # β(mean + 0)


def test_padamfed_momentum_uses_the_old_control_variate() -> None:
    rule = PAdaMFed(**ETA, server_learning_rate=1.0, momentum=0.5, control_variate_start="zero")
    run = on_slopes(rule, [0.0, 0.0], [[3.0, 4.0], [0.0, 2.0]])
    run.round([0])  # change (3, 4): c = ½(3, 4), g = ½(3, 4)
    run.round([1])  # change (0, 2): g = ½((0, 2) + (1.5, 2)) + ½(1.5, 2) = (1.5, 3)
    assert run.server["server_momentum"].tolist() == pytest.approx([1.5, 3.0])
    assert run.server["control_variate"].tolist() == pytest.approx([1.5, 3.0])


def test_padamfed_weighs_unequal_local_steps_alike() -> None:
    rule = PAdaMFed(**ETA, server_learning_rate=1.0, momentum=1.0, control_variate_start="zero")
    run = on_slopes(rule, [0.0], [[1.0], [1.0]], steps=[1, 3])
    run.round([0, 1])  # Δ/K_i = −0.1 for both; K = 2
    assert run.x.tolist() == pytest.approx([-0.2])


def test_padamfed_zero_direction_moves_nothing() -> None:
    rule = PAdaMFed(**ETA, server_learning_rate=1.0, momentum=1.0, control_variate_start="zero")
    run = on_slopes(rule, [0.5, -0.5], [[0.0, 0.0]])
    run.round([0])
    assert run.x.tolist() == [0.5, -0.5]


def test_padamfed_step_sizes_come_from_s_k_and_t_alone() -> None:
    plan = make_plan(20, [10] * 20, num_rounds=800, sampled=5)  # SK = 50
    rule = PAdaMFed().resolve(plan)
    assert rule.client_learning_rate == pytest.approx(1 / (10 * math.sqrt(800)))
    assert rule.momentum == pytest.approx(0.25)  # √(50/800)
    gamma = 50**0.25 / 800**0.75
    assert rule.server_learning_rate == pytest.approx(gamma * math.sqrt(800))  # γ/(ηK)
    assert rule.server_learning_rate == pytest.approx(0.5)  # √β


def test_padamfed_caps_only_the_momentum_and_says_so() -> None:
    plan = make_plan(20, [10] * 20, num_rounds=8, sampled=5)
    with pytest.warns(FedoptWarning, match=r"SK = 50 and T = 8"):
        rule = PAdaMFed().resolve(plan)
    assert rule.momentum == 1.0
    assert rule.server_learning_rate == pytest.approx((50 / 8) ** 0.25)


def test_padamfed_keeps_what_is_set_by_hand() -> None:
    plan = make_plan(20, [10] * 20, num_rounds=800, sampled=5)
    rule = PAdaMFed(client_learning_rate=0.1, momentum=0.3).resolve(plan)
    assert (rule.client_learning_rate, rule.momentum) == (0.1, 0.3)
    assert rule.server_learning_rate == pytest.approx(50**0.25 / 800**0.75 / (0.1 * 10))


@pytest.mark.parametrize("rule", [PAdaMFed(), PAdaMFedVR(), PAdaMFedDoG()], ids=lambda r: r.name)
def test_an_underived_rate_of_padamfed_is_refused_on_both_sides(rule: PAdaMFed) -> None:
    """A rate of None counted as 0: a run that stood still without a word."""
    rule = rule.model_copy(update={"momentum": 0.5})
    plan = make_plan(1, [1])
    state = rule.init_server(torch.ones(2), plan)
    received = rule.broadcast(state)
    objective = linear([1.0, 2.0], 1)
    with pytest.raises(ValueError, match=r"client_learning_rate is not derived yet; call resolve"):
        rule.client_update(received, rule.init_client(2), objective)
    rule = rule.model_copy(update={"client_learning_rate": 0.1})
    upload, _ = rule.client_update(received, rule.init_client(2), objective)
    with pytest.raises(ValueError, match=r"server_learning_rate is not derived yet"):
        rule.server_update(state, [Reply(0, upload, 1.0, 1.0, 1)])


def test_padamfed_dog_moves_as_far_as_it_has_come() -> None:
    run = on_slopes(PAdaMFedDoG(), [3.0, 4.0], [[0.0, 2.0]], steps=1)  # T = 10, ‖x⁰‖ = 5
    run.round([0])  # γ₀ = r₀ = 0.06, straight down
    assert run.x.tolist() == pytest.approx([3.0, 3.94])
    assert run.now.client_learning_rate == pytest.approx(0.06 / math.sqrt(0.3))
    assert run.rule.report(run.server, 2) == pytest.approx({"gamma": 0.054, "distance": 0.06})
    run.round([0])  # ‖ḡ₀‖ = 1: γ₁ = 0.06·(1 − 1/10)
    assert run.x.tolist() == pytest.approx([3.0, 3.886])
    # D₂ = 0.114, ḡ₁ = ḡ₀: γ₂ = 0.114/√2·(1 − 2/10)
    assert run.rule.report(run.server, 3)["gamma"] == pytest.approx(0.114 / math.sqrt(2) * 0.8)


def test_lean_uplink_gives_way_where_it_would_lose_digits() -> None:
    plan = make_plan(2, [1, 10])
    assert Scaffold(client_learning_rate=0.02).resolve(plan).upload_names == ("delta",)
    small = Scaffold(client_learning_rate=0.005).resolve(plan)  # ηK_i = 0.005 at the first client
    assert small.upload_names == ("delta", "control_variate_change")
    assert ScaffoldM(momentum=0.0).resolve(plan).lean_uplink is False


def test_rules_work_with_a_leading_client_axis() -> None:
    rule = PAdaMFed(**ETA, server_learning_rate=1.0, momentum=0.5, control_variate_start="zero")
    x, d = torch.zeros(2, 2), torch.zeros(2, 2)

    class Stacked:
        num_steps, num_examples = 2, 1

        def working_copy(self, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        def batches(self) -> range:
            return range(2)

        def gradient(self, y: torch.Tensor, batch: int) -> torch.Tensor:
            return torch.tensor([[3.0, 4.0], [0.0, 2.0]])

    state = {"control_variate": torch.zeros(2, 2)}
    upload, _ = rule.client_update({"model": x, "direction": d}, state, Stacked())
    assert upload["delta"].tolist() == [pytest.approx([-0.12, -0.16]), pytest.approx([0, -0.2])]


@pytest.mark.parametrize("name", ["padamfed", "padamfed_vr"])
def test_step_scale_multiplies_both_derived_step_sizes(name: str) -> None:
    kind = {"padamfed": PAdaMFed, "padamfed_vr": PAdaMFedVR}[name]
    plan = make_plan(4, [8] * 4, num_rounds=100, sampled=2)
    plain, scaled = kind().resolve(plan), kind(step_scale=3.0).resolve(plan)
    assert scaled.client_learning_rate == pytest.approx(3 * plain.client_learning_rate)
    assert scaled.server_learning_rate == pytest.approx(plain.server_learning_rate)  # γ/(ηK)
    assert scaled.momentum == plain.momentum
    if name == "padamfed":
        assert scaled.client_learning_rate == pytest.approx(3 / 80)


def test_step_scale_multiplies_the_distance_rule_too() -> None:
    plain, scaled = (
        on_slopes(PAdaMFedDoG(step_scale=scale), [1.0], [[1.0], [1.0]]) for scale in (1.0, 2.0)
    )
    for run in (plain, scaled):
        run.round([0, 1])
    assert float(1 - scaled.x) == pytest.approx(2 * float(1 - plain.x), rel=1e-5)


@pytest.mark.parametrize("field", ["client_learning_rate", "server_learning_rate"])
def test_step_scale_beside_a_step_size_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"step_scale: got 2.0 beside algorithm.{field} = 0.1;"):
        PAdaMFed(step_scale=2.0, **{field: 0.1})

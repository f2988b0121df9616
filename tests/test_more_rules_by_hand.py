"""Variance reduction, server and local adaptivity, against numbers worked out by hand.

ConstantGradient clients have a gradient a_i everywhere; Quadratic ones h(y − m). η = 0.1.
"""

from __future__ import annotations

import math

import pytest
from helpers import HandRun, Quadratic, make_plan, on_quadratics

from fedopt_flwr.algorithms import (
    FANT,
    MBSTORM,
    STEM,
    FAdamGC,
    FedAdagrad,
    FedAdam,
    FedAMS,
    FedAvgM,
    FedAvgWithMomentumVR,
    FedMoS,
    FedYogi,
    LocalAdam,
    PAdaMFedDoG,
    PAdaMFedVR,
    ScaffoldM,
    ScaffoldMVR,
)
from fedopt_flwr.errors import ConfigError, FedoptWarning

ETA = {"client_learning_rate": 0.1}
SERVER = {"server_learning_rate": 0.1, "first_decay": 0.5, "adaptivity": 0.1}
TWO = [[1.0], [3.0]]  # K = 2: Δ = −0.2 and −0.6, the mean is −0.4
HALF = [Quadratic([1.0], 0.0), Quadratic([1.0], -2.0)]  # at 1: gradients 1 and 3


def test_fedavgm_keeps_part_of_the_last_movement() -> None:
    run = HandRun(FedAvgM(**ETA, momentum=0.5), [1.0], TWO)
    run.round([0, 1])
    assert run.value("model") == pytest.approx([0.6])
    run.round([0, 1])  # m = −0.2 − 0.4
    assert run.value("model") == pytest.approx([0.0], abs=1e-6)


def test_fedadam_has_no_bias_correction_and_starts_v_at_the_square_of_its_floor() -> None:
    run = HandRun(FedAdam(**ETA, **SERVER, second_decay=0.5), [1.0], TWO)
    run.round([0, 1])  # m = −0.2, v = 0.5·0.01 + 0.5·0.16 = 0.085
    assert run.value("second_moment") == pytest.approx([0.085])
    assert run.value("model") == pytest.approx([1 - 0.1 * 0.2 / (math.sqrt(0.085) + 0.1)])


def test_fedyogi_changes_v_by_the_square_alone() -> None:
    run = HandRun(FedYogi(**ETA, **SERVER, second_decay=0.5), [1.0], TWO)
    run.round([0, 1])  # v = 0.01 + 0.5·0.16 = 0.09, step −0.2/(0.3 + 0.1)
    assert run.value("model") == pytest.approx([0.95])


def test_fedadagrad_sums_the_squares() -> None:
    run = HandRun(FedAdagrad(**ETA, **SERVER), [1.0], TWO)
    run.round([0, 1])
    run.round([0, 1])
    assert run.value("second_moment") == pytest.approx([0.01 + 2 * 0.16])


def test_fedams_divides_by_the_largest_v_and_not_below_its_floor() -> None:
    run = HandRun(FedAMS(**ETA, **SERVER | {"adaptivity": 0.25}, second_decay=0.5), [1.0], TWO)
    run.round([0, 1])  # v = 0.08 < ε = 0.25: −0.2/0.5
    assert run.value("model") == pytest.approx([0.96])
    assert run.value("second_moment") == pytest.approx([0.08])


def test_fedavg_m_vr_compares_the_batch_at_both_models() -> None:
    run = on_quadratics(FedAvgWithMomentumVR(**ETA, momentum=0.5), 1.0, HALF)
    assert run.value("server_momentum") == [2.0]
    run.round([0, 1])  # x⁻ = x: u = 1 + ½(2 − 1) and 3 + ½(2 − 3)
    assert run.value("model") == pytest.approx([0.8])
    assert set(run.now.broadcast(run.server)) == {"model", "server_momentum"}
    run.round([0, 1])  # x⁻ = 1: u = 0.8 + ½(2 − 1) and 2.8 + ½(2 − 3)
    assert run.value("model") == pytest.approx([0.62])
    assert run.value("server_momentum") == pytest.approx([1.8])


def test_fedavg_m_vr_takes_x_for_the_last_model_until_a_round_has_counted() -> None:
    """Without a usable reply in round 1, g still holds gradients that moved nothing."""
    run = on_quadratics(FedAvgWithMomentumVR(**ETA, momentum=0.5), 1.0, HALF)
    run.rounds = 1  # a round that nobody answered
    run.round([0, 1])
    assert run.now.previous_model == "same"
    assert run.value("model") == pytest.approx([0.8])
    run.round([0, 1])
    assert run.now.previous_model == "recovered"


def test_fedavg_m_vr_sends_the_last_model_where_it_cannot_be_recovered() -> None:
    unequal = [Quadratic([1.0], 0.0), Quadratic([1.0, 1.0], -2.0)]
    run = on_quadratics(FedAvgWithMomentumVR(**ETA, momentum=0.5), 1.0, unequal)
    assert run.rule.broadcast_names == ("model", "server_momentum", "previous_model")
    run.round([0, 1])
    assert run.value("previous_model") == [1.0]


def test_scaffold_m_vr_corrects_and_compares() -> None:
    run = on_quadratics(ScaffoldMVR(**ETA, momentum=0.5), 1.0, HALF)
    run.round([0, 1])  # u = 1 + ½(2 − 1) + ½(2 − 1), the other 3 + ½(2 − 3) + ½(2 − 3)
    assert run.value("model") == pytest.approx([0.8])
    run.round([0])  # u = 0.8 + ½(2 − 1) + ½(2 − 1), with ∇F(x⁻) = 1
    assert run.value("model") == pytest.approx([0.62])
    assert run.value("control_variate") == pytest.approx([1.9])  # 2 + ½(0.8 − 1)
    assert run.value("server_momentum") == pytest.approx([1.8])


@pytest.mark.parametrize(("momentum_rule", "g"), [("printed", 1.95), ("proved", 1.9)])
def test_padamfed_vr_has_both_momentum_rules(momentum_rule: str, g: float) -> None:
    rule = PAdaMFedVR(**ETA, server_learning_rate=1.0, momentum=0.5, momentum_rule=momentum_rule)
    run = on_quadratics(rule, 1.0, HALF)
    run.round([0, 1])  # all directions are 2, normalised to 1
    assert run.value("model") == pytest.approx([0.9])
    run.round([0])  # u = 0.9 + ½(2 − 1) + ½(2 − 1); change −0.1
    assert run.value("model") == pytest.approx([0.8])
    assert run.value("server_momentum") == pytest.approx([g])  # ½(−0.1 + 2) + ½·2, or 1.9
    assert len(run.uploads[0]) == (3 if momentum_rule == "proved" else 2)


def test_padamfed_vr_step_sizes_are_those_of_the_second_theorem() -> None:
    rule = PAdaMFedVR().resolve(make_plan(20, [10] * 20, num_rounds=1000, sampled=5))
    assert rule.client_learning_rate == pytest.approx(1 / (10 * 1000))
    gamma = 50 ** (1 / 3) / 100
    assert rule.momentum == pytest.approx(gamma)
    assert rule.server_learning_rate == pytest.approx((50 * 1000) ** (1 / 3))
    with pytest.warns(FedoptWarning, match=r"SK = 50 and T = 5"):
        assert PAdaMFedVR().resolve(make_plan(20, [10] * 20, 5, 5)).momentum == 1.0


def test_padamfed_dog_moves_as_far_as_it_has_come() -> None:
    run = HandRun(PAdaMFedDoG(), [3.0, 4.0], [[0.0, 2.0]], steps=1)  # T = 10, ‖x⁰‖ = 5
    run.round([0])  # γ₀ = r₀ = 0.06, straight down
    assert run.value("model") == pytest.approx([3.0, 3.94])
    assert run.now.client_learning_rate == pytest.approx(0.06 / math.sqrt(0.3))
    assert run.rule.report(run.server, 2) == pytest.approx({"gamma": 0.054, "distance": 0.06})
    run.round([0])  # ‖ḡ₀‖ = 1: γ₁ = 0.06·(1 − 1/10)
    assert run.value("model") == pytest.approx([3.0, 3.886])
    # D₂ = 0.114, ḡ₁ = ḡ₀: γ₂ = 0.114/√2·(1 − 2/10)
    assert run.rule.report(run.server, 3)["gamma"] == pytest.approx(0.114 / math.sqrt(2) * 0.8)


def test_fedmos_evaluates_the_same_batch_at_the_point_before() -> None:
    rule = FedMoS(**ETA, local_momentum=0.5, momentum=0.5, proximal_strength=0.0)
    run = on_quadratics(rule, 1.0, [Quadratic([1.0, 3.0])])
    run.round([0])  # d = 2, y = 0.8; d = 3·0.8 + ½(2 − 3·1) = 1.9, y = 0.61
    assert run.value("model") == pytest.approx([0.61])
    run.round([0])  # Δ = 0.61·(−0.39); b = ½(−0.39) + Δ
    assert run.value("model") == pytest.approx([0.61 - 0.195 - 0.61 * 0.39])


def test_fedmos_pull_is_not_multiplied_by_the_learning_rate() -> None:
    rule = FedMoS(**ETA, local_momentum=1.0, momentum=0.0, proximal_strength=0.2)
    run = on_quadratics(rule, 1.0, [Quadratic([1.0, 1.0])])
    run.round([0])  # y = 0.9; y = 0.9 − 0.09 − 0.2(0.9 − 1)
    assert run.value("model") == pytest.approx([0.83])


def test_stem_steps_on_both_sides() -> None:
    run = on_quadratics(STEM(**ETA, local_momentum=0.5), 1.0, [Quadratic([1.0, 3.0])])
    assert run.value("server_momentum") == [2.0]
    run.round([0])
    # u = 1 + ½(2 − 1.2) = 1.4, y = 0.86; u = 3·0.86 + ½(1.4 − 3) = 1.78, y = 0.682
    assert run.value("server_momentum") == pytest.approx([1.78])
    assert run.value("model") == pytest.approx([0.682 - 0.178])


def test_what_clients_could_not_recover_is_refused() -> None:
    equal, unequal = make_plan(2, [2, 2]), make_plan(2, [2, 3])
    for rule, plan in (
        (FedAvgWithMomentumVR(previous_model="same"), equal),
        (FedAvgWithMomentumVR(previous_model="recovered"), unequal),
    ):
        with pytest.raises(ConfigError, match=r"algorithm.previous_model: got .* say 'sent'"):
            rule.resolve(plan)
    assert FedAvgWithMomentumVR(previous_model="recovered").resolve(equal)
    with pytest.raises(ConfigError, match=r"algorithm.lean_uplink: got true with algorithm.mome"):
        ScaffoldM(momentum=0.0, lean_uplink=True).resolve(equal)
    assert ScaffoldM(momentum=0.0).resolve(equal).lean_uplink is False


def test_mb_storm_takes_one_step_a_round() -> None:
    run = on_quadratics(MBSTORM(**ETA, momentum=0.5), 1.0, [Quadratic([1.0])])
    run.round([0])  # g = ½·1 + ½·1
    assert run.value("model") == pytest.approx([0.9])
    run.round([0])  # q = 0.9 − ½·1, g = 0.4 + ½
    assert run.value("server_momentum") == pytest.approx([0.9])
    assert run.value("model") == pytest.approx([0.81])


LOCAL = {**ETA, "first_decay": 0.5, "second_decay": 0.75, "adaptivity": 1.0}


def test_local_adam_keeps_its_second_moment_and_forgets_the_first() -> None:
    run = HandRun(LocalAdam(**LOCAL), [1.0], [[2.0]], steps=1)
    run.round([0])  # m = 1, v = ¼·4 = 1, step 1/(1 + 1)
    assert run.value("model") == pytest.approx([0.95])
    run.round([0])  # m = 1 again, v = ¾ + 1
    assert run.value("model") == pytest.approx([0.95 - 0.1 / (math.sqrt(1.75) + 1)])


def test_fadamgc_corrects_before_the_moments_and_tracks_a_subset() -> None:
    run = HandRun(FAdamGC(**LOCAL, tracked_clients=1), [1.0], TWO, steps=1)
    run.clients[1]["control_variate"] += 1  # 4: its next change would be −1
    run.round([0, 1])  # ĝ = 1 + 2 − 1 = 2 and 3 + 2 − 4 = 1: steps 1/(1 + 1), 0.5/(0.5 + 1)
    assert run.value("model") == pytest.approx([1 - 0.1 * (0.5 + 1 / 3) / 2])
    assert [sorted(upload) for upload in run.uploads.values()] == [
        ["control_variate_change", "delta"],
        ["delta"],
    ]
    assert run.value("control_variate") == [2.0]
    assert float(run.clients[1]["control_variate"]) == 4.0
    assert float(run.clients[1]["second_moment"]) == pytest.approx(0.25)  # kept, tracked or not
    run.round([1, 0])
    assert run.value("control_variate") == pytest.approx([1.5])  # ½(3 − 4) from the other


@pytest.mark.parametrize(
    ("optimizer", "x"),
    # ĝ = 2, v = 1; RMSProp 2/(1 + 1); Adam 1/(1 + 1), AdamW adds λ·1
    [("rmsprop", 0.9), ("adam", 0.95), ("adamw", 0.93)],
)
def test_fadamgc_knows_three_optimisers(optimizer: str, x: float) -> None:
    rule = FAdamGC(**LOCAL, optimizer=optimizer, decoupled_weight_decay=0.2)
    run = HandRun(rule, [1.0], TWO, steps=1)
    run.round([0, 1])
    assert run.value("model") == pytest.approx([x])


def test_fadamgc_full_gradient_start_takes_all_examples() -> None:
    rule = FAdamGC(**LOCAL, control_variate_start="full_gradient")
    run = on_quadratics(rule, 1.0, [Quadratic([1.0, 3.0])])
    assert run.value("control_variate") == [2.0]


def test_fa_nt_corrects_after_the_moments() -> None:
    run = HandRun(FANT(**LOCAL, tracked_clients=1), [1.0], [[2.0], [2.0]], steps=1)
    run.round([1, 0])  # step ½ for both, c_i⁺ = 0.05/0.1 = ½ for the tracked one
    assert run.value("model") == pytest.approx([0.95])
    assert run.value("control_variate") == pytest.approx([0.25])
    assert [float(c["control_variate"]) for c in run.clients] == pytest.approx([0.0, 0.5])
    run.round([0])  # step + c − c_i = 1/(√1.75 + 1) + ¼
    step = 1 / (math.sqrt(1.75) + 1) + 0.25
    assert run.value("model") == pytest.approx([0.95 - 0.1 * step])
    assert float(run.clients[0]["control_variate"]) == pytest.approx(step - 0.25)


def test_more_tracked_than_sampled_clients_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"tracked_clients: got 4; must be between 0 and .* \(2\)"
    ):
        FAdamGC(tracked_clients=4).resolve(make_plan(3, [1, 1, 1], sampled=2))

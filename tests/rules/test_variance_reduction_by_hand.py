"""Rules that take a minibatch at two points, against numbers worked out by hand; η = 0.1.

A client of `bowl` has the gradient h(y − m).
"""

from __future__ import annotations

import pytest
from helpers import bowl, make_plan, on_toys

from fedopt_flwr.algorithms import (
    MBSTORM,
    STEM,
    FedAvgWithMomentumVR,
    FedMoS,
    PAdaMFedVR,
    ScaffoldM,
    ScaffoldMVR,
)
from fedopt_flwr.errors import ConfigError, FedoptWarning

ETA = {"client_learning_rate": 0.1, "server_learning_rate": 1.0}
HALF = [bowl([1.0], 0.0), bowl([1.0], -2.0)]  # at 1: gradients 1 and 3


def test_fedavg_m_vr_compares_the_batch_at_both_models() -> None:
    run = on_toys(FedAvgWithMomentumVR(**ETA, momentum=0.5), 1.0, HALF)
    assert run.server["server_momentum"].tolist() == [2.0]
    run.round([0, 1])  # x⁻ = x: u = 1 + ½(2 − 1) and 3 + ½(2 − 3)
    assert run.x.tolist() == pytest.approx([0.8])
    assert set(run.now.broadcast(run.server)) == {"model", "server_momentum"}
    run.round([0, 1])  # x⁻ = 1: u = 0.8 + ½(2 − 1) and 2.8 + ½(2 − 3)
    assert run.x.tolist() == pytest.approx([0.62])
    assert run.server["server_momentum"].tolist() == pytest.approx([1.8])


def test_fedavg_m_vr_takes_x_for_the_last_model_until_a_round_has_counted() -> None:
    """Without a usable reply in round 1, g still holds gradients that moved nothing."""
    run = on_toys(FedAvgWithMomentumVR(**ETA, momentum=0.5), 1.0, HALF)
    run.number = 1  # a round that nobody answered
    run.round([0, 1])
    assert run.now.previous_model == "same"
    assert run.x.tolist() == pytest.approx([0.8])
    run.round([0, 1])
    assert run.now.previous_model == "recovered"


def test_fedavg_m_vr_sends_the_last_model_where_it_cannot_be_recovered() -> None:
    unequal = [bowl([1.0], 0.0), bowl([1.0, 1.0], -2.0)]
    run = on_toys(FedAvgWithMomentumVR(**ETA, momentum=0.5), 1.0, unequal)
    assert run.rule.broadcast_names == ("model", "server_momentum", "previous_model")
    run.round([0, 1])
    assert run.server["previous_model"].tolist() == [1.0]


def test_scaffold_m_vr_corrects_and_compares() -> None:
    run = on_toys(ScaffoldMVR(**ETA, momentum=0.5), 1.0, HALF)
    run.round([0, 1])  # u = 1 + ½(2 − 1) + ½(2 − 1), the other 3 + ½(2 − 3) + ½(2 − 3)
    assert run.x.tolist() == pytest.approx([0.8])
    run.round([0])  # u = 0.8 + ½(2 − 1) + ½(2 − 1), with ∇F(x⁻) = 1
    assert run.x.tolist() == pytest.approx([0.62])
    assert run.server["control_variate"].tolist() == pytest.approx([1.9])  # 2 + ½(0.8 − 1)
    assert run.server["server_momentum"].tolist() == pytest.approx([1.8])


@pytest.mark.parametrize(("momentum_rule", "g"), [("printed", 1.95), ("proved", 1.9)])
def test_padamfed_vr_has_both_momentum_rules(momentum_rule: str, g: float) -> None:
    rule = PAdaMFedVR(**ETA, momentum=0.5, momentum_rule=momentum_rule)
    run = on_toys(rule, 1.0, HALF)
    run.round([0, 1])  # all directions are 2, normalised to 1
    assert run.x.tolist() == pytest.approx([0.9])
    run.round([0])  # u = 0.9 + ½(2 − 1) + ½(2 − 1); change −0.1
    assert run.x.tolist() == pytest.approx([0.8])
    assert run.server["server_momentum"].tolist() == pytest.approx([g])  # ½(−0.1 + 2) + ½·2, or 1.9
    assert len(run.replies[0].upload) == (3 if momentum_rule == "proved" else 2)


def test_padamfed_vr_step_sizes_are_those_of_the_second_theorem() -> None:
    rule = PAdaMFedVR().resolve(make_plan(20, [10] * 20, num_rounds=1000, sampled=5))
    assert rule.client_learning_rate == pytest.approx(1 / (10 * 1000))
    gamma = 50 ** (1 / 3) / 100
    assert rule.momentum == pytest.approx(gamma)
    assert rule.server_learning_rate == pytest.approx((50 * 1000) ** (1 / 3))
    with pytest.warns(FedoptWarning, match=r"SK = 50 and T = 5"):
        assert PAdaMFedVR().resolve(make_plan(20, [10] * 20, 5, 5)).momentum == 1.0


def test_fedmos_evaluates_the_same_batch_at_the_point_before() -> None:
    rule = FedMoS(**ETA, local_momentum=0.5, momentum=0.5, proximal_strength=0.0)
    run = on_toys(rule, 1.0, [bowl([1.0, 3.0])])
    run.round([0])  # d = 2, y = 0.8; d = 3·0.8 + ½(2 − 3·1) = 1.9, y = 0.61
    assert run.x.tolist() == pytest.approx([0.61])
    run.round([0])  # Δ = 0.61·(−0.39); b = ½(−0.39) + Δ
    assert run.x.tolist() == pytest.approx([0.61 - 0.195 - 0.61 * 0.39])


def test_fedmos_pull_is_not_multiplied_by_the_learning_rate() -> None:
    rule = FedMoS(**ETA, local_momentum=1.0, momentum=0.0, proximal_strength=0.2)
    run = on_toys(rule, 1.0, [bowl([1.0, 1.0])])
    run.round([0])  # y = 0.9; y = 0.9 − 0.09 − 0.2(0.9 − 1)
    assert run.x.tolist() == pytest.approx([0.83])


def test_stem_steps_on_both_sides() -> None:
    run = on_toys(STEM(**ETA, local_momentum=0.5), 1.0, [bowl([1.0, 3.0])])
    assert run.server["server_momentum"].tolist() == [2.0]
    assert run.x.tolist() == pytest.approx([0.8])
    run.round([0])
    # u = 0.8 + ½(2 − 1) = 1.3, y = 0.67; u = 3·0.67 + ½(1.3 − 3·0.8) = 1.46, whose step is x's
    assert run.server["server_momentum"].tolist() == pytest.approx([1.46])
    assert run.x.tolist() == pytest.approx([0.67 - 0.146])


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
    run = on_toys(MBSTORM(**ETA, momentum=0.5), 1.0, [bowl([1.0])])
    run.round([0])  # g = ½·1 + ½·1
    assert run.x.tolist() == pytest.approx([0.9])
    run.round([0])  # q = 0.9 − ½·1, g = 0.4 + ½
    assert run.server["server_momentum"].tolist() == pytest.approx([0.9])
    assert run.x.tolist() == pytest.approx([0.81])

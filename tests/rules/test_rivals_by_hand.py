"""One round or two of the rules that others compare with, against numbers worked out by hand.

Clients have gradients a₁ and a₂ everywhere, or bowls ½h‖y − m‖²; η = 0.1 and K = 2 unless said.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from helpers import (
    SOFTMAX_DATA,
    Federation,
    bowl,
    linear,
    linear_model,
    on_slopes,
    on_toys,
    softmax_config,
)
from torch.nn import functional

from fedopt_flwr import simulate
from fedopt_flwr.algorithms import AutoFed, DeltaSGD, FedDyn, FedExP, FedNova, FedSPS, MimeLite
from fedopt_flwr.errors import ConfigError

ETA = {"client_learning_rate": 0.1}


def test_fednova_takes_the_mean_step_as_often_as_the_mean_client_steps() -> None:
    run = on_slopes(FedNova(**ETA), [0.0], [[1.0], [3.0]], steps=[2, 4])
    run.round([0, 1])  # Δ_i/K_i = −0.1, −0.3; mean −0.2, three times; FedAvg moves by −0.7
    assert run.x.tolist() == pytest.approx([-0.6])
    run.round([1])  # K_i of those who replied alone
    assert run.x.tolist() == pytest.approx([-1.8])


def test_fedexp_goes_further_the_less_movements_agree_and_shows_the_mean_of_two_iterates() -> None:
    run = on_slopes(FedExP(**ETA, adaptivity=0.0025), [1.0], [[1.0], [-0.5]])
    run.round([0, 1])  # Δ = −0.2 and 0.1: η_g = ½(0.04 + 0.01)/(2(0.0025 + 0.0025)) = 2.5
    assert run.server["iterate_model"].tolist() == pytest.approx([0.875])
    assert run.x.tolist() == pytest.approx([0.9375])
    run.round([0])  # one reply: 0.04/(2·0.0425) is below 1
    assert run.server["iterate_model"].tolist() == pytest.approx([0.675])
    assert run.x.tolist() == pytest.approx([0.775])


def test_feddyn_bends_the_local_problems_and_adds_what_was_bent() -> None:
    run = on_slopes(FedDyn(**ETA, regularization=0.5), [0.0], [[1.0], [3.0]])
    run.round([0, 1])  # Δ = −0.195 and −0.585, h = 0.5·0.39
    assert [float(s["local_dual"]) for s in run.states] == pytest.approx([0.0975, 0.2925])
    assert run.server["server_dual"].tolist() == pytest.approx([0.195])
    assert run.x.tolist() == pytest.approx([-0.78])
    # −0.09025, then −0.1(1 − 0.0975 − 0.5·0.09025) more; h grows by half of 0.5·0.1759875
    run.round([0])
    assert run.replies[0].upload["delta"].tolist() == pytest.approx([-0.1759875])
    assert run.server["server_dual"].tolist() == pytest.approx([0.238996875])
    assert run.x.tolist() == pytest.approx([-1.43398125])


def test_mimelite_moves_its_momentum_by_gradients_at_the_servers_model() -> None:
    run = on_toys(MimeLite(**ETA, momentum=0.25), 1.0, [bowl([1.0, 1.0]), bowl([3.0, 3.0])])
    run.round([0, 1])  # y: 1 → 0.975 → 0.950625, and 1 → 0.925 → 0.855625
    assert run.x.tolist() == pytest.approx([0.903125])
    assert run.server["server_momentum"].tolist() == pytest.approx([0.5])  # 0.25·½(1 + 3)
    run.round([0])  # u = 0.25y + 0.375: 0.903125 → 0.843046875 → 0.784470703125
    assert run.x.tolist() == pytest.approx([0.784470703125])
    assert run.server["server_momentum"].tolist() == pytest.approx([0.60078125])


@pytest.mark.parametrize(
    ("curvature", "divisor", "end"),
    [(4.0, 0.5, 0.0), (4.0, 1.0, 0.5), (0.5, 0.5, 0.5), (0.5, 4.0, 0.875)],
)
def test_fedsps_steps_by_loss_over_squared_gradient(
    curvature: float, divisor: float, end: float
) -> None:
    """At 1 the loss is h/2 and the gradient h: η = 1/(2ch), at most 1."""
    run = on_toys(FedSPS(polyak_divisor=divisor), 1.0, [bowl([curvature])])
    run.round([0])
    assert run.x.tolist() == pytest.approx([end], abs=1e-7)


def test_fedsps_stays_where_nothing_is_left_to_learn() -> None:
    run = on_toys(FedSPS(), 0.0, [bowl([1.0, 1.0])])
    run.round([0])
    assert run.x.tolist() == [0.0]


def test_delta_sgd_grows_its_step_where_the_gradient_stays_and_begins_anew_every_round() -> None:
    run = on_slopes(DeltaSGD(), [0.0], [[1.0]], steps=3)
    second = 0.2 * math.sqrt(1.1)
    third = second * math.sqrt(1 + 0.1 * math.sqrt(1.1))
    for number in (1, 2):
        run.round([0])
        assert run.x.tolist() == pytest.approx([-number * (0.2 + second + third)])


def test_delta_sgd_steps_by_the_curvature_that_it_measures() -> None:
    run = on_toys(DeltaSGD(), 1.0, [bowl([8.0, 8.0])])
    run.round([0])  # 1 → −0.6; 2·1.6/(2·12.8) = 1/8 leads to the minimum
    assert run.x.tolist() == pytest.approx([0.0], abs=1e-7)
    run.round([0])  # at the minimum 0/0 bounds nothing
    assert run.x.tolist() == pytest.approx([0.0], abs=1e-7)


def test_delta_sgd_goes_on_after_a_batch_without_a_gradient() -> None:
    run = on_toys(DeltaSGD(), 1.0, [bowl([0.0, 1.0, 1.0])])
    run.round([0])  # its steps grow, as nothing was measured that bounds them
    second = 0.2 * math.sqrt(1.1)
    third = second * math.sqrt(1 + 0.1 * math.sqrt(1.1))
    assert run.x.tolist() == pytest.approx([(1 - second) * (1 - third)])


def test_autofed_doubles_its_length_while_the_loss_falls_along_its_movements() -> None:
    run = on_slopes(AutoFed(), [1.0], [[1.0], [1.0]])
    lengths = []
    for number in range(1, 6):
        lengths.append(run.rule.report(run.server, number)["gamma"])
        run.round([0, 1])
    # 0.01(1 + 1); round 1 has no movement to look at
    assert lengths == pytest.approx([0.02, 0.02, 0.04, 0.08, 0.16])
    assert run.x.tolist() == pytest.approx([1 - sum(lengths)])
    assert float(run.server["slope"]) == pytest.approx(1.0)
    assert int(run.server["ramp_end"]) == 0


def test_autofed_ends_its_ramp_behind_the_minimum_and_goes_back_in_cut_steps() -> None:
    """½x² from 1, K = 1: 0.98, 0.96, 0.92, 0.84, 0.68, 0.36, −0.28; there G is uphill."""
    run = on_toys(AutoFed(), 1.0, [bowl([1.0])])
    for _ in range(8):
        run.round([0])
    # β = 0.2: g had come from 0.98 to 0.36 with the gradients, and the eighth is −0.28
    g = 1.0
    for gradient in (1, 0.98, 0.96, 0.92, 0.84, 0.68, 0.36, -0.28):
        g = 0.2 * gradient + 0.8 * g
    assert int(run.server["ramp_end"]) == 8
    assert float(run.server["step_length"]) == pytest.approx(3 * 1.28, rel=1e-5)
    assert float(run.server["norm_floor"]) == pytest.approx(3 * g, rel=1e-5)
    assert run.x.tolist() == pytest.approx([-1.56], rel=1e-5)
    run.round([0])  # of 10: the first of two, and u = 0.2·(−1.56) + 0.8g is shorter than U
    step = 3.84 * (0.2 * -1.56 + 0.8 * g) / (3 * g)
    assert run.x.tolist() == pytest.approx([-1.56 - step], rel=1e-5)
    # its loss of ½·1.56² is more than twice the first one, ½; the last round takes 2·½ of that
    assert run.rule.report(run.server, 10)["gamma"] == pytest.approx(3.84 / 2, rel=1e-5)


def test_autofed_ends_its_ramp_at_a_hopeless_loss_with_the_length_of_two_rounds_before() -> None:
    run = on_slopes(AutoFed(), [1.0], [[1.0]])
    for number in range(1, 6):  # γ = 0.02, 0.02, 0.04, 0.08, 0.16
        run.toys[0].constant = 10.0 if number < 5 else 30.0
        run.round([0])
    assert int(run.server["ramp_end"]) == 5
    assert float(run.server["step_length"]) == pytest.approx(3 * 0.04)
    assert float(run.server["norm_floor"]) == pytest.approx(3.0)


def test_autofed_grows_while_aligned_and_takes_half_back_where_it_gets_worse() -> None:
    run = on_slopes(AutoFed(), [1.0], [[1.0]])
    lengths, growths = [], []
    for loss in (10, 10, 10, 10, 30, 9, 8, 19.5, 1, 1):
        run.toys[0].constant = loss
        run.round([0])
        lengths.append(float(run.server["step_length"]))
        growths.append(int(run.server["num_growths"]))
    # its mean cosine is 0.2 in round 6, and half of rounds 6 to 10 are 6 and 7; in round 8 the mean
    # loss is 0.2·19.5 and 0.8·8.8, more than 1.2·8.8
    assert lengths[4:] == pytest.approx([0.12, 0.15, 0.1875, 0.15, 0.15, 0.15])
    assert growths[4:] == [0, 1, 2, -1, -1, -1]


@pytest.mark.parametrize(("losses", "why"), [((9, 9.5), "worse"), ((1.5, 1.4), "mostly done")])
def test_autofed_does_not_grow_where_that_cannot_help(
    losses: tuple[float, float], why: str
) -> None:
    run = on_slopes(AutoFed(), [1.0], [[1.0]])
    for loss in (10, 10, 10, 10, 30, *losses):
        run.toys[0].constant = loss
        run.round([0])
    assert int(run.server["num_growths"]) == (1 if why == "worse" else 0)


def test_autofed_without_decay_does_not_know_when_the_run_ends() -> None:
    ends = []
    for num_rounds in (20, 40):
        run = Federation(AutoFed(decays=False), [bowl([1.0])], [1.0], num_rounds=num_rounds)
        for _ in range(20):
            run.round([0])
        assert int(run.server["ramp_end"]) == 8
        assert run.rule.report(run.server, 20)["gamma"] == float(run.server["step_length"])
        ends.append(run.x.tolist())
    assert ends[0] == ends[1]


def lengths_of(run: Federation, losses: Iterable[float]) -> list[float]:
    """γ after each of these rounds of client 0, whose losses are given."""
    lengths = []
    for loss in losses:
        run.toys[0].constant = loss
        run.round([0])
        lengths.append(float(run.server["step_length"]))
    return lengths


def test_autofed_grows_to_the_middle_of_what_is_left_unless_it_never_decays() -> None:
    """Ten rounds; after the ramp's end in round 5, rounds 6 and 7 are the first half."""
    losses = (10, 10, 10, 10, 30, 9, 8, 7, 6, 5)
    decaying = on_slopes(AutoFed(), [1.0], [[1.0]])
    assert lengths_of(decaying, losses)[5:] == pytest.approx([0.15, *[0.1875] * 4])
    endless = on_slopes(AutoFed(decays=False), [1.0], [[1.0]])
    assert lengths_of(endless, losses)[5:] == pytest.approx([0.12 * 1.25**n for n in range(1, 6)])


def test_autofed_grows_only_where_the_round_itself_is_aligned() -> None:
    """That of round 7 is 0.1, of (1, 0) and (0.1, 1), and the mean still above 0.15."""
    run = on_slopes(AutoFed(), [1.0, 0.0], [[1.0, 0.0]])
    lengths_of(run, (10, 10, 10, 10, 30, 9))
    assert int(run.server["num_growths"]) == 1
    run.toys = [linear([0.1, 1.0], 2)]
    lengths_of(run, [8])
    assert float(run.server["slope"]) == pytest.approx(0.1)  # also after the ramp
    assert 0.15 < float(run.server["mean_cosine"]) < 0.4
    assert int(run.server["num_growths"]) == 1


def test_autofed_stays_finite_where_no_gradient_is_left() -> None:
    run = on_slopes(AutoFed(), [1.0], [[1.0]])
    lengths_of(run, (10, 10, 10, 10, 30, 9))
    run.toys = [linear([0.0], 2)]
    run.round([0])
    run.round([0])
    assert all(bool(vector.isfinite().all()) for vector in run.server.vectors.values())
    assert float(run.server["slope"]) == 0.0


@pytest.mark.parametrize("level", [-9.0, -0.5])
def test_autofed_trains_on_losses_below_zero(level: float) -> None:
    run = on_slopes(AutoFed(), [1.0], [[1.0]])
    run.toys[0].constant = level - 1  # at 1 its loss is `level`
    run = Federation(AutoFed(), run.toys, [1.0], num_rounds=10)
    assert lengths_of(run, [level - 1] * 5) == pytest.approx([0.02, 0.04, 0.08, 0.16, 0.32])
    lengths_of(run, [4 * abs(level)])
    assert int(run.server["ramp_end"]) == 6


def test_autofed_takes_no_client_for_a_loss_that_grew() -> None:
    """One of ten has a loss of 31, the others 2: its rounds are as they were at the start."""
    toys = [linear([1.0], 2) for _ in range(10)]
    for toy, loss in zip(toys, (31.0, *[2.0] * 9), strict=True):
        toy.constant = loss
    run = Federation(AutoFed(), toys, [1.0], sampled=1, num_rounds=40)
    for number in range(5):
        run.round([number % 3])
    assert int(run.server["ramp_end"]) == 0
    assert float(run.server["step_length"]) == pytest.approx(0.32)


def test_autofed_runs_on_behind_its_last_round_with_the_last_length() -> None:
    run = on_slopes(AutoFed(), [1.0], [[1.0]])
    lengths_of(run, (10, 10, 10, 10, 30, 9, 8, 8, 8, 8))
    last = run.rule.report(run.server, 10)["gamma"]
    assert run.rule.report(run.server, 12)["gamma"] == last > 0
    run.round([0])


def test_autofed_halves_its_length_where_a_round_was_taken_back() -> None:
    run = on_slopes(AutoFed(), [1.0], [[1.0]])
    lengths_of(run, (10, 10, 10, 10))
    assert float(run.rule.taken_back(run.server)["step_length"]) == pytest.approx(0.16 / 4)
    lengths_of(run, [30])
    assert float(run.rule.taken_back(run.server)["step_length"]) == pytest.approx(0.12 / 2)


def test_autofed_refuses_what_it_finds_itself() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.local_step: got 0\.1; autofed finds it"):
        on_slopes(AutoFed(local_step=0.1), [1.0], [[1.0]])


def test_autofed_does_not_see_the_scale_of_the_loss() -> None:
    """A power of 2 changes exponents alone; the ramp ends in these rounds."""
    plain, louder = (
        simulate(
            softmax_config("autofed", 3, 14),
            model=linear_model,
            client_data=SOFTMAX_DATA,
            loss=lambda outputs, targets, by=by: by * functional.cross_entropy(outputs, targets),
        )
        for by in (1.0, 1024.0)
    )
    assert plain.rounds[-1].chosen["ramp_end"] > 0
    assert louder.parameters.tobytes() == plain.parameters.tobytes()

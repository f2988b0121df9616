"""Adaptivity on the server and on the clients, against numbers worked out by hand; η = 0.1.

A client of `on_slopes` has the gradient a_i everywhere.
"""

from __future__ import annotations

import math

import pytest
from helpers import bowl, make_plan, on_slopes, on_toys

from fedopt_flwr.algorithms import FANT, FAdamGC, FedAdagrad, FedAdam, FedAMS, FedYogi, LocalAdam
from fedopt_flwr.errors import ConfigError

ETA = {"client_learning_rate": 0.1}
SERVER = {"server_learning_rate": 0.1, "first_decay": 0.5, "adaptivity": 0.1}
LOCAL = {**ETA, "first_decay": 0.5, "second_decay": 0.75, "adaptivity": 1.0}
TWO = [[1.0], [3.0]]  # K = 2: Δ = −0.2 and −0.6, the mean is −0.4


def test_fedadam_has_no_bias_correction_and_starts_v_at_the_square_of_its_floor() -> None:
    run = on_slopes(FedAdam(**ETA, **SERVER, second_decay=0.5), [1.0], TWO)
    run.round([0, 1])  # m = −0.2, v = 0.5·0.01 + 0.5·0.16 = 0.085
    assert run.server["second_moment"].tolist() == pytest.approx([0.085])
    assert run.x.tolist() == pytest.approx([1 - 0.1 * 0.2 / (math.sqrt(0.085) + 0.1)])


def test_fedyogi_changes_v_by_the_square_alone() -> None:
    run = on_slopes(FedYogi(**ETA, **SERVER, second_decay=0.5), [1.0], TWO)
    run.round([0, 1])  # v = 0.01 + 0.5·0.16 = 0.09, step −0.2/(0.3 + 0.1)
    assert run.x.tolist() == pytest.approx([0.95])


def test_fedadagrad_sums_the_squares() -> None:
    run = on_slopes(FedAdagrad(**ETA, **SERVER), [1.0], TWO)
    run.round([0, 1])
    run.round([0, 1])
    assert run.server["second_moment"].tolist() == pytest.approx([0.01 + 2 * 0.16])


def test_fedams_divides_by_the_largest_v_and_not_below_its_floor() -> None:
    run = on_slopes(FedAMS(**ETA, **SERVER | {"adaptivity": 0.25}, second_decay=0.5), [1.0], TWO)
    run.round([0, 1])  # v = 0.08 < ε = 0.25: −0.2/0.5
    assert run.x.tolist() == pytest.approx([0.96])
    assert run.server["second_moment"].tolist() == pytest.approx([0.08])


def test_local_adam_keeps_its_second_moment_and_forgets_the_first() -> None:
    run = on_slopes(LocalAdam(**LOCAL), [1.0], [[2.0]], steps=1)
    run.round([0])  # m = 1, v = ¼·4 = 1, step 1/(1 + 1)
    assert run.x.tolist() == pytest.approx([0.95])
    run.round([0])  # m = 1 again, v = ¾ + 1
    assert run.x.tolist() == pytest.approx([0.95 - 0.1 / (math.sqrt(1.75) + 1)])


def test_fadamgc_corrects_before_the_moments_and_tracks_a_subset() -> None:
    run = on_slopes(FAdamGC(**LOCAL, tracked_clients=1), [1.0], TWO, steps=1)
    run.states[1]["control_variate"] += 1  # 4: its next change would be −1
    run.round([0, 1])  # ĝ = 1 + 2 − 1 = 2 and 3 + 2 − 4 = 1: steps 1/(1 + 1), 0.5/(0.5 + 1)
    assert run.x.tolist() == pytest.approx([1 - 0.1 * (0.5 + 1 / 3) / 2])
    assert [sorted(reply.upload) for reply in run.replies] == [
        ["control_variate_change", "delta"],
        ["delta"],
    ]
    assert run.server["control_variate"].tolist() == [2.0]
    assert float(run.states[1]["control_variate"]) == 4.0
    assert float(run.states[1]["second_moment"]) == pytest.approx(0.25)  # kept, tracked or not
    run.round([1, 0])
    assert run.server["control_variate"].tolist() == pytest.approx([1.5])  # ½(3 − 4) from the other


@pytest.mark.parametrize(
    ("optimizer", "x"),
    # ĝ = 2, v = 1; RMSProp 2/(1 + 1); Adam 1/(1 + 1), AdamW adds λ·1
    [("rmsprop", 0.9), ("adam", 0.95), ("adamw", 0.93)],
)
def test_fadamgc_knows_three_optimisers(optimizer: str, x: float) -> None:
    rule = FAdamGC(**LOCAL, optimizer=optimizer, decoupled_weight_decay=0.2)
    run = on_slopes(rule, [1.0], TWO, steps=1)
    run.round([0, 1])
    assert run.x.tolist() == pytest.approx([x])


@pytest.mark.parametrize(
    ("optimizer", "x"),
    # ∇F = 2 then 2, v = 1 then 1.75; RMSProp 2/(√v + 1); Adam m = 1 and 1.5, AdamW adds λy
    [
        ("rmsprop", 1 - 0.1 * (1 + 2 / (math.sqrt(1.75) + 1))),
        ("adam", 1 - 0.1 * (0.5 + 1.5 / (math.sqrt(1.75) + 1))),
        ("adamw", 0.93 - 0.1 * (1.5 / (math.sqrt(1.75) + 1) + 0.2 * 0.93)),
    ],
)
def test_local_adam_knows_three_optimisers(optimizer: str, x: float) -> None:
    rule = LocalAdam(**LOCAL, optimizer=optimizer, decoupled_weight_decay=0.2)
    run = on_slopes(rule, [1.0], [[2.0]], steps=2)
    run.round([0])
    assert run.x.tolist() == pytest.approx([x])


def test_fadamgc_full_gradient_start_takes_all_examples() -> None:
    rule = FAdamGC(**LOCAL, control_variate_start="full_gradient")
    run = on_toys(rule, 1.0, [bowl([1.0, 3.0])])
    assert run.server["control_variate"].tolist() == [2.0]


def test_fa_nt_corrects_after_the_moments() -> None:
    run = on_slopes(FANT(**LOCAL, tracked_clients=1), [1.0], [[2.0], [2.0]], steps=1)
    run.round([1, 0])  # step ½ for both, c_i⁺ = 0.05/0.1 = ½ for the tracked one
    assert run.x.tolist() == pytest.approx([0.95])
    assert run.server["control_variate"].tolist() == pytest.approx([0.25])
    assert [float(c["control_variate"]) for c in run.states] == pytest.approx([0.0, 0.5])
    run.round([0])  # step + c − c_i = 1/(√1.75 + 1) + ¼
    step = 1 / (math.sqrt(1.75) + 1) + 0.25
    assert run.x.tolist() == pytest.approx([0.95 - 0.1 * step])
    assert float(run.states[0]["control_variate"]) == pytest.approx(step - 0.25)


def test_more_tracked_than_sampled_clients_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"tracked_clients: got 4; must be between 0 and .* \(2\)"
    ):
        FAdamGC(tracked_clients=4).resolve(make_plan(3, [1, 1, 1], sampled=2))

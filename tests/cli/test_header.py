"""What the header says of a rule's step sizes."""

from __future__ import annotations

import pytest
from helpers import make_plan

from fedopt_flwr.algorithms import ALGORITHMS
from fedopt_flwr.cli.show import RunDisplay, hyperparameter_text
from fedopt_flwr.rounds.record import RoundRecord

pytestmark = pytest.mark.filterwarnings("ignore:algorithm.momentum")


def text_of(name: str, num_rounds: int, **hyperparameters: float) -> str:
    """For S = 2 and K = 8, so SK = 16."""
    plan = make_plan(2, [8, 8], num_rounds=num_rounds)
    rule = ALGORITHMS[name](**hyperparameters)
    return hyperparameter_text(rule.resolve(plan), plan, rule)


def test_no_momentum_is_said_with_its_reason() -> None:
    assert "β = 1 (no momentum, as T <= S·K: 16 <= 16)" in text_of("padamfed", 16)
    assert "β = 1 (no momentum, as T <= S·K: 3 <= 16)" in text_of("padamfed", 3)
    assert "no momentum" not in text_of("padamfed", 17)
    assert "β = 1 (no momentum, as T² <= S·K: 16 <= 16)" in text_of("padamfed_vr", 4)
    assert "no momentum" not in text_of("padamfed_vr", 5)


def test_a_momentum_that_was_chosen_has_no_such_reason() -> None:
    for name in ("padamfed", "padamfed_vr", "padamfed_dog"):
        assert "β = 1 (no momentum)" in text_of(name, 3, momentum=1.0)
        assert "no momentum" not in text_of(name, 3, momentum=0.5)


def test_padamfed_says_how_far_its_steps_lead() -> None:
    text = text_of("padamfed", 81)  # (16·81)^¼ = 6 and √(16/81)
    assert "β = 0.4444, " in text
    assert text.endswith("γ = η_g·η·K = 0.07407, path γ·T = 6, S·K = 16 and T^(1/3) = 4.33")
    assert "step_scale" not in text
    longer = text_of("padamfed", 81, step_scale=3.0)
    assert "step_scale = 3, " in longer
    assert "path γ·T = 18, " in longer


@pytest.mark.parametrize("name", ALGORITHMS)
def test_other_rules_say_nothing_of_it(name: str) -> None:
    assert ("no momentum" in text_of(name, 1)) is (name in ("padamfed", "padamfed_vr"))


def test_the_time_that_is_left_of_a_resumed_run_is_of_its_own_pace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr("fedopt_flwr.cli.show.time.monotonic", lambda: clock[0])
    display = RunDisplay()
    display._num_rounds = 1000
    display._started = 0.0
    for number in range(801, 901):
        clock[0] += 10.0
        display.on_round(RoundRecord(number))
    assert "round 900/1000    ETA 1000 s" in capsys.readouterr().out

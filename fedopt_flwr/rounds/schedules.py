"""Learning rates that change from round to round, the same for every rule."""

from __future__ import annotations

import math
import warnings
from typing import TypeVar

from ..algorithm import Algorithm
from ..config.sections import Schedule, ScheduleSection
from ..errors import FedoptWarning

Rule = TypeVar("Rule", bound=Algorithm)
_SIDES = ("client", "server")


def rate_factor(
    schedule: Schedule, section: ScheduleSection, number: int, num_rounds: int
) -> float:
    """Return what a learning rate is multiplied by in round `number` of 1..T; 1 in round 1.

    cosine: ½(1 + cos(π(t−1)/T)); inverse_sqrt: 1/√t; step: step_factor once every step_rounds.
    """
    if schedule == "cosine":
        done = min(number, num_rounds) - 1  # a loop of one's own may run on behind T
        return 0.5 * (1 + math.cos(math.pi * done / num_rounds))
    if schedule == "inverse_sqrt":
        return 1 / math.sqrt(number)
    if schedule == "step":
        return float(section.step_factor ** ((number - 1) // section.step_rounds))
    return 1.0


def changed_numbers(rule: Algorithm, of_round: Algorithm) -> dict[str, float]:
    """Return the numeric hyperparameters in which a round differs from the run; a scale of steps
    has its part in their rates."""
    before = rule.model_dump(exclude={"step_scale"})
    return {
        name: value
        for name, value in of_round.model_dump().items()
        if isinstance(value, float) and name in before and value != before[name]
    }


def scheduled(rule: Rule, section: ScheduleSection, number: int, num_rounds: int) -> Rule:
    """Return the rule with the learning rates of round `number`."""
    if section.is_constant:
        return rule
    rates = {}
    for side in _SIDES:
        rate = getattr(rule, f"{side}_learning_rate", None)
        if rate is not None:
            factor = rate_factor(getattr(section, side), section, number, num_rounds)
            rates[f"{side}_learning_rate"] = rate * factor
    return rule.model_copy(update=rates)


def warn_of_idle_schedule(rule: Algorithm, section: ScheduleSection) -> None:
    """Warn of a schedule for a step size that the rule finds by itself."""
    for side in _SIDES:
        schedule = getattr(section, side)
        if schedule != "constant" and f"{side}_learning_rate" not in type(rule).model_fields:
            warnings.warn(
                f"schedule.{side}: got {schedule!r}; {rule.name} has no {side}_learning_rate, so "
                "it changes nothing; leave it at 'constant'",
                FedoptWarning,
                stacklevel=2,
            )

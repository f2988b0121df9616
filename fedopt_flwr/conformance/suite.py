"""Which checks there are for a rule, and what came of each."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from pydantic import ValidationError

from ..algorithm import Algorithm
from ..errors import ConfigError, validation_problems

Kind = type[Algorithm]


class Failed(Exception):
    """A check that does not hold; the text says what was expected and what was seen."""


@dataclass(frozen=True)
class Check:
    """One property: `applies` says to which rules, `run` raises Failed."""

    name: str
    applies: Callable[[Kind], bool]
    run: Callable[[Kind], None]


@dataclass(frozen=True)
class Outcome:
    """What came of one check; `note` is empty unless it failed."""

    check: str
    verdict: Literal["passed", "failed", "not applicable"]
    note: str = ""


def require(condition: bool, text: str) -> None:
    """Raise Failed with this text unless the condition holds."""
    if not condition:
        raise Failed(text)


def run_check(name: str, run: Callable[[], None]) -> Outcome:
    """Run one check; an exception of what is checked is a failure too."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run()
    except Failed as failure:
        return Outcome(name, "failed", str(failure))
    except Exception as error:
        return Outcome(name, "failed", f"{type(error).__name__}: {error}")
    return Outcome(name, "passed")


def verify_rule(kind: Kind) -> list[Outcome]:
    """Return the outcome of every check for a rule."""
    try:
        kind()
    except ValidationError as error:
        problems = validation_problems(error, kind, lambda key: kind.name)
        raise ConfigError(f"{problems}; give every hyperparameter a default") from None
    from .closed_forms import CLOSED_FORMS
    from .known_steps import KNOWN_STEPS
    from .momentum import MOMENTUM
    from .properties import PROPERTIES

    return [
        run_check(check.name, partial(check.run, kind))
        if check.applies(kind)
        else Outcome(check.name, "not applicable")
        for check in (*PROPERTIES, *MOMENTUM, *CLOSED_FORMS, *KNOWN_STEPS)
    ]

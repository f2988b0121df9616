"""What a check is, and what comes of one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..algorithm import Algorithm

Kind = type[Algorithm]


class Failed(Exception):
    """A check that does not hold; the text says what was expected and what was seen."""


@dataclass(frozen=True)
class Check:
    """One property: `applies` says to which rules, `run` raises Failed."""

    name: str
    applies: Callable[[Kind], bool]
    run: Callable[[Kind], None]


def check(
    name: str, applies: Callable[[Kind], bool] = lambda kind: True
) -> Callable[[Callable[[Kind], None]], Check]:
    """Return a decorator that makes a function a check of that name, of any rule by default."""
    return lambda run: Check(name, applies, run)


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


def has_field(name: str) -> Callable[[Kind], bool]:
    """Return a test of whether a rule has this hyperparameter."""
    return lambda kind: name in kind.model_fields


def is_named(*names: str) -> Callable[[Kind], bool]:
    """Return a test of whether a rule is one of these, for formulas of one paper."""
    return lambda kind: kind.name in names


def keeps_control_variates(kind: Kind) -> bool:
    """Return whether a rule's clients keep c_i."""
    return "control_variate" in kind.client_state

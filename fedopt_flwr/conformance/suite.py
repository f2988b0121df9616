"""Every check of a rule.

Checks of `properties` are for any rule, most others for rules with a certain field or state; those
that write out one paper's formula name the rules that they are for.
"""

from __future__ import annotations

from functools import partial

from pydantic import ValidationError

from ..errors import ConfigError
from ..problems import validation_problems
from .adaptive import ADAPTIVE
from .checks import Kind, Outcome, run_check
from .control_variates import CONTROL_VARIATES
from .momentum import MOMENTUM
from .properties import PROPERTIES
from .step_lengths import STEP_LENGTHS

CHECKS = (*PROPERTIES, *CONTROL_VARIATES, *MOMENTUM, *STEP_LENGTHS, *ADAPTIVE)


def verify_rule(kind: Kind) -> list[Outcome]:
    """Return the outcome of every check; ConfigError if a hyperparameter has no default."""
    try:
        kind()
    except ValidationError as error:
        problems = validation_problems(error, kind, lambda key: kind.name)
        raise ConfigError(f"{problems}; give every hyperparameter a default") from None
    return [
        run_check(check.name, partial(check.run, kind))
        if check.applies(kind)
        else Outcome(check.name, "not applicable")
        for check in CHECKS
    ]

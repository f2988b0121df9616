"""Every check of a rule.

Checks of `properties` are for any rule, those of `traits` for rules with a certain state or
hyperparameter; those of `formulas` write out one paper's and name the rules that they are for.
"""

from __future__ import annotations

from functools import partial

from ..errors import ConfigError
from . import formulas, properties, traits
from .checks import Check, Kind, Outcome, run_check

CHECKS = [
    found
    for module in (properties, traits, formulas)
    for found in vars(module).values()
    if isinstance(found, Check)
]


def verify_rule(kind: Kind) -> list[Outcome]:
    """Return the outcome of every check; ConfigError if a hyperparameter has no default."""
    required = [name for name, field in kind.model_fields.items() if field.is_required()]
    if required:
        raise ConfigError(f"{kind.name}.{required[0]}: has no default; give every field a default")
    return [
        run_check(check.name, partial(check.run, kind))
        if check.applies(kind)
        else Outcome(check.name, "not applicable")
        for check in CHECKS
    ]

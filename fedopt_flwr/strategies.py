"""A Flower strategy for every rule: for your own ServerApp, with your module and functions.

    strategy = PAdaMFed(Net(), num_clients=10, clients_per_round=5, num_rounds=50, local_steps=10)
    ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=50))

Every class takes `model`, an nn.Module whose parameters are where training starts; its rule's
hyperparameters with the rule's defaults; and the keywords of `StrategyOptions`, N, S and T among
them. `Strategy(rule, model, ...)` does the same for a rule that you made, also one of your own.
`num_rounds` must be that of the ServerConfig. Raises ConfigError with all that is wrong. After a
run `strategy.model.module` is the server's model, `strategy.rounds` the records.
"""

from __future__ import annotations

import inspect
import sys
from inspect import Parameter
from typing import Any, ClassVar

from pydantic import ValidationError
from torch import nn

from . import algorithms
from .algorithm import Algorithm
from .errors import ConfigError, FedoptError
from .flower.app_strategy import REQUIRED_OPTIONS, option_defaults
from .flower.app_strategy import Strategy as Strategy
from .flower.app_strategy import StrategyOptions as StrategyOptions
from .problems import collected, raise_together, validation_problems


class RuleStrategy(Strategy):
    """A strategy whose rule is named by its class: `kind` is all that a subclass says."""

    kind: ClassVar[type[Algorithm]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "kind" in cls.__dict__:  # help() and completion show the rule's own arguments
            title = (sys.modules[cls.kind.__module__].__doc__ or "").partition("\n")[0]
            cls.__doc__ = f"{title}\n\n{inspect.cleandoc(cls.kind.__doc__ or '')}"
            cls.__signature__ = _signature(cls.kind)  # type: ignore[attr-defined]

    def __init__(self, model: nn.Module, **arguments: Any) -> None:
        own = {key: arguments.pop(key) for key in self.kind.model_fields if key in arguments}
        errors: list[FedoptError] = []  # of rule and options, to be reported together
        with collected(errors):
            self._read_options(arguments)
        try:
            rule = self.kind(**own)
        except ValidationError as error:
            problems = validation_problems(error, self.kind, lambda key: self.kind.name)
            errors.insert(0, ConfigError(problems))
        raise_together(errors)
        super().__init__(rule, model, **arguments)


def _signature(kind: type[Algorithm]) -> inspect.Signature:
    defaults = {name: field.default for name, field in kind.model_fields.items()}
    defaults |= dict.fromkeys(REQUIRED_OPTIONS, Parameter.empty) | option_defaults()
    keywords = [Parameter(n, Parameter.KEYWORD_ONLY, default=d) for n, d in defaults.items()]
    return inspect.Signature([Parameter("model", Parameter.POSITIONAL_OR_KEYWORD), *keywords])


class FedAvg(RuleStrategy):
    kind = algorithms.FedAvg


class FedProx(RuleStrategy):
    kind = algorithms.FedProx


class FedAvgM(RuleStrategy):
    kind = algorithms.FedAvgM


class FedNova(RuleStrategy):
    kind = algorithms.FedNova


class FedExP(RuleStrategy):
    kind = algorithms.FedExP


class FedDyn(RuleStrategy):
    kind = algorithms.FedDyn


class MimeLite(RuleStrategy):
    kind = algorithms.MimeLite


class FedAdagrad(RuleStrategy):
    kind = algorithms.FedAdagrad


class FedAdam(RuleStrategy):
    kind = algorithms.FedAdam


class FedYogi(RuleStrategy):
    kind = algorithms.FedYogi


class FedAMS(RuleStrategy):
    kind = algorithms.FedAMS


class FedAvgWithMomentum(RuleStrategy):
    kind = algorithms.FedAvgWithMomentum


class FedAvgWithMomentumVR(RuleStrategy):
    kind = algorithms.FedAvgWithMomentumVR


class Scaffold(RuleStrategy):
    kind = algorithms.Scaffold


class ScaffoldM(RuleStrategy):
    kind = algorithms.ScaffoldM


class ScaffoldMVR(RuleStrategy):
    kind = algorithms.ScaffoldMVR


class PAdaMFed(RuleStrategy):
    kind = algorithms.PAdaMFed


class PAdaMFedVR(RuleStrategy):
    kind = algorithms.PAdaMFedVR


class PAdaMFedDoG(RuleStrategy):
    kind = algorithms.PAdaMFedDoG


class AutoFed(RuleStrategy):
    kind = algorithms.AutoFed


class FedSPS(RuleStrategy):
    kind = algorithms.FedSPS


class DeltaSGD(RuleStrategy):
    kind = algorithms.DeltaSGD


class FedMoS(RuleStrategy):
    kind = algorithms.FedMoS


class STEM(RuleStrategy):
    kind = algorithms.STEM


class LocalAdam(RuleStrategy):
    kind = algorithms.LocalAdam


class FANT(RuleStrategy):
    kind = algorithms.FANT


class FAdamGC(RuleStrategy):
    kind = algorithms.FAdamGC


class MBSTORM(RuleStrategy):
    kind = algorithms.MBSTORM

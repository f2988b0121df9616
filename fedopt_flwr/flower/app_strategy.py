"""Our strategies in anyone's ServerApp: the user's module and functions, no configuration file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, Required, TypedDict

import numpy as np
from flwr.common import FitRes, Parameters
from flwr.server.client_proxy import ClientProxy
from pydantic import ValidationError
from torch import nn

from ..algorithm import Algorithm
from ..config import FederationSection, RunConfig, TrainingSection
from ..errors import ConfigError, validation_problems
from ..metrics import RoundRecord
from ..vectors import FlatModel
from .messages import Instruction, Scalar, to_arrays
from .replies import own_metrics
from .strategy import FederatedStrategy

Metrics = dict[str, Scalar]
EvaluateFn = Callable[[int, list[np.ndarray], Metrics], tuple[float, Metrics] | None]


class StrategyOptions(TypedDict, total=False):
    """What every strategy of `fedopt_flwr.strategies` takes beside its own arguments.

    The three functions are Flower's: `evaluate_fn(round, arrays in state_dict order, {})` returns
    loss and metrics, `on_fit_config_fn(round)` what each client's `fit` finds in its config beside
    our own keys, `fit_metrics_aggregation_fn([(num_examples, metrics), ...])` the round's metrics.
    """

    num_clients: Required[int]  # N
    clients_per_round: Required[int]  # S
    num_rounds: Required[int]  # T
    seed: int  # 0
    sampler: Literal["uniform", "multinomial", "adaptive", "clustered"]
    warmup_rounds: int  # 4; of all clients, before `clustered` groups them
    local_steps: int  # 10 unless local_epochs is given
    local_epochs: int
    batch_size: int  # 32; 0 is the full local data
    weight_decay: float  # 0
    clip_norm: float  # 0: no limit
    gradient_momentum: float  # 0
    schedule: Mapping[str, Any]  # client, server, step_rounds, step_factor of [schedule]
    weighting: Literal["uniform", "examples"]  # the rule's own
    buffers: Literal["average", "local"]
    min_replies: int  # 1; with fewer a round moves nothing
    start_timeout: float  # 600 s to wait for all clients
    round_timeout: float  # s for the start pass; none if not given (for rounds: ServerConfig's)
    threads: int  # 1; intra-op threads of a client
    evaluate_fn: EvaluateFn
    on_fit_config_fn: Callable[[int], Metrics]
    fit_metrics_aggregation_fn: Callable[[list[tuple[int, Metrics]]], Metrics]
    on_round: Callable[[RoundRecord], None]


# __required_keys__ is empty where annotations are postponed, as the typing module documents
_REQUIRED = {"num_clients", "clients_per_round", "num_rounds"}
_FEDERATION = FederationSection.model_fields.keys() & StrategyOptions.__annotations__.keys()
_TRAINING = TrainingSection.model_fields.keys() & StrategyOptions.__annotations__.keys()


def make_rule(kind: type[Algorithm], hyperparameters: dict[str, Any]) -> Algorithm:
    """Return the rule; ConfigError names every hyperparameter that is wrong."""
    try:
        return kind(**hyperparameters)
    except ValidationError as error:
        raise ConfigError(validation_problems(error, kind, lambda key: kind.name)) from None


class AppStrategy(FederatedStrategy):
    """Base of `fedopt_flwr.strategies`; `rounds` holds the record of every round so far."""

    def __init__(
        self,
        kind: type[Algorithm],
        model: nn.Module,
        options: StrategyOptions,
        **hyperparameters: Any,
    ) -> None:
        for key in sorted(options.keys() - StrategyOptions.__annotations__.keys()):
            raise TypeError(f"{type(self).__name__}: unknown argument {key!r}")
        for key in sorted(_REQUIRED - options.keys()):
            raise TypeError(f"{type(self).__name__}: argument {key!r} is missing")
        given: dict[str, Any] = {**options}
        config = RunConfig(
            federation={key: given[key] for key in _FEDERATION if key in given},
            training={key: given[key] for key in _TRAINING if key in given},
            schedule=options.get("schedule", {}),
        )
        flat = FlatModel(model)
        template = Instruction.for_run(config, flat, (), 0)
        template = replace(template, model="", loss="")  # the user's apps hold them
        self.rounds: list[RoundRecord] = []
        self._also_on_round: Callable[[RoundRecord], None] = options.get("on_round", _ignore)
        self._evaluate_fn = options.get("evaluate_fn")
        self._fit_metrics = options.get("fit_metrics_aggregation_fn")
        super().__init__(
            make_rule(kind, hyperparameters),
            flat,
            config.federation,
            config.training,
            template=template,
            schedule=config.schedule,
            on_round=self._keep,
        )
        if "on_fit_config_fn" in options:
            self.extra_config = options["on_fit_config_fn"]

    def _keep(self, record: RoundRecord) -> None:
        self.rounds.append(record)
        self._also_on_round(record)

    def evaluate(self, server_round: int, parameters: Parameters) -> tuple[float, Metrics] | None:
        """Call the user's `evaluate_fn`, then publish the round's record."""
        outcome = None
        if self._evaluate_fn is not None:
            outcome = self._evaluate_fn(server_round, to_arrays(parameters), {})
        if outcome is not None:
            self.record.test_loss, accuracy = float(outcome[0]), outcome[1].get("accuracy")
            self.record.test_accuracy = None if accuracy is None else float(accuracy)
        super().evaluate(server_round, parameters)
        return outcome

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, Metrics]:
        parameters, metrics = super().aggregate_fit(server_round, results, failures)
        if self._fit_metrics is not None:
            counted = [
                (self.state.plan.num_examples[i], own_metrics(result))
                for i, result in sorted(((self.members.id_of(p), r) for p, r in results), key=_id)
                if i in self.record.clients
            ]
            metrics = self._fit_metrics(counted)
        return parameters, metrics


def _ignore(record: RoundRecord) -> None: ...


def _id(item: tuple[Any, FitRes]) -> Any:
    return item[0]

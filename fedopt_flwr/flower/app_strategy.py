"""Our strategies in anyone's ServerApp: the user's module and functions, no configuration file."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Required, TypedDict, Unpack

import numpy as np
from flwr.common import EvaluateIns, EvaluateRes, FitIns, FitRes, Parameters
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from torch import Tensor, nn

from ..algorithm import Algorithm
from ..algorithms import register
from ..config.run_config import RunConfig
from ..config.sections import FederationSection, ModelSection, TrainingSection
from ..errors import ConfigError
from ..models.weights import load_weights, plain_state
from ..rounds.record import DIAGNOSTICS, SPREADS, RoundRecord
from ..rounds.stopping import Stopping
from ..training.evaluation import Evaluation
from ..training.flat_model import FlatModel, copied
from ..training.metrics import Values, add_values
from .instruction import Instruction, local_rate
from .messages import Scalar, to_arrays
from .open_federation import make_ledger
from .strategy import FederatedStrategy

Metrics = dict[str, Scalar]
EvaluateFn = Callable[[int, list[np.ndarray], Metrics], tuple[float, Metrics] | None]


class SharedOptions(TypedDict, total=False):
    """What every strategy takes beside its own arguments, in both of Flower's APIs."""

    num_clients: Required[int | Literal["open"]]  # N
    clients_per_round: Required[int]  # S
    seed: int
    sampler: Literal["uniform", "multinomial", "adaptive", "clustered"]
    warmup_rounds: int  # of all clients, before `clustered` groups them
    over_sample: float  # so many times S are asked; the first S drawn that reply count
    local_steps: int  # 10 unless local_epochs is given
    local_epochs: int
    batch_size: int  # 0 is the full local data
    micro_batch_size: int  # examples that are computed at once; 0: all of a batch
    micro_batch_norm: bool  # batch norm may see micro-batches in the place of batches
    precision: Literal["float32", "bf16"]  # of outputs and loss; parameters are float32
    weight_decay: float
    clip_norm: float  # 0: no limit
    gradient_momentum: float
    schedule: Mapping[str, Any]  # client, server, step_rounds, step_factor of [schedule]
    stop: Mapping[str, Any]  # the keys of [stop]; later rounds then ask nobody
    weighting: Literal["uniform", "examples"]  # None: the rule's own
    buffers: Literal["average", "local"]
    local_parameters: Sequence[str]  # patterns of names of parameters that stay with each client
    local_learning_rate: float  # of those; the rule's client rate if not given
    min_replies: int  # with fewer a round moves nothing
    max_reply_norm: float  # L2, of each vector of a reply; one with a larger one fails
    min_clients: int  # that start an "open" federation; None: clients_per_round
    forget_after: int  # rounds that a client of an "open" one may be away; None: any number
    start_timeout: float  # s to wait for all clients
    threads: int  # intra-op threads of a client, and of the server's sums
    weights: Path | str | Mapping[str, Tensor]  # file or state_dict of the model: where it starts
    weights_prefix: str  # of the names in it that count, taken off
    weights_strict: bool  # it and the model must have the same names; True if not given
    fraction_evaluate: float  # of the clients, that evaluate after each round; 0 if not given
    on_round: Callable[[RoundRecord], None]


class StrategyOptions(SharedOptions, total=False):
    """What every strategy of `fedopt_flwr.strategies` takes beside its own arguments.

    The functions are Flower's: `evaluate_fn(round, arrays in state_dict order, {})` returns loss
    and metrics, `on_fit_config_fn(round)` what each client's `fit` finds in its config beside our
    own keys, `fit_metrics_aggregation_fn([(num_examples, metrics), ...])` the round's metrics; so
    do the other two for `fraction_evaluate` of the clients, which evaluate the model on their data.
    """

    num_rounds: Required[int]  # T
    round_timeout: float  # s for the start pass; none if not given (for rounds: ServerConfig's)
    evaluate_fn: EvaluateFn
    on_fit_config_fn: Callable[[int], Metrics]
    fit_metrics_aggregation_fn: Callable[[list[tuple[int, Metrics]]], Metrics]
    on_evaluate_config_fn: Callable[[int], Metrics]
    evaluate_metrics_aggregation_fn: Callable[[list[tuple[int, Metrics]]], Metrics]


# __required_keys__ is empty where annotations are postponed, as the typing module documents
REQUIRED_OPTIONS = ("num_clients", "clients_per_round", "num_rounds")
_FEDERATION = FederationSection.model_fields
_TRAINING = TrainingSection.model_fields
_OF_WEIGHTS = ("weights_prefix", "weights_strict")


def option_defaults() -> dict[str, Any]:
    """Return the options that may be left out, with their defaults."""
    fields = _FEDERATION | _TRAINING | ModelSection.model_fields  # weights
    names = [name for name in StrategyOptions.__annotations__ if name not in REQUIRED_OPTIONS]
    return {name: fields[name].default if name in fields else None for name in names}


class Strategy(FederatedStrategy):
    """Runs `rule` on `model`, whose parameters are where training starts and which is copied.

    Takes the keywords of `StrategyOptions`. `rounds` holds the record of every round so far, and
    `model.module` the server's model after a run; with `stop`, `stopped` says why it ended early,
    and `best` is the best model's state_dict. Raises ConfigError with all that is wrong.
    """

    def __init__(
        self, rule: Algorithm, model: nn.Module, **options: Unpack[StrategyOptions]
    ) -> None:
        config = self._read_options(options)
        register(type(rule))
        own, weights = copied(model), options.get("weights")
        if weights is not None:
            section = config.model
            strict = section.weights_strict
            load_weights(own, weights, section.weights_prefix, strict=strict, field="weights")
        flat = FlatModel(own, local=config.federation.local_parameters)
        template = Instruction.for_run(config, flat, (), 0, local_rate(config, rule))
        self.rounds: list[RoundRecord] = []
        self._stopping = Stopping(config.stop)
        self.best: Mapping[str, Tensor] | None = None
        self._also_on_round = options.get("on_round")
        self._evaluate_fn = options.get("evaluate_fn")
        self._fit_config = options.get("on_fit_config_fn")
        self._fit_metrics = options.get("fit_metrics_aggregation_fn")
        self._fraction = _fraction(options.get("fraction_evaluate", 0.0))
        self._evaluate_config = options.get("on_evaluate_config_fn")
        self._evaluate_metrics = options.get("evaluate_metrics_aggregation_fn")
        super().__init__(
            rule,
            flat,
            config,
            template=template.model_copy(
                update={"model": "", "loss": ""}
            ),  # the user's apps hold them
            on_round=self._keep,
            on_start=lambda rule, plan: self._stopping.catch_up([]),
            ledger=make_ledger(rule, None) if config.federation.is_open else None,
        )

    def _read_options(self, options: Mapping[str, Any]) -> RunConfig:
        known = StrategyOptions.__annotations__
        unknown = sorted(options.keys() - known.keys())
        missing = [key for key in REQUIRED_OPTIONS if key not in options]
        if unknown:
            raise TypeError(f"{type(self).__name__}: unknown argument {unknown[0]!r}")
        if missing:
            raise TypeError(f"{type(self).__name__}: argument {missing[0]!r} is missing")
        config = RunConfig(
            federation={key: options[key] for key in _FEDERATION if key in options},
            training={key: options[key] for key in _TRAINING if key in options},
            schedule=options.get("schedule") or {},
            stop=options.get("stop") or {},
            model={key: options[key] for key in _OF_WEIGHTS if key in options},
        )
        for key in _OF_WEIGHTS:
            if key in options and options.get("weights") is None:
                raise ConfigError(
                    f"{key}: got {options[key]!r} without weights, of which it speaks; give both"
                )
        if config.stop.metric in (*DIAGNOSTICS, *SPREADS):
            raise ConfigError(
                f"stop.metric: got {config.stop.metric!r}, which only a run of `fedopt` measures; "
                "name 'train_loss', 'test_loss' or a metric of evaluate_fn, which may not have "
                "that name"
            )
        return config

    @property
    def stopped(self) -> str | None:
        return self._stopping.reason

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        if self.stopped:  # Flower's loop cannot be left early
            return []
        return super().configure_fit(server_round, parameters, client_manager)

    def extra_config(self, round_number: int) -> Metrics:
        return {} if self._fit_config is None else self._fit_config(round_number)

    def _keep(self, record: RoundRecord) -> None:
        self.rounds.append(record)
        if self._stopping.hear(record):
            self.write_to_model()
            self.best = copy.deepcopy(plain_state(self.model.module))
        if self._also_on_round is not None:
            self._also_on_round(record)

    def evaluate(self, server_round: int, parameters: Parameters) -> tuple[float, Metrics] | None:
        """Call the user's `evaluate_fn`, then publish the round's record."""
        outcome = None
        if self.stopped:
            return None
        self.evaluated_since = time.perf_counter()
        if self._evaluate_fn is not None:
            outcome = self._evaluate_fn(server_round, to_arrays(parameters), {})
        if outcome is not None and not self.record.taken_back:
            values: Values = {}
            for name, value in outcome[1].items():
                add_values(values, name, value if isinstance(value, (int, float)) else None)
            found = Evaluation(float(outcome[0]), values)
            self.record.test_loss = found.loss
            self.record.test_accuracy = found.accuracy
            self.record.test_metrics = found.known
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
            answers = {self.members.id_of(proxy): result for proxy, result in results}
            num_examples = self.state.plan.num_examples
            # what a user's client reported beside, and of ours what a user may want to average
            reports = {
                i: {key: value for key, value in answers[i].metrics.items() if key != "arrays"}
                for i in self.record.clients
            }
            metrics = self._fit_metrics([(num_examples[i], own) for i, own in reports.items()])
        return parameters, metrics

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        """Ask a share of the clients that are here, at least one, drawn anew after each round."""
        if not self._fraction or self.stopped:
            return []
        here = sum(map(self.members.is_free, self.members.ids))
        count = max(1, int(self._fraction * here))
        chosen = self._participation.evaluators(self.record.round, count, self.members.is_free)
        config = self._evaluate_config(server_round) if self._evaluate_config else {}
        instructed = self._instruct("evaluate", chosen, {})  # which of its own parts count
        return [(p, EvaluateIns(parameters, {**config, **ins.config})) for p, ins in instructed]

    def aggregate_evaluate(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, EvaluateRes]],
        failures: list[tuple[ClientProxy, EvaluateRes] | BaseException],
    ) -> tuple[float | None, Metrics]:
        """Return the mean loss, weighted by examples, and what the user's function makes of the
        metrics; summed in the order of client ids."""
        found = {self.members.id_of(proxy): result for proxy, result in results}
        answers = [found[i] for i in self.members.ids if i in found and found[i].num_examples]
        total = sum(answer.num_examples for answer in answers)
        if not total:
            return None, {}
        loss = sum(answer.num_examples * answer.loss for answer in answers) / total
        own = [(answer.num_examples, answer.metrics) for answer in answers]
        return loss, self._evaluate_metrics(own) if self._evaluate_metrics else {}


def _fraction(value: float) -> float:
    if not 0 <= value <= 1:
        raise ConfigError(f"fraction_evaluate: got {value!r}; must be between 0 and 1")
    return value

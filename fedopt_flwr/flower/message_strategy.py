"""Our strategies in Flower's Message API: the same rounds, carried by messages to a grid's nodes.

What is asked and what is made of the answers is that of the other API's strategies; here their
instructions become messages, and replies become answers again.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Unpack

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, Metadata, MetricRecord
from flwr.server.client_proxy import ClientProxy
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy import Strategy as MessageApiStrategy
from torch import nn

from ..algorithm import Algorithm
from ..errors import ConfigError, FedoptWarning, MessageError
from ..models.weights import load_weights
from ..problems import foreign_text
from ..rounds.record import RoundRecord
from ..training.flat_model import copied
from . import app_strategy
from .app_strategy import SharedOptions
from .message_nodes import NOTHING, Nodes, evaluation, fit_result, instruction
from .message_records import averaged
from .strategy import FederatedStrategy

_LOG = logging.getLogger("flwr")  # as Flower's own summaries
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
OF_START = {  # options of the other strategies, and what takes their place here
    "num_rounds": "start(num_rounds=...)",
    "round_timeout": "start(timeout=...)",
    "evaluate_fn": "start(evaluate_fn=...)",
    "on_fit_config_fn": "start(train_config=...)",
    "on_evaluate_config_fn": "start(evaluate_config=...)",
    "fit_metrics_aggregation_fn": "the MetricRecords of your app, which are averaged by examples",
    "evaluate_metrics_aggregation_fn": (
        "the MetricRecords of your app, which are averaged by examples"
    ),
}


class OverMessages(MessageApiStrategy):
    """Carries the rounds of `inner` by messages to a grid's nodes, which must answer them as
    `message_client.answer` does. The model is `inner`'s: in Flower's loop there are no arrays."""

    _inner: FederatedStrategy

    def __init__(self, inner: FederatedStrategy) -> None:
        self._inner = inner

    def summary(self) -> None:
        """Log rule and hyperparameters."""
        rule = self._inner.rule
        _LOG.info("%s: %s", rule.name, rule.model_dump(exclude_none=True))

    def run(
        self,
        grid: Grid,
        num_rounds: int,
        timeout: float | None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
    ) -> Result:
        """Find all nodes, run the start pass of rules that have one, then Flower's loop.

        A round's replies count for `timeout` seconds, or None for however long they take.
        """
        self._nodes, self._timeout = Nodes(grid), timeout
        self._asked: list[tuple[Metadata, ClientProxy]] = []  # to train, in the current round
        self._inner.initialize_parameters(self._nodes)
        limit: Any = timeout  # only the grid's method reads it, which takes None too
        configs = (train_config, evaluate_config)
        return super().start(grid, self._arrays(), num_rounds, limit, *configs, self._close_round)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        asked = self._inner.configure_fit(server_round, NOTHING, self._nodes)
        messages = [
            instruction(proxy, ins, MessageType.TRAIN, self._timeout, config=config)
            for proxy, ins in asked
        ]
        # a message has its id only once it is sent
        self._asked = [(m.metadata, proxy) for m, (proxy, _) in zip(messages, asked, strict=True)]
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the server's model and the metrics of the replies that count, averaged by
        examples."""
        found = {reply.metadata.reply_to_message_id: reply for reply in replies}
        asked = {sent.message_id: proxy for sent, proxy in self._asked}
        answers = [(proxy, found[i]) for i, proxy in asked.items() if i in found]
        results = [(proxy, fit_result(reply)) for proxy, reply in answers]
        self._inner.aggregate_fit(server_round, results, [])
        counted = {*self._inner.record.clients}
        told = [reply for proxy, reply in answers if self._inner.members.id_of(proxy) in counted]
        metrics = averaged(told)
        # Flower's loop holds them until the next round's are there; a user's class may read them
        if type(self) is OverMessages and isinstance(replies, list):
            replies.clear()
        return self._arrays(), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return []  # `inner` asks when the round is closed, where that is due

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        return None

    def _close_round(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Evaluate, and publish the round's record."""
        found: Any = self._inner.evaluate(server_round, NOTHING)
        return None if found is None else MetricRecord({"loss": found[0], **found[1]})

    def _arrays(self) -> ArrayRecord:
        return ArrayRecord()


class Strategy(OverMessages):
    """Runs `rule` on `model`, whose parameters are where training starts and which is copied.

    Takes the keywords of `SharedOptions`. `rounds` holds the record of every round so far,
    `stopped` says why a run ended early, and `best` is the best model's state_dict, with `stop`.
    Nodes must answer queries and train with the functions of `fedopt_flwr.clientapp`. Raises
    ConfigError with all that is wrong.
    """

    _inner: app_strategy.Strategy

    def __init__(self, rule: Algorithm, model: nn.Module, **options: Unpack[SharedOptions]) -> None:
        self._prepare(
            lambda own, **given: app_strategy.Strategy(rule, own, **given), model, options
        )

    def _prepare(
        self,
        make: Callable[..., app_strategy.Strategy],
        model: nn.Module,
        options: Mapping[str, Any],
    ) -> None:
        for name, instead in OF_START.items():
            if name in options:
                raise TypeError(f"{type(self).__name__}: {name!r} is not for this API; {instead}")
        self._make, self._model, self._options = make, model, dict(options)
        self._evaluate_fn: EvaluateFn | None = None
        self._found: MetricRecord | None = None
        self._evaluators: list[tuple[Metadata, str]] = []  # instructions of this round, to whom
        super().__init__(make(model, **options, num_rounds=1))  # what is wrong is said now

    @property
    def rounds(self) -> list[RoundRecord]:
        return self._inner.rounds

    @property
    def stopped(self) -> str | None:
        return self._inner.stopped

    @property
    def best(self) -> Mapping[str, torch.Tensor] | None:
        return self._inner.best

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | Mapping[str, torch.Tensor],
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Find all nodes, run the start pass of rules that have one, then Flower's loop.

        `initial_arrays` must be a state_dict of the model, as such or as ArrayRecord, and with the
        option `weights` its own; `evaluate_fn(round, arrays)` returns a MetricRecord, of which
        "loss" and numbers beside it are in `rounds` too.
        """
        metric = (self._options.get("stop") or {}).get("metric")
        self._stops_on = None if metric == "train_loss" else metric
        if self._stops_on is not None and evaluate_fn is None:
            raise ConfigError(
                f"stop.metric: got {metric!r} without an evaluate_fn, which measures it; give one "
                "to start(), or name 'train_loss'"
            )
        self._evaluate_fn = evaluate_fn
        model = _loaded(self._model, initial_arrays)
        if self._options.get("weights") is not None:
            pairs = zip(model.state_dict().values(), self._model.state_dict().values(), strict=True)
            if not all(torch.equal(one, other) for one, other in pairs):
                raise ConfigError(
                    "initial_arrays: got others than the model's own, and the option weights says "
                    "where training starts as well; give model.state_dict(), or leave weights out"
                )
        given = {"round_timeout": timeout or "none", "evaluate_fn": self._measured}
        self._inner = self._make(model, **self._options, **given, num_rounds=num_rounds)
        result = self.run(grid, num_rounds, timeout or None, train_config, evaluate_config)
        result.arrays = self._arrays()  # the last round may have been taken back
        return result

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        if self.stopped:  # and so nobody was asked
            return self._arrays(), None
        return super().aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the server's model, as a state_dict, to those who are asked to evaluate it."""
        asked = self._inner.configure_evaluate(server_round, NOTHING, self._nodes)
        given: dict[str, Any] = {"config": config, "arrays": arrays}
        messages = [
            instruction(proxy, ins, MessageType.EVALUATE, self._timeout, **given)
            for proxy, ins in asked
        ]
        self._evaluators = [
            (m.metadata, proxy.cid) for m, (proxy, _) in zip(messages, asked, strict=True)
        ]
        return messages

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the means of the nodes' loss and metrics, weighted by examples; who failed is an
        error of the round's record, and where all did, a FedoptWarning."""
        found = {reply.metadata.reply_to_message_id: reply for reply in replies}
        # a subclass may send some of the messages, and others of its own
        asked = {sent.message_id: cid for sent, cid in self._evaluators if sent.message_id}
        for i, reply in found.items():
            asked.setdefault(i, str(reply.metadata.src_node_id))
        counted, errors = [], []
        for message_id, cid in asked.items():
            try:
                counted.append(evaluation(found.get(message_id)))
            except MessageError as error:
                own = {"client": self._inner.members.client_at(cid), "phase": "evaluate"}
                errors.append({**own, "error": foreign_text(error)})
        self._inner.record.errors += errors
        if errors and not counted:
            warnings.warn(
                f"fraction_evaluate: none of the {len(errors)} clients asked evaluated the model; "
                f"the first: {errors[0]['error']}",
                FedoptWarning,
                stacklevel=2,
            )
        return averaged(counted)

    def _close_round(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        self._found = None
        super()._close_round(server_round, arrays)
        return self._found

    def _measured(
        self, server_round: int, arrays: object, config: object
    ) -> tuple[float, dict[str, Any]] | None:
        if self._evaluate_fn is None:
            return None
        self._found = self._evaluate_fn(server_round, self._arrays())
        values = {k: v for k, v in (self._found or {}).items() if isinstance(v, (int, float))}
        if self._found is not None and self._stops_on is not None:
            self._require_measured(self._stops_on, values)
            self._stops_on = None  # it is known to be there
        return (values.pop("loss"), values) if "loss" in values else None

    def _require_measured(self, metric: str, values: Mapping[str, float]) -> None:
        key = {"test_loss": "loss", "test_accuracy": "accuracy"}.get(metric, metric)
        if "loss" not in values or key not in values or metric == "loss":
            raise ConfigError(
                f"stop.metric: got {metric!r}, and evaluate_fn returned numbers {sorted(values)}; "
                "must be 'test_loss' or one of those beside 'loss', without which none is "
                "recorded; return both, or name another"
            )

    def _arrays(self) -> ArrayRecord:
        self._inner.write_to_model()
        model = self._inner.model
        arrays = map(torch.from_numpy, model.state_arrays())  # ArrayRecord takes no bfloat16
        return ArrayRecord(dict(zip(model.module.state_dict(), arrays, strict=True)))


def _loaded(model: nn.Module, arrays: ArrayRecord | Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a copy of the model that holds these arrays; ConfigError if they are of another."""
    state = arrays.to_torch_state_dict() if isinstance(arrays, ArrayRecord) else arrays
    model, remedy = copied(model), "give those of model.state_dict()"
    load_weights(model, state, field="initial_arrays", remedy=remedy)
    return model

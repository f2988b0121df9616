"""Our strategies in Flower's Message API: the same rounds, carried by messages to a grid's nodes.

What is asked and what is made of the answers is that of `app_strategy`; here its instructions
become messages, and replies become answers again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common import (
    Code,
    EvaluateIns,
    FitIns,
    FitRes,
    GetPropertiesIns,
    GetPropertiesRes,
    Parameters,
    Status,
    ndarrays_to_parameters,
)
from flwr.server import SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy import Strategy as MessageApiStrategy
from torch import nn

from ..algorithm import Algorithm
from ..errors import ConfigError, MessageError
from ..problems import foreign_text
from ..rounds.record import RoundRecord
from ..training.flat_model import copied
from . import app_strategy
from .message_records import ARRAYS, CONFIG, NUM_EXAMPLES, PROPERTIES, REPORT, config_record, digest
from .messages import to_arrays

_LOG = logging.getLogger("flwr")  # as Flower's own summaries
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
_MOST = 1e30  # of a number that is averaged; NaN is no less
_NOTHING = Parameters([], "")
_OF_START = {  # options of the other strategies, and what takes their place here
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


class Strategy(MessageApiStrategy):
    """Runs `rule` on `model`, whose parameters are where training starts and which is copied.

    Takes the keywords of `fedopt_flwr.strategies.StrategyOptions` but for those that are `start`'s
    here. `rounds` holds the record of every round so far, `stopped` says why a run ended early, and
    `best` is the best model's state_dict, with `stop`. Nodes must answer queries and train with the
    functions of `fedopt_flwr.clientapp`. Raises ConfigError with all that is wrong.
    """

    def __init__(self, rule: Algorithm, model: nn.Module, **options: Any) -> None:
        self._prepare(
            lambda own, **given: app_strategy.Strategy(rule, own, **given), model, options
        )

    def _prepare(
        self,
        make: Callable[..., app_strategy.Strategy],
        model: nn.Module,
        options: Mapping[str, Any],
    ) -> None:
        for name, instead in _OF_START.items():
            if name in options:
                raise TypeError(f"{type(self).__name__}: {name!r} is not for this API; {instead}")
        self._make, self._model, self._options = make, model, dict(options)
        self._evaluate_fn: EvaluateFn | None = None
        self._found: MetricRecord | None = None
        self._nodes: _Nodes
        self._inner = make(model, **options, num_rounds=1)  # what is wrong is said now

    @property
    def rounds(self) -> list[RoundRecord]:
        return self._inner.rounds

    @property
    def stopped(self) -> str | None:
        return self._inner.stopped

    @property
    def best(self) -> Mapping[str, torch.Tensor] | None:
        return self._inner.best

    def summary(self) -> None:
        """Log rule and hyperparameters."""
        rule = self._inner.rule
        _LOG.info("%s: %s", rule.name, rule.model_dump(exclude_none=True))

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Find all nodes, run the start pass of rules that have one, then Flower's loop.

        `initial_arrays` must be a state_dict of the model; `evaluate_fn(round, arrays)` returns a
        MetricRecord, of which "loss" and numbers beside it are in `rounds` too.
        """
        self._evaluate_fn = evaluate_fn
        model = _loaded(self._model, initial_arrays)
        given = {"round_timeout": timeout or "none", "evaluate_fn": self._measured}
        self._inner = self._make(model, **self._options, **given, num_rounds=num_rounds)
        self._nodes = _Nodes(grid)
        self._inner.initialize_parameters(self._nodes)
        configs = (train_config, evaluate_config)
        return super().start(
            grid, self._arrays(), num_rounds, timeout, *configs, evaluate_fn=self._close_round
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        asked = self._inner.configure_fit(server_round, _NOTHING, self._nodes)
        return [_message(proxy, ins, MessageType.TRAIN, config) for proxy, ins in asked]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the server's model and the metrics of the replies that count, averaged by
        examples."""
        if self._inner.stopped:  # and so nobody was asked
            return self._arrays(), None
        answers = {reply.metadata.src_node_id: reply for reply in replies}
        known = {node: proxy for node, proxy in self._nodes.proxies.items() if node in answers}
        results = [(proxy, _fit_result(answers[node])) for node, proxy in known.items()]
        self._inner.aggregate_fit(server_round, results, [])  # type: ignore[arg-type]
        counted = {*self._inner.record.clients}
        told = [
            answers[node]
            for node, proxy in known.items()
            if self._inner.members.id_of(proxy) in counted
        ]
        return self._arrays(), _averaged(told)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        state = ndarrays_to_parameters(self._inner.model.state_arrays())
        asked = self._inner.configure_evaluate(server_round, state, self._nodes)
        return [_message(proxy, ins, MessageType.EVALUATE, config) for proxy, ins in asked]

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the means of the nodes' loss and metrics, weighted by examples."""
        return _averaged([reply for reply in replies if not reply.has_error()])

    def _close_round(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Evaluate, and publish the round's record."""
        self._found = None
        self._inner.evaluate(server_round, _NOTHING)
        return self._found

    def _measured(
        self, server_round: int, arrays: object, config: object
    ) -> tuple[float, dict[str, Any]] | None:
        if self._evaluate_fn is None:
            return None
        self._found = self._evaluate_fn(server_round, self._arrays())
        values = {k: v for k, v in (self._found or {}).items() if isinstance(v, (int, float))}
        return (values.pop("loss"), values) if "loss" in values else None

    def _arrays(self) -> ArrayRecord:
        self._inner.write_to_model()
        return ArrayRecord(self._inner.model.module.state_dict())


class _NodeProxy(ClientProxy):
    """One node of a grid, asked by messages."""

    def __init__(self, node_id: int, grid: Grid) -> None:
        super().__init__(str(node_id))
        self.node_id = node_id
        self._grid = grid

    def get_properties(
        self, ins: GetPropertiesIns, timeout: float | None, group_id: int | None
    ) -> GetPropertiesRes:
        content = RecordDict({CONFIG: ConfigRecord(dict(ins.config))})
        reply = self._ask(Message(content, self.node_id, MessageType.QUERY), timeout)
        try:
            told: dict[str, Any] = dict(
                _checked(reply, PROPERTIES).content.config_records[PROPERTIES]
            )
        except Exception as error:  # of what anyone may send
            status = Status(Code.GET_PROPERTIES_NOT_IMPLEMENTED, foreign_text(error))
            return GetPropertiesRes(status, {})
        return GetPropertiesRes(Status(Code.OK, ""), told)

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        return _fit_result(self._ask(_message(self, ins, MessageType.TRAIN), timeout))

    def _ask(self, message: Message, timeout: float | None) -> Message | None:
        return next(iter(self._grid.send_and_receive([message], timeout=timeout)), None)

    def _not_asked(self, *arguments: object, **options: object) -> Any:
        raise RuntimeError("the strategy never asks this of a node")

    get_parameters = evaluate = reconnect = _not_asked


class _Nodes(SimpleClientManager):
    """The nodes of a grid, as they are when they are asked for."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self._grid = grid
        self.proxies: dict[int, _NodeProxy] = {}

    def num_available(self) -> int:
        return len(self.all())

    def all(self) -> dict[str, ClientProxy]:
        here = list(self._grid.get_node_ids())
        self.proxies = {i: self.proxies.get(i) or _NodeProxy(i, self._grid) for i in here}
        return {proxy.cid: proxy for proxy in self.proxies.values()}


def _message(
    proxy: ClientProxy,
    ins: FitIns | EvaluateIns,
    kind: str,
    config: Mapping[str, Any] | None = None,
) -> Message:
    """Return an instruction as a message, with a user's own values beside it."""
    content = RecordDict(
        {
            ARRAYS: ArrayRecord(to_arrays(ins.parameters)),
            CONFIG: config_record({**(config or {}), **ins.config}),
        }
    )
    return Message(content, int(proxy.cid), kind)


def _checked(reply: Message | None, *records: str) -> Message:
    """Return a reply that holds these records; MessageError says why it is of no use."""
    if reply is None:
        raise MessageError("no answer")
    if reply.has_error():
        raise MessageError(f"its ClientApp failed: {reply.error.reason}")
    missing = [name for name in records if name not in reply.content]
    if missing:
        raise MessageError(
            f"its reply lacks {missing}; answer with the functions of fedopt_flwr.clientapp, and "
            "leave what they return in place"
        )
    return reply


def _fit_result(reply: Message | None) -> FitRes:
    """Return a node's reply as Flower's other API has it; what is wrong with it is its status."""
    try:
        content = _checked(reply, REPORT).content
        report: dict[str, Any] = dict(content.config_records[REPORT])
        arrays = content.array_records[ARRAYS].to_numpy_ndarrays()
        if report.pop("digest", None) != digest(arrays):
            raise MessageError(
                "its arrays were changed after it was trained, as mods do that clip, add noise or "
                "aggregate securely; this strategy takes in what the rule sent, and no such mod "
                "keeps its promise here; take it out of the ClientApp"
            )
        count = int(report.pop(NUM_EXAMPLES, 0))
    except Exception as error:  # of what anyone may send
        return FitRes(Status(Code.FIT_NOT_IMPLEMENTED, foreign_text(error)), _NOTHING, 0, {})
    return FitRes(Status(Code.OK, ""), ndarrays_to_parameters(arrays), count, report)


def _averaged(replies: Iterable[Message]) -> MetricRecord | None:
    """Return the mean of each metric over the replies that have it, weighted by examples."""
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    for reply in replies:
        for record in reply.content.metric_records.values():
            weight = record.get(NUM_EXAMPLES)
            if not isinstance(weight, (int, float)) or not 0 < weight < _MOST:
                continue  # whatever it is, one node's answer ends nothing
            for name, value in record.items():
                if name == NUM_EXAMPLES or not isinstance(value, (int, float)):
                    continue
                if abs(value) < _MOST:
                    sums[name] = sums.get(name, 0.0) + weight * value
                    weights[name] = weights.get(name, 0.0) + weight
    return MetricRecord({n: sums[n] / weights[n] for n in sums}) if sums else None


def _loaded(model: nn.Module, arrays: ArrayRecord) -> nn.Module:
    """Return a copy of the model that holds these arrays; ConfigError if they are of another."""
    model = copied(model)
    state = arrays.to_torch_state_dict()
    problems = []
    for name, own in model.state_dict().items():
        seen = tuple(state[name].shape) if name in state else "missing"
        if seen != tuple(own.shape):
            problems.append(
                f"initial_arrays: {name!r} is {seen}; the model's is {tuple(own.shape)}"
            )
    problems += [
        f"initial_arrays: {name!r} is none of the model's; give ArrayRecord(model.state_dict())"
        for name in state
        if name not in model.state_dict()
    ]
    if problems:
        raise ConfigError(problems)
    model.load_state_dict(state)
    return model

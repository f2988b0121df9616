"""Our clients in Flower's Message API: what a ClientApp's functions return."""

from __future__ import annotations

from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import nn

from ..algorithm import ClientId
from ..data import as_client_data, require_examples
from .app_client import Client, identity
from .instruction import Instruction
from .message_records import (
    ARRAYS,
    CONFIG,
    METRICS,
    NUM_EXAMPLES,
    PROPERTIES,
    REPORT,
    config_record,
    digest,
)
from .messages import PREFIX


def query(
    message: Message, context: Context, *, dataset: Any, client_id: ClientId | None = None
) -> Message:
    """Answer who this node is and how many examples it trains on.

    The id is `client_id`, the same as `train` is given, else `client-id` of the node config, else
    `partition-id`, which simulations give.
    """
    own, data = identity(client_id, context), as_client_data(dataset)
    require_examples({own: data})
    properties: dict[str, Any] = {"client_id": own, "num_examples": data.num_examples}
    return Message(RecordDict({PROPERTIES: ConfigRecord(properties)}), reply_to=message)


def train(
    message: Message, context: Context, *, model: nn.Module, dataset: Any, **options: Any
) -> Message:
    """Do what the strategy asks for: train on `dataset`, whatever the rule.

    `model` is copied; `options` are those of `fedopt_flwr.clients.Client`, such as `loss` and
    `device`. The client's state lies in `context.state`, or with `state_dir` on disk. Whatever
    fails is the reply's text, and the strategy's record of this client in this round.
    """
    client = Client(model, dataset, context=context, **options)
    arrays, count, report = client.fit(_arrays(message), _config(message))
    own: dict[str, Any] = {**report, NUM_EXAMPLES: count, "digest": digest(arrays)}
    content = RecordDict({ARRAYS: ArrayRecord(arrays), REPORT: config_record(own)})
    if "error" not in report:
        loss = float(report["loss"])
        content[METRICS] = MetricRecord({NUM_EXAMPLES: count, "train_loss": loss})
    return Message(content, reply_to=message)


def evaluate(
    message: Message, context: Context, *, model: nn.Module, dataset: Any, **options: Any
) -> Message:
    """Evaluate the server's model on `holdout`, or on `dataset` where none is given."""
    client = Client(model, dataset, context=context, **options)
    loss, count, metrics = client.evaluate(_arrays(message), _config(message))
    numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
    found = MetricRecord({NUM_EXAMPLES: count, "loss": loss, **numbers})
    return Message(RecordDict({METRICS: found}), reply_to=message)


def _arrays(message: Message) -> list[Any]:
    return message.content.array_records[ARRAYS].to_numpy_ndarrays()


def _config(message: Message) -> dict[str, Any]:
    """Return an instruction with its empty texts, which do not travel."""
    empty = dict.fromkeys((f"{PREFIX}{name}" for name in Instruction.model_fields), "")
    return {**empty, **message.content.config_records[CONFIG]}

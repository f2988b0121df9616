"""Our clients in Flower's Message API: what a ClientApp's functions return."""

from __future__ import annotations

from typing import Any

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from torch import nn

from ..algorithm import ClientId
from ..data import as_client_data, require_examples
from ..errors import MessageError
from .app_client import Client, identity
from .client import FederatedClient
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
    `partition-id`, which simulations give. `train` answers queries too, where `@app.query()` stands
    above it as well; this needs no model.
    """
    own, data = identity(client_id, context), as_client_data(dataset)
    require_examples({own: data})
    return _introduction(message, {"client_id": own, "num_examples": data.num_examples})


def train(
    message: Message, context: Context, *, model: nn.Module, dataset: Any, **options: Any
) -> Message:
    """Do what the strategy asks for: train on `dataset`, whatever the rule.

    `model` is copied; `options` are those of `fedopt_flwr.clients.Client`, such as `loss` and
    `device`, and `kind`, the class of a rule of your own, which a node that runs in a process of
    its own knows by that alone. The client's state lies in `context.state`, or with `state_dir` on
    disk. Whatever fails is the reply's text, and the strategy's record of this client in this
    round.
    """
    return answer(message, Client(model, dataset, context=context, **options))


def evaluate(
    message: Message, context: Context, *, model: nn.Module, dataset: Any, **options: Any
) -> Message:
    """Evaluate the server's model on `holdout`, or on `dataset` where none is given; `options` are
    those of `train`, also under a strategy of Flower's."""
    return answer(message, Client(model, dataset, context=context, **options))


def answer(message: Message, client: FederatedClient) -> Message:
    """Return what a client answers to a message of our strategies, of whatever type it is."""
    kind, content = message.metadata.message_type, message.content
    needed = [CONFIG] if kind == MessageType.QUERY else [CONFIG, ARRAYS]
    missing = [name for name in needed if name not in content]
    if missing:
        raise MessageError(
            f"the {kind} message lacks the records {missing}, has {sorted(content)}; send it with "
            "a strategy of fedopt_flwr.serverapp"
        )
    config: dict[str, Any] = dict(content.config_records[CONFIG])
    if kind == MessageType.QUERY:
        return _introduction(message, client.get_properties(config))
    arrays = content.array_records[ARRAYS].to_numpy_ndarrays()
    if any(name.startswith(PREFIX) for name in config):  # of which empty texts do not travel
        own = (f"{PREFIX}{name}" for name in Instruction.model_fields)
        config = dict.fromkeys(own, "") | config
    if kind == MessageType.EVALUATE and not config.get(f"{PREFIX}arrays"):
        return _evaluation(message, *client.evaluate(arrays, config))
    return _upload(message, *client.fit(arrays, config))


def _introduction(message: Message, properties: dict[str, Any]) -> Message:
    return Message(RecordDict({PROPERTIES: ConfigRecord(properties)}), reply_to=message)


def _upload(message: Message, arrays: list[Any], count: int, report: dict[str, Any]) -> Message:
    sent = ArrayRecord(arrays)
    own = {**report, NUM_EXAMPLES: count, "digest": digest(sent)}
    content = RecordDict({ARRAYS: sent, REPORT: config_record(own)})
    if "loss" in report:
        content[METRICS] = MetricRecord({NUM_EXAMPLES: count, "train_loss": report["loss"]})
    return Message(content, reply_to=message)


def _evaluation(message: Message, loss: float, count: int, metrics: dict[str, Any]) -> Message:
    numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
    found = MetricRecord({NUM_EXAMPLES: count, "loss": loss, **numbers})
    return Message(RecordDict({METRICS: found}), reply_to=message)

"""The nodes of a grid in Flower's Message API, as the clients that our strategies ask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.common import (
    Code,
    EvaluateIns,
    FitIns,
    FitRes,
    GetPropertiesIns,
    GetPropertiesRes,
    Parameters,
    Status,
)
from flwr.server import SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.serverapp import Grid

from ..errors import MessageError, RunError
from ..problems import foreign_text
from .members import NeverIntroducedError
from .message_records import (
    ARRAYS,
    CONFIG,
    NUM_EXAMPLES,
    PROPERTIES,
    REPORT,
    array_record,
    config_record,
    digest,
    encoded,
    require_named,
    weight_of,
)
from .messages import PHASE

NOTHING = Parameters([], "")
_CLOCKS_DIFFER = 3600.0  # seconds, by which a node's clock may be ahead of the server's
# Flower's codes of errors: a mod's, and what is said in the place of an app that may answer later
_MOD_REFUSED = 6
_NOT_BY_THE_APP = (3, 4, 5, 8)
_SECURE_AGGREGATION = "secaggplus_configs"  # a record of its server's, which its mods fail without
_NO_MODS = (
    "mods that clip, add noise or aggregate securely do so to models, and what travels here is "
    "what the rule sends, so they keep no promise; take them out of the ClientApp"
)


class Nodes(SimpleClientManager):
    """The nodes of a grid, as they are when they are asked for."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self._grid = grid
        self._proxies: dict[int, ClientProxy] = {}

    def num_available(self) -> int:
        return len(self.all())

    def all(self) -> dict[str, ClientProxy]:
        here = list(self._grid.get_node_ids())
        self._proxies = {i: self._proxies.get(i) or _NodeProxy(i, self._grid) for i in here}
        return {proxy.cid: proxy for proxy in self._proxies.values()}


class _NodeProxy(ClientProxy):
    """One node of a grid, asked by messages."""

    def __init__(self, node_id: int, grid: Grid) -> None:
        super().__init__(str(node_id))
        self._grid = grid

    def get_properties(
        self, ins: GetPropertiesIns, timeout: float | None, group_id: int | None
    ) -> GetPropertiesRes:
        content = RecordDict({CONFIG: ConfigRecord(dict(ins.config))})
        message = Message(content, int(self.cid), MessageType.QUERY, ttl=_lifetime(timeout))
        reply = self._ask(message, timeout)
        try:
            content = _checked(reply, PROPERTIES).content
            told: dict[str, Any] = dict(content.config_records[PROPERTIES])
        except Exception as error:  # of what anyone may send
            text = foreign_text(error)
            if reply is None or (reply.has_error() and reply.error.code in _NOT_BY_THE_APP):
                raise RunError(text) from error
            raise NeverIntroducedError(
                f"{text}; fix that; an app of your own answers queries with "
                "fedopt_flwr.clientapp.query, or train"
            ) from error
        return GetPropertiesRes(Status(Code.OK, ""), told)

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        evaluates = ins.config[PHASE] == "evaluate"
        kind = MessageType.EVALUATE if evaluates else MessageType.TRAIN
        return fit_result(self._ask(instruction(self, ins, kind, timeout), timeout))

    def _ask(self, message: Message, timeout: float | None) -> Message | None:
        return next(iter(self._grid.send_and_receive([message], timeout=timeout)), None)

    def _not_asked(self, *arguments: object, **options: object) -> Any:
        raise RuntimeError("the strategy never asks this of a node")

    get_parameters = evaluate = reconnect = _not_asked


def instruction(
    proxy: ClientProxy,
    ins: FitIns | EvaluateIns,
    kind: str,
    timeout: float | None,
    *,
    config: Mapping[str, Any] | None = None,
    arrays: ArrayRecord | None = None,
) -> Message:
    """Return an instruction as a message, with a user's own values beside it and, if they are
    given, other arrays than its own. Long after `timeout` seconds nobody is given it."""
    sent = array_record(ins.parameters) if arrays is None else arrays
    told = ConfigRecord({**(config or {}), **config_record(ins.config)})
    content = RecordDict({ARRAYS: sent, CONFIG: told})
    return Message(content, int(proxy.cid), kind, ttl=_lifetime(timeout))


def _lifetime(timeout: float | None) -> float | None:
    """Return for how long a message is delivered: until its reply would not count, by any clock."""
    return None if timeout is None else timeout + _CLOCKS_DIFFER


def fit_result(reply: Message | None) -> FitRes:
    """Return a node's reply as Flower's other API has it; what is wrong with it is its status."""
    try:
        content = _checked(reply, REPORT, ARRAYS).content
        report: dict[str, Any] = dict(content.config_records[REPORT])
        sent = content.array_records[ARRAYS]
        if report.pop("digest", None) != digest(sent):
            raise MessageError(f"its arrays were changed after it was trained; {_NO_MODS}")
        count = int(report.pop(NUM_EXAMPLES, 0))
        require_named(content)
    except Exception as error:  # of what anyone may send
        return FitRes(Status(Code.FIT_NOT_IMPLEMENTED, foreign_text(error)), NOTHING, 0, {})
    return FitRes(Status(Code.OK, ""), encoded(sent), count, report)


def evaluation(reply: Message | None) -> Message:
    """Return a node's evaluation; MessageError says why it is of no use."""
    found = _checked(reply)
    require_named(found.content)
    if not any(weight_of(record) for record in found.content.metric_records.values()):
        raise MessageError(
            f"its reply holds no MetricRecord with {NUM_EXAMPLES!r} above 0, by which metrics are "
            "averaged; return one"
        )
    return found


def _checked(reply: Message | None, *records: str) -> Message:
    """Return a reply that holds these records; MessageError says why it is of no use."""
    if reply is None:
        raise MessageError("no answer")
    if reply.has_error():
        reason = reply.error.reason or ""
        if reply.error.code == _MOD_REFUSED or _SECURE_AGGREGATION in reason:
            reason = f"{foreign_text(reason, 240)}; {_NO_MODS}"
        raise MessageError(f"it failed: {reason}")
    missing = [name for name in records if name not in reply.content]
    if missing:
        raise MessageError(
            f"its reply lacks {missing}; answer with the functions of fedopt_flwr.clientapp, and "
            "leave what they return in place"
        )
    return reply

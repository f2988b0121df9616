"""Our clients in anyone's ClientApp: the user's module, loss and data."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from flwr.app import Context
from torch import Tensor, nn
from torch.nn import functional

from ..algorithm import ClientId
from ..data import as_client_data, require_examples
from ..devices import pick_device
from ..errors import ConfigError, MessageError
from ..imports import function_of
from ..objectives import Loss, Metric
from ..vectors import FlatModel
from .client import FederatedClient, ModelPool
from .messages import Instruction, Scalar
from .state import ContextStates, DiskStates, MemoryStates


class _Trace(NamedTuple):
    """Buffers of a module before any client, and as the last client left them."""

    first: dict[str, Tensor]
    left: dict[str, Tensor]


# Apps may give all their clients one module: what one leaves in it is not where others start.
_TRACES: WeakKeyDictionary[nn.Module, _Trace] = WeakKeyDictionary()


class AppClient(FederatedClient):
    """Base of `fedopt_flwr.clients`: answers the strategy of the same rule.

    `dataset` is any map-style data set of (input, target) pairs; `loss(outputs, targets)` returns
    the mean over a batch. The id is `client_id`, else `client-id` or `partition-id` of the node
    config. What must outlive a message lies in `context.state`, or with `state_dir` on disk.
    """

    algorithm: ClassVar[str]

    def __init__(
        self,
        model: nn.Module,
        dataset: Any,
        *,
        context: Context | None = None,
        client_id: ClientId | None = None,
        loss: Loss = functional.cross_entropy,
        metric: Metric | None = None,
        device: str | torch.device | None = None,
        state_dir: Path | str | None = None,
    ) -> None:
        place = pick_device(str(device or "auto"), "device")
        data = as_client_data(dataset).on_device(place)
        identity = _identity(client_id, context)
        require_examples({identity: data})
        self._flat = flat = FlatModel(model, place)
        trace = _TRACES.get(model)
        if trace is not None and _equal(trace.left, flat.initial_buffers):
            flat.initial_buffers = trace.first
        loss = function_of("loss", loss)
        metric = None if metric is None else function_of("metric", metric)
        pool = ModelPool([flat], loss, model_name="", loss_name="", metric=metric)
        self._context, self._state_dir = context, state_dir
        super().__init__(identity, data, pool, MemoryStates())

    def fit(
        self, parameters: list[np.ndarray], config: dict[str, Scalar]
    ) -> tuple[list[np.ndarray], int, dict[str, Scalar]]:
        try:
            told = Instruction.from_config(config)
        except MessageError as error:
            return [], 0, {"error": str(error)}
        if told.algorithm != self.algorithm:
            text = f"the strategy runs {told.algorithm!r}, {type(self).__name__} {self.algorithm!r}"
            return [], 0, {"error": f"{text}; take the client of that rule"}
        if self._state_dir is not None:
            self._states = DiskStates(Path(self._state_dir) / f"run-{told.run}")
        elif self._context is not None:
            self._states = ContextStates(self._context.state, told.run)
        try:
            return super().fit(parameters, config)
        finally:
            self._leave_trace()

    def evaluate(
        self, parameters: list[np.ndarray], config: dict[str, Scalar]
    ) -> tuple[float, int, dict[str, Scalar]]:
        try:
            return super().evaluate(parameters, config)
        finally:
            self._leave_trace()

    def _leave_trace(self) -> None:
        _TRACES[self._flat.module] = _Trace(self._flat.initial_buffers, self._flat.read_buffers())


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _identity(client_id: ClientId | None, context: Context | None) -> ClientId:
    node: dict[str, Any] = {} if context is None else dict(context.node_config)
    for named in (client_id, node.get("client-id"), node.get("partition-id")):
        if named is not None:
            return int(named) if isinstance(named, str) and named.isdecimal() else named
    raise ConfigError(
        "client_id: none given, and the node config has neither client-id nor partition-id; pass "
        "client_id or a context that has one"
    )

"""Our clients in anyone's ClientApp: the user's module, loss and data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from flwr.app import Context
from torch import nn
from torch.nn import functional

from ..algorithm import Algorithm, ClientId
from ..algorithms import register
from ..data import Loading, as_client_data, require_examples
from ..errors import ConfigError, MessageError
from ..own_code import function_of
from ..training.calling import Loss
from ..training.devices import pick_device
from ..training.flat_model import FlatModel, copied
from ..training.metrics import Metric
from .client import FederatedClient
from .instruction import Instruction
from .pool import ModelPool
from .state import ContextStates, DiskStates, MemoryStates


class Client(FederatedClient):
    """Answers a strategy of `fedopt_flwr.strategies`, whatever its rule; a subclass with `kind`
    answers that rule alone.

    `model` is copied, so several clients may be given the same module; `dataset` is any map-style
    data set of (input, target) pairs, or an IterableDataset with a length, of which `collate` makes
    batches and `loader_workers` processes read them, as torch's DataLoader does;
    `loss(outputs, targets)` returns the mean over a batch, `metric(outputs, targets)` a number, or
    a dict of numbers, of the whole of `holdout`, or of `dataset` where that is not given. The id
    is `client_id`, else `client-id` or `partition-id` of the node config. What must outlive a
    message lies in `context.state`, or with `state_dir` on disk; where that is lost the client
    fails, or with `state_lost="restart"` begins anew, where the federation is open. A rule of your
    own is known to the client once `kind`, of a subclass or given here, is its class.
    """

    kind: type[Algorithm] | None = None

    def __init__(
        self,
        model: nn.Module,
        dataset: Any,
        *,
        kind: type[Algorithm] | None = None,
        context: Context | None = None,
        client_id: ClientId | None = None,
        loss: Loss = functional.cross_entropy,
        metric: Metric | None = None,
        holdout: Any | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        loader_workers: int = 0,
        device: str | torch.device | None = None,
        state_dir: Path | str | None = None,
        state_lost: Literal["fail", "restart"] = "fail",
    ) -> None:
        if kind is not None and not (isinstance(kind, type) and issubclass(kind, Algorithm)):
            raise ConfigError(f"kind: got {kind!r}; must be a class of a rule; give it, not a rule")
        self.kind = kind or self.kind
        if self.kind is not None:
            register(self.kind)
        place = pick_device(str(device or "auto"), "device")
        function = None if collate is None else function_of("collate", collate)
        loading = Loading(function, loader_workers)
        data = as_client_data(dataset, loading).on_device(place)
        held = None if holdout is None else as_client_data(holdout, loading).on_device(place)
        own_id = identity(client_id, context)
        require_examples({own_id: data})
        loss = function_of("loss", loss)
        own = {} if metric is None else {"metric": function_of("metric", metric)}
        pool = ModelPool([FlatModel(copied(model), place)], loss, metrics=own)
        self._context = context
        self._local: tuple[str, ...] = ()
        self._state_dir = state_dir
        if state_lost not in ("fail", "restart"):
            raise ConfigError(f"state_lost: got {state_lost!r}; must be 'fail' or 'restart'")
        self.restarts = state_lost == "restart"
        super().__init__(own_id, data, pool, MemoryStates(), held)

    def prepare(self, instruction: Instruction) -> None:
        """Raise MessageError for another rule, or for a model that the server chose."""
        if self.kind is not None and instruction.algorithm != self.kind.name:
            raise MessageError(
                f"the strategy runs {instruction.algorithm!r}, {type(self).__name__} "
                f"{self.kind.name!r}; take the client of that rule"
            )
        if instruction.model or instruction.loss:
            raise MessageError(
                f"the server asks for model {instruction.model!r} and loss {instruction.loss!r}, "
                f"{type(self).__name__} brings its own; use it with a strategy of "
                "fedopt_flwr.strategies, or `fedopt client` with this server"
            )
        if instruction.local_patterns != self._local:
            with self._models.borrow() as model:  # this client's only one
                own = FlatModel(model.module, model.device, instruction.local_patterns)
            self._models = ModelPool([own], self._models.loss, metrics=self._models.metrics)
            self._local = instruction.local_patterns
        if self._state_dir is not None:
            self._states = DiskStates(Path(self._state_dir) / f"run-{instruction.run}")
        elif self._context is not None:
            self._states = ContextStates(self._context.state, instruction.run)


def identity(client_id: ClientId | None, context: Context | None) -> ClientId:
    """Return who a client is; ConfigError if nothing says so."""
    node: dict[str, Any] = {} if context is None else dict(context.node_config)
    for named in (client_id, node.get("client-id"), node.get("partition-id")):
        if named is not None:
            return int(named) if isinstance(named, str) and named.isdecimal() else named
    raise ConfigError(
        "client_id: none given, and the node config has neither client-id nor partition-id; pass "
        "client_id or a context that has one"
    )

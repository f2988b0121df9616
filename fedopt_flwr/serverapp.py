"""A strategy of Flower's Message API for every rule, under the names of `fedopt_flwr.strategies`.

    strategy = PAdaMFed(model, num_clients=10, clients_per_round=5, local_steps=10)
    result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=50)

`Strategy(rule, model, ...)` does the same for a rule that you made, also one of your own. N and S
are named at once, with the other keywords of `SharedOptions`; T is `start`'s `num_rounds`. The
nodes' half is `fedopt_flwr.clientapp`.
"""

from __future__ import annotations

from inspect import Signature, signature
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from . import strategies
from .flower.app_strategy import SharedOptions as SharedOptions
from .flower.message_strategy import OF_START
from .flower.message_strategy import Strategy as Strategy


class RuleStrategy(Strategy):
    """A strategy whose rule is named by its class: `other` is that of the older API."""

    other: ClassVar[type[strategies.RuleStrategy]]

    def __init__(self, model: nn.Module, **arguments: Any) -> None:
        self._prepare(self.other, model, arguments)


def _named(other: type[strategies.RuleStrategy]) -> type[RuleStrategy]:
    own = [p for p in signature(other).parameters.values() if p.name not in OF_START]
    contents: dict[str, Any] = {"other": other, "__doc__": other.__doc__, "__module__": __name__}
    contents["__signature__"] = Signature(own)  # help() and completion show these arguments
    return type(other.__name__, (RuleStrategy,), contents)


_CLASSES = {
    kind.__name__: _named(kind)
    for kind in strategies.RuleStrategy.__subclasses__()
    if kind.__module__ == strategies.__name__  # else a user's own, imported before
}
globals().update(_CLASSES)
__all__ = ["RuleStrategy", "Strategy", *_CLASSES]

if TYPE_CHECKING:

    def __getattr__(name: str) -> type[RuleStrategy]: ...

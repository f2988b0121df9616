"""What is recorded of a round, what a client sent in it, and the server's state after it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..algorithm import ClientId

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Snapshot:
    """All that the server needs to continue after `round` as if it had never stopped."""

    run: str  # names the run for clients that keep its state
    round: int
    vectors: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    versions: Mapping[ClientId, int]  # round of each client's last counted reply
    earlier: Sequence[Mapping[ClientId, int]] = ()  # those of the checkpoints kept before, in order
    # of an open federation: the last round before which each known client was there
    seen: Mapping[ClientId, int] = field(default_factory=dict)
    # its clients at the start and their examples, from which the rule's step sizes were derived
    first: Mapping[ClientId, int] = field(default_factory=dict)
    # what output.diagnostics takes over from round to round
    diagnosed: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Upload:
    """What one client sent, checked."""

    arrays: Mapping[str, Tensor]
    loss: float
    seconds: float


# with output.diagnostics
DIAGNOSTICS = ("global_train_loss", "gradient_norm", "drift", "control_norm", "gradient_cosine")
# with evaluation.on_clients: the metric, and what of its spread over the clients
SPREADS = {
    "worst_test_accuracy": ("accuracy", "worst"),
    "worst_test_loss": ("loss", "worst"),
    "client_accuracy_std": ("accuracy", "deviation"),
    "client_loss_std": ("loss", "deviation"),
}
MEASURES = ("train_loss", "test_loss", "test_accuracy", *DIAGNOSTICS, *SPREADS)
AFTERWARDS = ("evaluate", "diagnose")  # phases of errors that take no reply from a round
NOT_COUNTED = "not counted: "  # begins the error of a reply that is no failure of its client
# as this one does, where more clients are asked than count
TOO_LATE = f"{NOT_COUNTED}others replied before it (federation.over_sample)"
NOT_FINITE = "not finite"  # in the error of every reply or message with NaN or infinite values


@dataclass
class RoundRecord:
    """One round; the keys of rounds.jsonl. Round 0 is the start pass of rules that have one."""

    round: int
    clients: list[ClientId] = field(default_factory=list)  # whose reply was counted, sorted
    failures: int = 0  # asked and not counted
    taken_back: bool = False  # moved nothing: the server's state or test loss would not be finite
    train_loss: float | None = None  # mean minibatch loss, weighted by examples
    test_loss: float | None = None
    test_metric: float | None = None  # what model.metric measures
    test_accuracy: float | None = None  # the metric "accuracy", where it is measured
    test_metrics: dict[str, float] = field(default_factory=dict)  # all that have a value, by name
    # these five, and `each_client`, with output.diagnostics; docs/diagnostics.md has the formulas
    global_train_loss: float | None = None  # Σ p_i f_i(x)
    gradient_norm: float | None = None  # ‖∇f(x)‖
    drift: float | None = None  # mean ‖Δ_i − Δ̄‖ over the clients that counted
    control_norm: float | None = None  # ‖c‖, of rules whose clients keep a c_i
    gradient_cosine: float | None = None  # cos(x⁻ − x, ∇f(x⁻)), x⁻ the model before the round
    each_client: dict[str, dict[str, float | None]] | None = None  # by id: norms, losses, absence
    on_clients: dict[str, Any] | None = None  # what clients found on their held-out examples
    uplink_bytes: int = 0  # of encoded arrays, over all clients asked
    downlink_bytes: int = 0
    uplink_vectors: int = 0  # model-sized arrays, over all clients asked
    downlink_vectors: int = 0
    seconds: float = 0.0  # from the choice of clients to the new model, without the evaluation
    aggregation_seconds: float | None = None  # of these, from the last reply to the new model
    evaluation_seconds: float | None = None  # after them; not of fraction_evaluate
    client_seconds: float | None = None  # mean local work of a counted client
    seconds_by_client: dict[str, float] = field(default_factory=dict)  # of each one, by id
    examples_by_client: dict[str, int] = field(default_factory=dict)  # n_i of each one, by id
    chosen: dict[str, float] = field(default_factory=dict)  # step sizes of this round alone
    # of an open federation, before the round: joined, forgotten, resized, restarted
    members: dict[str, list[ClientId]] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)  # client, phase, error

    def to_dict(self) -> dict[str, Any]:
        # not `asdict`, which leaves a tuple of all fields in CPython's list of 2,000 free ones
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def count(
        self,
        asked: Sequence[ClientId],
        counted: Mapping[ClientId, Upload],
        num_examples: Mapping[ClientId, int],
    ) -> None:
        """Note who of those asked counted, their mean loss and their mean work."""
        self.clients = [i for i in asked if i in counted]
        self.failures = len(asked) - len(counted)
        if counted:
            total = sum(num_examples[i] for i in counted)
            self.train_loss = sum(u.loss * num_examples[i] for i, u in counted.items()) / total
            self.client_seconds = sum(u.seconds for u in counted.values()) / len(counted)
            self.seconds_by_client = {str(i): round(u.seconds, 4) for i, u in counted.items()}
            self.examples_by_client = {str(i): num_examples[i] for i in counted}

    def measured(self, name: str) -> float | None:
        """Return one of `MEASURES`, or the metric of that name; None where it has no value."""
        value: float | None
        if name in SPREADS:
            metric, key = SPREADS[name]
            found = self.on_clients or {}
            spread = found.get("own_spread") or found.get("spread", {})
            value = spread.get(metric, {}).get(key)
        elif name in MEASURES:
            value = getattr(self, name)
        else:
            value = self.test_metrics.get(name)
        return value

    @property
    def num_asked(self) -> int:
        return len(self.clients) + self.failures

    @property
    def num_late(self) -> int:
        """How many of `failures` are no failures: others replied first."""
        return sum(error["error"] == TOO_LATE for error in self.errors)

    @property
    def vectors_per_client(self) -> float:
        """V(t): vectors down and up for each participating client."""
        total = self.uplink_vectors + self.downlink_vectors
        return total / self.num_asked if self.num_asked else 0.0


def as_json(value: Any) -> Any:
    """Return plain values in which numbers that are not finite are None: JSON knows no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    return [as_json(item) for item in value] if isinstance(value, list) else value

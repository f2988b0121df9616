"""What is computed from the records of a run at its end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import takewhile
from operator import itemgetter
from typing import Any, NamedTuple

from ..config.sections import KNOWN_BETTER
from ..rounds.record import AFTERWARDS, NOT_FINITE, RoundRecord

_TOTALS = ("failures", "uplink_bytes", "downlink_bytes", "uplink_vectors", "downlink_vectors")
_DIVERGED = 20.0  # times the first loss
_AS_BEFORE = 0.9  # times the first test loss: no better than an untrained model
_FITS = 0.5  # times the first test loss: a training loss that low is of a model that learned


class Target(NamedTuple):
    """What a run should reach; in rows "0.9" is an accuracy and "loss 0.5" a test loss."""

    measure: str  # of KNOWN_BETTER
    value: float

    @property
    def key(self) -> str:
        names = {"test_accuracy": "", "test_loss": "loss "}
        return f"{names.get(self.measure, f'{self.measure} ')}{self.value:g}"

    @property
    def text(self) -> str:
        return f"{100 * self.value:g} %" if self.measure == "test_accuracy" else self.key

    @property
    def heading(self) -> str:
        return f"rounds to {self.text}"


def rounds_to_target(
    records: Sequence[RoundRecord], target: float, measure: str = "test_accuracy"
) -> int | None:
    """Return the first round whose measure (of KNOWN_BETTER) is as good as the target."""
    return next((n for n, reached in _reached(records, target, measure) if reached), None)


def holds_from(
    records: Sequence[RoundRecord], target: float, measure: str = "test_accuracy"
) -> int | None:
    """Return the first round from which every evaluated one reaches the target, or None."""
    evaluated = list(_reached(records, target, measure))
    held = [number for number, _ in takewhile(itemgetter(1), reversed(evaluated))]
    return held[-1] if held else None


def _reached(
    records: Sequence[RoundRecord], target: float, measure: str
) -> Iterator[tuple[int, bool]]:
    for record in records:
        value = record.measured(measure)
        if value is not None:
            is_higher = KNOWN_BETTER[measure] == "higher"
            yield record.round, value >= target if is_higher else value <= target


def diverged_at(records: Sequence[RoundRecord], initial_loss: float | None = None) -> int | None:
    """Return the round in which a run diverged, or None.

    That is the first with a loss that is not finite or 20 times its first value, or from which on
    numbers that are not finite kept every reply from counting: a single such round at the end of
    others may be the work of one client. Else, where the test loss had halved and ends as high as
    it began, it is the round from which it stayed above half. A test loss that grows while the
    model still fits the training data and predicts the test data is overfitting, however high it
    gets. `initial_loss`, or the test loss of round 0, is that of the untrained model.
    """
    first = {} if initial_loss is None else {"test_loss": initial_loss}
    tested = [(r.round, r.test_loss) for r in records if r.test_loss is not None]
    if tested:
        first.setdefault("test_loss", tested[0][1])
    overfits = _overfitting(records, first.get("test_loss", 0.0))
    lost = [record.round for record in takewhile(_is_lost, reversed(records))]
    for record in records:
        if record.round in lost and (len(lost) > 1 or len(records) == 1):
            return record.round
        for name in ("train_loss", "test_loss"):
            loss = getattr(record, name)
            if loss is None or (name == "train_loss" and record.round == 0):
                continue
            limit = _DIVERGED * first.setdefault(name, loss)
            if name == "test_loss" and math.isfinite(loss) and record.round in overfits:
                continue
            if not math.isfinite(loss) or (loss > limit and loss > 1):
                return record.round
    if not tested or tested[-1][1] < _AS_BEFORE * first["test_loss"] or tested[-1][0] in overfits:
        return None
    low = [number for number, loss in tested if loss < first["test_loss"] / 2]
    return next((number for number, _ in tested if number > low[-1]), None) if low else None


def _is_lost(record: RoundRecord) -> bool:
    """Whether numbers that are not finite are why a round moved nothing."""
    texts = [str(e["error"]) for e in record.errors if e.get("phase") not in AFTERWARDS]
    is_theirs = bool(texts) and all(NOT_FINITE in text for text in texts)
    return not record.clients and (record.taken_back or is_theirs)


def _overfitting(records: Sequence[RoundRecord], untrained_loss: float) -> set[int]:
    """Return the rounds in which a high test loss comes from confident mistakes alone.

    There the training loss is low, and of what the accuracy gained over chance less than half is
    lost again. Chance is that of an untrained model, exp(-cross-entropy).
    """
    rounds: set[int] = set()
    train_loss = math.inf
    best = 0.0
    chance = math.exp(-max(untrained_loss, 0.0)) if math.isfinite(untrained_loss) else 0.0
    for record in records:
        if record.round and record.train_loss is not None:
            train_loss = record.train_loss
        accuracy = record.test_accuracy
        best = max(best, accuracy or 0.0)
        predicts = accuracy is None or accuracy > (best + min(chance, best)) / 2
        if train_loss < _FITS * untrained_loss and predicts:
            rounds.add(record.round)
    return rounds


def summarize(
    records: Sequence[RoundRecord],
    vector_bytes: int,
    initial_loss: float | None = None,
    link_mbps: float = 100.0,
    client_seconds: float | None = None,
) -> dict[str, Any]:
    """Return the totals of a run; the keys of summary.json.

    SRT = Σ_t [τ_comp + τ_comm V(t)]: local work, `client_seconds` or as measured, and vectors over
    a link.
    """
    link_seconds = vector_bytes * 8 / (link_mbps * 1e6)  # τ_comm
    last = next((r for r in reversed(records) if r.test_loss is not None), RoundRecord(0))
    accuracies = [r.test_accuracy for r in records if r.test_accuracy is not None]
    return {
        "rounds": records[-1].round if records else 0,
        "final_test_loss": last.test_loss,
        "final_test_metric": last.test_metric,
        "final_test_accuracy": last.test_accuracy,
        "final_test_metrics": last.test_metrics,
        "final_on_clients": next((r.on_clients for r in reversed(records) if r.on_clients), None),
        "best_test_accuracy": max(accuracies, default=None),
        **{name: sum(getattr(record, name) for record in records) for name in _TOTALS},
        "late": sum(record.num_late for record in records),  # of the failures: others were first
        "gigabytes": sum(r.uplink_bytes + r.downlink_bytes for r in records) / 1e9,
        "vectors_per_client": [r.vectors_per_client for r in records],
        "simulated_seconds": sum(
            (r.client_seconds or 0.0 if client_seconds is None else client_seconds)
            + link_seconds * r.vectors_per_client
            for r in records
        ),
        "diverged_at": diverged_at(records, initial_loss),
        "link_mbps": link_mbps,
        "client_seconds": client_seconds,
        "seconds": sum(r.seconds for r in records),
    }

"""What each client did in one run: rounds, failures with their reason, norms where recorded."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...algorithm import ClientId
from ...problems import foreign_text
from ...rounds.record import NOT_COUNTED, TOO_LATE, RoundRecord
from ..plots.participation import Participation, participation_of
from ..reading import RecordedRun

MOST_ROWS = 300  # of the table
_MOST_CELLS = 1_000_000  # of all pictures of a page
_LONGEST_REASON = 240
# keys of each_client: heading, how the values of the rounds become one
_KEYS = {
    "examples": ("examples", "last"),
    "seconds": ("seconds, mean", "mean"),
    "update_norm": ("‖Δ_i‖, mean", "mean"),
    "drift": ("drift ‖Δ_i − Δ̄‖, mean", "mean"),
    "control_norm": ("‖c_i‖, last", "last"),
    "test_loss": ("test loss, last", "last"),
    "test_accuracy": ("test accuracy, last", "last"),
    "rounds_away": ("rounds away, most", "max"),
}
_PICTURES = {
    "update_norm": "Norm of the update, ‖Δ_i‖",
    "drift": "Drift from the mean update, ‖Δ_i − Δ̄‖",
    "control_norm": "Norm of the control variate, ‖c_i‖",
    "test_loss": "Test loss on the client",
    "test_accuracy": "Test accuracy on the client",
    "rounds_away": "Rounds since it last took part",
}
_PLACE = re.compile(r"^client [^,:]+, round [0-9]+: ")  # begins an error's text
_NUMBER = re.compile(r"[0-9][0-9.e+-]*")  # reasons that differ in their numbers alone are one


class Failure(NamedTuple):
    """How often a client failed, and the most frequent reason, as it was given last."""

    client: ClientId
    times: int
    reason: str
    of_reason: int  # how many of them had it


def failures_of(run: RecordedRun, phase: str = "train") -> list[Failure]:
    """Return who failed in a phase of the rounds, the most frequent first."""
    texts: dict[ClientId, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for record in run.rounds:
        for error in record.errors:
            if error["phase"] != phase or str(error["error"]).startswith(NOT_COUNTED):
                continue
            text = _PLACE.sub("", foreign_text(error["error"], _LONGEST_REASON))
            texts[error["client"]][_NUMBER.sub("", text)].append(text)
    found = []
    for client, kinds in texts.items():
        often = max(kinds.values(), key=len)
        found.append(Failure(client, sum(map(len, kinds.values())), often[-1], len(often)))
    return sorted(found, key=lambda f: (-f.times, _order(f.client)))


def _order(client: ClientId) -> tuple[bool, ClientId]:
    return isinstance(client, str), client


def clients_of(run: RecordedRun, examples: Sequence[int] | None, num_runs: int) -> dict[str, Any]:
    """Return the table of a run's clients and its pictures of them, for a page of that many runs.

    `examples` are n_i by client, where they are known; records have those of who took part.
    """
    cells = _MOST_CELLS // (num_runs * (2 + len(_PICTURES)))
    num_rows = min(100, max(20, cells // 400))
    found = participation_of(
        run.rounds,
        run.config.federation.num_clients,
        most_rows=num_rows,
        most_columns=max(40, min(400, cells // num_rows)),
    )
    return {
        "table": _table(run, examples, found.clients if found else []),
        "participation": _picture(found) if found else None,
        "values": [*_values(run, found)] if found else [],
    }


def _table(
    run: RecordedRun, examples: Sequence[int] | None, clients: Sequence[ClientId]
) -> dict[str, Any]:
    counted = Counter(client for r in run.rounds if r.round for client in r.clients)
    late = Counter(e["client"] for r in run.rounds for e in r.errors if e["error"] == TOO_LATE)
    failed = {failure.client: failure for failure in failures_of(run)}
    own = _by_client(run)
    everyone = sorted({*clients, *failed}, key=_order)
    for client in everyone:
        if examples and isinstance(client, int) and client < len(examples):
            own[str(client)].setdefault("examples", [examples[client]])
    keys = [key for key in _KEYS if any(key in values for values in own.values())]
    everyone.sort(key=lambda c: (-(failed[c].times if c in failed else 0), -counted[c]))
    rows = []
    for client in everyone[:MOST_ROWS]:
        failure = failed.get(client)
        reason = "" if failure is None else _told(failure)
        row: list[ClientId | float | None] = [
            client,
            counted[client],
            failure.times if failure else 0,
        ]
        row += [late[client]] if late else []
        row += [_summed(own[str(client)][key], _KEYS[key][1]) for key in keys]
        rows.append([*row, reason])
    headings = ["client", "rounds counted", "failed", *(["late"] if late else [])]
    headings += [*(_KEYS[key][0] for key in keys), "most frequent reason of failures"]
    return {"headings": headings, "rows": rows, "omitted": len(everyone) - len(rows)}


def _told(failure: Failure) -> str:
    is_one = failure.of_reason == failure.times
    return failure.reason if is_one else f"{failure.of_reason} times: {failure.reason}"


def _by_client(run: RecordedRun) -> dict[str, dict[str, list[float]]]:
    """Return the values of each key over the rounds, by client."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _, client, key, value in _each(run):
        found[client][key].append(value)
    return found


def _each(run: RecordedRun) -> Iterator[tuple[RoundRecord, str, str, float]]:
    """Yield what records hold of single clients; not every value is finite."""
    for record in run.rounds:
        for client, seconds in record.seconds_by_client.items():
            yield record, client, "seconds", seconds
        for client, count in record.examples_by_client.items():
            yield record, client, "examples", count
        for client, values in (record.each_client or {}).items():
            for key, value in values.items():
                if value is not None and math.isfinite(value):
                    yield record, client, key, value


def _summed(values: Sequence[float], how: str) -> float | None:
    if not values:
        return None
    number = {"last": values[-1], "max": max(values)}.get(how, statistics.fmean(values))
    return int(number) if float(number).is_integer() else float(f"{number:.5g}")


def _picture(found: Participation) -> dict[str, Any]:
    failed = [[int(row), int(column)] for row, column in np.argwhere(found.failed)]
    return {
        "clients": _row_names(found.clients, found.rows_each),
        "columns": _column_names(found),
        "first": found.first_round,
        "each": [found.rows_each, found.rounds_each],
        "counted": found.counted.tolist(),
        "failed": [[*place, int(found.failed[*place])] for place in failed],
    }


def _row_names(clients: Sequence[ClientId], each: int) -> list[str]:
    blocks = [clients[start : start + each] for start in range(0, len(clients), each)]
    shown = [[foreign_text(client, 40) for client in (b[0], b[-1])] for b in blocks]
    return [first if each == 1 else f"{first} to {last}" for first, last in shown]


def _column_names(found: Participation) -> list[str]:
    starts = range(found.counted.shape[1])
    each = found.rounds_each
    firsts = [found.first_round + each * column for column in starts]
    return [str(n) if each == 1 else f"{n} to {n + each - 1}" for n in firsts]


def _values(run: RecordedRun, found: Participation) -> Iterable[dict[str, Any]]:
    """Yield, of each key, means over the same blocks of clients and rounds."""
    rows = {str(client): row // found.rows_each for row, client in enumerate(found.clients)}
    shape = found.counted.shape
    sums = {key: np.zeros(shape) for key in _PICTURES}
    counts = {key: np.zeros(shape) for key in _PICTURES}
    for record, client, key, value in _each(run):
        column = (record.round - found.first_round) // found.rounds_each
        if key in sums and client in rows and 0 <= column < shape[1]:
            sums[key][rows[client], column] += value
            counts[key][rows[client], column] += 1
    for key, title in _PICTURES.items():
        if counts[key].any():
            known = counts[key] > 0
            means = np.where(known, sums[key] / np.maximum(counts[key], 1), np.nan)
            z = [[float(f"{v:.4g}") if v == v else None for v in row] for row in means.tolist()]
            yield {"key": key, "title": title, "z": z}

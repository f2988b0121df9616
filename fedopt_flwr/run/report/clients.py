"""What each client did in one run: rounds, failures with their reason, norms where recorded."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
    series = _series_of(run)
    return {
        "table": _table(run, series, examples, found.clients if found else []),
        "participation": _picture(found) if found else None,
        "values": [*_values(series, found)] if found else [],
    }


def _table(
    run: RecordedRun,
    series: Mapping[str, _Series],
    examples: Sequence[int] | None,
    clients: Sequence[ClientId],
) -> dict[str, Any]:
    counted = Counter(client for r in run.rounds if r.round for client in r.clients)
    late = Counter(e["client"] for r in run.rounds for e in r.errors if e["error"] == TOO_LATE)
    failed = {failure.client: failure for failure in failures_of(run)}
    own = {key: _summed(found, _KEYS[key][1]) for key, found in series.items()}
    everyone = sorted({*clients, *failed}, key=_order)
    for client in everyone:
        if examples and isinstance(client, int) and client < len(examples):
            own.setdefault("examples", {}).setdefault(str(client), examples[client])
    keys = [key for key in _KEYS if own.get(key)]
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
        row += [own[key].get(str(client)) for key in keys]
        rows.append([*row, reason])
    headings = ["client", "rounds counted", "failed", *(["late"] if late else [])]
    headings += [*(_KEYS[key][0] for key in keys), "most frequent reason of failures"]
    return {"headings": headings, "rows": rows, "omitted": len(everyone) - len(rows)}


def _told(failure: Failure) -> str:
    is_one = failure.of_reason == failure.times
    return failure.reason if is_one else f"{failure.of_reason} times: {failure.reason}"


class _Series(NamedTuple):
    """What records hold of single clients by one key; arrays of one length, round after round."""

    names: list[str]  # of all clients
    rounds: np.ndarray
    clients: np.ndarray  # places in `names`
    values: np.ndarray  # finite


def _series_of(run: RecordedRun) -> dict[str, _Series]:
    """Return the values of each key that has any. There may be millions of them."""
    found: dict[str, tuple[list[int], list[str], list[float | None]]] = {
        key: ([], [], []) for key in _KEYS
    }
    for record in run.rounds:
        for key, (rounds, clients, values) in found.items():
            own = _told_in(record, key)
            rounds += [record.round] * len(own)
            clients += own
            values += own.values()
    places: dict[str, int] = {}
    for _, clients, _ in found.values():
        places |= dict.fromkeys(clients, 0)
    places = {name: place for place, name in enumerate(places)}
    series = {}
    for key, (rounds, clients, values) in found.items():
        numbers = np.array(values, dtype=float)
        is_known = np.isfinite(numbers)
        if is_known.any():
            columns = np.array(rounds), np.array([places[name] for name in clients]), numbers
            series[key] = _Series([*places], *(column[is_known] for column in columns))
    return series


def _told_in(record: RoundRecord, key: str) -> Mapping[str, float | None]:
    """Return a round's values of a key by client."""
    if key == "seconds":
        return record.seconds_by_client
    if key == "examples":
        return record.examples_by_client
    every = (record.each_client or {}).items()
    return {client: values[key] for client, values in every if key in values}


def _summed(series: _Series, how: str) -> dict[str, float]:
    """Return the mean, the last or the greatest value of each client that has any."""
    result = np.full(len(series.names), -np.inf)
    if how == "max":
        np.maximum.at(result, series.clients, series.values)
    elif how == "last":
        result[series.clients] = series.values  # of values for one place the last stays
    else:
        counts = np.bincount(series.clients, minlength=len(result))
        totals = np.bincount(series.clients, series.values, minlength=len(result))
        result = np.where(counts, totals / np.maximum(counts, 1), -np.inf)
    told = zip(series.names, result.tolist(), strict=True)
    return {name: _short(number) for name, number in told if math.isfinite(number)}


def _short(number: float) -> float:
    return int(number) if number.is_integer() else float(f"{number:.5g}")


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


def _values(series: Mapping[str, _Series], found: Participation) -> Iterable[dict[str, Any]]:
    """Yield, of each key, means over the same blocks of clients and rounds."""
    rows = {str(client): row // found.rows_each for row, client in enumerate(found.clients)}
    height, width = found.counted.shape
    for key, title in _PICTURES.items():
        if key not in series:
            continue
        names, rounds, clients, values = series[key]
        row = np.array([rows.get(name, height) for name in names])[clients]
        column = (rounds - found.first_round) // found.rounds_each
        is_drawn = (row < height) & (column >= 0) & (column < width)
        block = (row * width + column)[is_drawn]
        counts = np.bincount(block, minlength=height * width)
        if counts.any():
            sums = np.bincount(block, values[is_drawn], minlength=height * width)
            means = np.where(counts, sums / np.maximum(counts, 1), np.nan).reshape(height, width)
            z = [[float(f"{v:.4g}") if v == v else None for v in row] for row in means.tolist()]
            yield {"key": key, "title": title, "z": z}

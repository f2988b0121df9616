"""Who took part when, whose reply was not counted, in federations of any size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from ...algorithm import ClientId
from ...rounds.record import NOT_COUNTED, RoundRecord
from . import look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_ROWS = 100
_MOST_COLUMNS = 400
_MOST_LISTED = 1_000_000  # clients that need not have taken part
_COUNTED = "#3B6FB6"
_GROUND = "#F1F1F1"
_FEWEST = 0.25  # how dark a block is in which one of many took part


class Participation(NamedTuple):
    """How often clients took part in blocks of clients and rounds; arrays are [rows, columns]."""

    clients: list[ClientId]
    first_round: int
    rows_each: int  # clients of a block
    rounds_each: int  # rounds of a block
    counted: np.ndarray
    failed: np.ndarray  # asked and not counted, without those that were only late

    @property
    def is_exact(self) -> bool:
        """Whether a block is one client in one round."""
        return self.rows_each == self.rounds_each == 1


def participation_of(
    rounds: Sequence[RoundRecord],
    num_clients: int | Literal["open"],
    *,
    most_rows: int = _MOST_ROWS,
    most_columns: int = _MOST_COLUMNS,
) -> Participation | None:
    """Return who took part in the rounds after the start pass, None where nobody was asked.

    Clients are those of the records and, where ids are numbers, all below `num_clients`, if those
    are not more than a million.
    """
    trained = [record for record in rounds if record.round]
    seen = {client for record in trained for client in record.clients}
    seen |= {error["client"] for record in trained for error in failures_in(record)}
    if not seen:
        return None
    if isinstance(num_clients, int) and all(isinstance(client, int) for client in seen):
        seen |= set(range(num_clients if num_clients <= _MOST_LISTED else 0))
    clients = sorted(seen, key=lambda client: (isinstance(client, str), client))
    rows = {client: row for row, client in enumerate(clients)}
    first, last = trained[0].round, trained[-1].round
    rows_each = math.ceil(len(clients) / most_rows)
    rounds_each = math.ceil((last - first + 1) / most_columns)
    shape = math.ceil(len(clients) / rows_each), (last - first) // rounds_each + 1
    counted, failed = np.zeros(shape, dtype=int), np.zeros(shape, dtype=int)
    for record in trained:
        column = (record.round - first) // rounds_each
        for client in record.clients:
            counted[rows[client] // rows_each, column] += 1
        for error in failures_in(record):
            failed[rows[error["client"]] // rows_each, column] += 1
    return Participation(clients, first, rows_each, rounds_each, counted, failed)


def failures_in(record: RoundRecord) -> list[dict[str, Any]]:
    """Return the errors of training that are failures of their clients: not those of sound replies
    that did not count, as others were first, too few, or spoilt the round."""
    own = [error for error in record.errors if error["phase"] == "train"]
    return [error for error in own if not str(error["error"]).startswith(NOT_COUNTED)]


def panel_inches(found: Participation) -> float:
    return min(max(1.0, 0.085 * len(found.counted)), 2.6)


def draw_participation(axes: Axes, found: Participation) -> None:
    """Draw a row for each client (or block of them), a column for each round (or some rounds)."""
    from matplotlib.colors import to_rgb
    from matplotlib.ticker import MaxNLocator

    height, width = found.counted.shape
    share = found.counted / max(found.counted.max(), 1)
    depth = np.where(found.counted > 0, _FEWEST + (1 - _FEWEST) * share, 0.0)[..., None]
    ground, full = np.array(to_rgb(_GROUND)), np.array(to_rgb(_COUNTED))
    picture = ground - depth * (ground - full)
    picture[found.failed > 0] = to_rgb(look.ALARM)
    left = found.first_round - 0.5
    extent = (left, left + width * found.rounds_each, height * found.rows_each - 0.5, -0.5)
    axes.imshow(picture, aspect="auto", interpolation="nearest", extent=extent)
    axes.set(title=_title(found), xlabel="round", ylabel="client")
    axes.grid(visible=False)
    if found.is_exact and height <= 40:  # a row stays a row where two neighbours took part
        axes.hlines(np.arange(height - 1) + 0.5, left, left + width, color="white", lw=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    if isinstance(found.clients[-1], str):
        _name_rows(axes, found)


def _title(found: Participation) -> str:
    total = int(found.failed.sum())
    failures = f"{total:,} replies failed" if total != 1 else "1 reply failed"
    failed = f"orange: {failures}" if total else "no reply failed"
    if found.is_exact:
        return f"Who took part; {failed}"
    block = f"{found.rows_each} clients in {found.rounds_each} rounds"
    return f"Who took part: a block is {block}, darker where more did; {failed}"


def _name_rows(axes: Axes, found: Participation) -> None:
    """Write names in the place of row numbers, or how many there are where they have no room."""
    if len(found.clients) > 30:
        axes.set_ylabel(f"{len(found.clients)} clients, by name")
        axes.set_yticks([])
        return
    names = [str(client) for client in found.clients]
    shown = [name if len(name) <= 14 else f"{name[:13]}…" for name in names]
    axes.set_yticks(range(len(names)), shown, size=min(8.0, 72 * 2.6 / len(names)))

"""The picture of one run: how it went, who took part, what it took."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...config.run_config import RunConfig
from ...rounds.record import RoundRecord
from . import look
from .axes import scale_of, seen_on, set_scale
from .curves import TEST_LOSS, TRAIN_LOSS, Measure, Trace, Unit, measure_of, so_far
from .participation import draw_participation, panel_inches, participation_of
from .subject import subject_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HALF_INCHES = 2.0  # height of a panel that has half of the width
_PARTS = [look.COLOURS[place] for place in (0, 3, 1, 2)]  # neighbours of unlike brightness
_GAP = 0.95  # inches between panels, for an axis above and a title below
Panel = Callable[["Axes"], None]


def draw_run(name: str, trace: Trace, config: RunConfig, path: Path, unit: Unit = "rounds") -> None:
    """Draw losses, the metric, who took part, seconds and bytes of one run; what it lacks is left
    out."""
    with look.drawing():
        look.save(run_figure(name, trace, config, unit), path)


def run_figure(name: str, trace: Trace, config: RunConfig, unit: Unit) -> Figure:
    """Return the picture; there must be at least one record."""
    from matplotlib.figure import Figure

    subject = subject_of([config])
    measure = measure_of(trace.rounds, config.model.metric)
    subtitle = textwrap.fill(f"{subject.setting}. {_outcome(trace, measure)}", 120)
    halves = _panels(trace, measure, unit)
    found = participation_of(trace.rounds, config.federation.num_clients)
    wide = panel_inches(found) if found else 0.0
    top = look.heading_inches(subtitle) + 0.45
    num_rows = (len(halves) + 1) // 2
    whole = top + num_rows * (_HALF_INCHES + _GAP) + (wide + _GAP - 0.25 if found else 0) - 0.45
    figure = Figure(figsize=(look.WIDTH, whole))
    look.write_heading(figure, f"{name} on {subject.data}", subtitle)
    for row in range(num_rows):
        own = halves[2 * row : 2 * row + 2]
        width = look.WIDTH / len(own) - 0.95
        for place, panel in enumerate(own):
            left = 0.75 + place * look.WIDTH / 2
            axes = look.place_axes(figure, left, top, width, _HALF_INCHES)
            panel(axes)
            axes.set_title(axes.get_title(loc="left"), pad=18)  # room for a key below it
        top += _HALF_INCHES + _GAP
        if row == 0 and found:
            axes = look.place_axes(figure, 0.75, top - 0.25, look.WIDTH - 0.95, wide)
            draw_participation(axes, found)
            top += wide + _GAP - 0.25
    return figure


def _outcome(trace: Trace, measure: Measure) -> str:
    last = trace.rounds[-1].round
    values = [value for r in trace.rounds if (value := measure.drawn(r)) is not None]
    ended = f"after round {last}" if trace.is_finished else f"so far, after round {last}"
    texts = [f"{measure.title} {measure.shown(values[-1])} {ended}" if values else ended]
    if trace.diverged_at is not None:
        texts.append(f"diverged in round {trace.diverged_at}")
    failures = sum(record.failures - record.num_late for record in trace.rounds)
    taken_back = sum(record.taken_back for record in trace.rounds)
    if taken_back:
        texts.append(f"{taken_back:,} rounds taken back")
    if failures:
        texts.append(f"{failures:,} failures")
    text = "; ".join(texts)
    return f"{text[0].upper()}{text[1:]}."


def _panels(trace: Trace, measure: Measure, unit: Unit) -> list[Panel]:
    """Return what is drawn in half of the width, but for what has no values."""
    rounds = trace.rounds
    losses = [m for m in (TRAIN_LOSS, TEST_LOSS, _GLOBAL_LOSS) if _values(rounds, m)]
    panels: list[Panel] = []
    if losses:
        panels.append(partial(_draw_measures, trace=trace, measures=losses, unit=unit))
    if measure not in losses and _values(rounds, measure):
        panels.append(partial(_draw_measures, trace=trace, measures=[measure], unit=unit))
    if _values(rounds, _GRADIENT):
        panels.append(partial(_draw_measures, trace=trace, measures=[_GRADIENT], unit=unit))
    panels.append(partial(_draw_seconds, rounds=rounds))
    if any(record.uplink_bytes + record.downlink_bytes for record in rounds):
        panels.append(partial(_draw_bytes, rounds=rounds))
    return panels


_GLOBAL_LOSS = Measure("global_train_loss", "Loss, all training data", "loss")
_GRADIENT = Measure("gradient_norm", "Norm of the whole gradient", "norm")


def _values(rounds: Sequence[RoundRecord], measure: Measure) -> list[tuple[int, float]]:
    """Return places in the records, and values there."""
    found = [(place, measure.drawn(record)) for place, record in enumerate(rounds)]
    return [(place, value) for place, value in found if value is not None]


def _draw_measures(axes: Axes, trace: Trace, measures: Sequence[Measure], unit: Unit) -> None:
    x = so_far(trace.rounds, unit)
    size, heading = scale_of(unit, x[-1])
    seen: list[float] = []
    for measure, colour in zip(measures, look.COLOURS, strict=False):
        places, values = zip(*_values(trace.rounds, measure), strict=True)
        dots = "o" if len(values) == 1 else None
        axes.plot(x[list(places)] / size, values, color=colour, label=measure.title, marker=dots)
        seen += [v for p, v in zip(places, values, strict=True) if not _is_after(trace, p)]
    kept = seen_on(seen, measures[0])
    if kept.size:
        set_scale(axes, kept.min(), kept.max(), measures[0])
    axes.set(xlabel=heading, title="Losses" if len(measures) > 1 else measures[0].title)
    axes.set_ylabel(measures[0].axis if len(measures) == 1 else "loss")
    if len(measures) > 1:
        _write_key_above(axes)
    _mark_divergence(axes, trace, x / size)


def _is_after(trace: Trace, place: int) -> bool:
    """Whether a record is of a run that had diverged: its losses must not stretch the axis."""
    return trace.diverged_at is not None and trace.rounds[place].round >= trace.diverged_at


def _mark_divergence(axes: Axes, trace: Trace, x: np.ndarray) -> None:
    for place, record in enumerate(trace.rounds):
        if record.round == trace.diverged_at:
            axes.axvline(x[place], color=look.ALARM, ls=":", lw=1.2)
            axes.annotate(
                " diverged",
                (x[place], 0.02),
                xycoords=("data", "axes fraction"),
                color=look.ALARM,
                size=8,
            )


def _draw_seconds(axes: Axes, rounds: Sequence[RoundRecord]) -> None:
    """Draw a client's own work, the rest of the round and, where it was recorded, the server's part
    of it and the evaluation after it, each above the one before."""
    trained = [record for record in rounds if record.round] or list(rounds)
    numbers = [float(record.round) for record in trained]
    if len(trained) == 1:  # an area has two ends
        trained, numbers = trained * 2, [numbers[0] - 0.5, numbers[0] + 0.5]
    seconds = np.array([record.seconds for record in trained])
    tops = {"a client, mean": np.array([record.client_seconds or 0.0 for record in trained])}
    server = np.array([record.aggregation_seconds or 0.0 for record in trained])
    after = np.array([record.evaluation_seconds or 0.0 for record in trained])
    tops["rest"] = seconds - server
    tops |= {"server": seconds} if server.any() else {}
    tops |= {"evaluation": seconds + after} if after.any() else {}
    whole, bottom = seconds + after, np.zeros(len(trained))
    for (label, top), colour in zip(tops.items(), _PARTS, strict=False):
        axes.fill_between(numbers, bottom, top, color=colour, lw=0, label=label)
        bottom = top
    usual = 1.6 * float(np.percentile(whole, 98))
    highest = float(whole.max())
    if highest > usual > 0:  # one slow round must not flatten the others
        place = numbers[int(whole.argmax())]
        axes.annotate(
            f"round {place:.0f}: {highest:.3g} s", (place, usual), va="top", ha="left", size=8
        )
    axes.set_ylim(0, min(highest, usual) * 1.05 or 1.0)
    axes.set_xlim(
        min(numbers[0], trained[0].round - 0.5), max(numbers[-1], trained[-1].round + 0.5)
    )
    _set_whole_ticks(axes)
    axes.set(xlabel="round", ylabel="seconds", title="Seconds of a round, by part")
    _write_key_above(axes)


def _draw_bytes(axes: Axes, rounds: Sequence[RoundRecord]) -> None:
    down = np.cumsum([record.downlink_bytes for record in rounds])
    up = np.cumsum([record.uplink_bytes for record in rounds])
    size, heading = scale_of("bytes", float((down + up)[-1]))
    numbers = [record.round for record in rounds]
    if len(numbers) == 1:  # an area has two ends
        numbers = [numbers[0] - 1, *numbers]
        down, up = (np.array([0, *sent]) for sent in (down, up))
    axes.fill_between(numbers, 0, down / size, color=look.COLOURS[0], lw=0, label="to the clients")
    both = (down + up) / size
    axes.fill_between(
        numbers, down / size, both, color=look.COLOURS[3], lw=0, label="from the clients"
    )
    axes.set_ylim(0, float(both[-1]) * 1.05)
    axes.set_xlim(numbers[0], max(numbers[-1], numbers[0] + 1))
    _set_whole_ticks(axes)
    title = f"Sent so far: {both[-1]:.3g} {heading.split()[0]}"
    axes.set(xlabel="round", ylabel=heading.split()[0], title=title)
    _write_key_above(axes)


def _set_whole_ticks(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _write_key_above(axes: Axes) -> None:
    """Write what the colours mean between title and axes, where nothing is drawn."""
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.02, 0.99), ncols=4, fontsize=8, borderaxespad=0
    )

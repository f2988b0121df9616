"""A page's first lines: what a person should know of these runs, in plain words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ...problems import foreign_text
from ..plots.curves import Curve, Measure, Trace, result_of, with_values
from ..plots.subject import in_words
from ..reading import RecordedRun
from .clients import Failure, failures_of
from .curves import Ranked

_NAMED = 5  # clients or runs of a sentence
_STILL_SHARE = 0.25  # of the rounds without a better value
_FEWEST_STILL = 5  # evaluations
_MOST_TOLD = 12  # runs that are told of one by one
# by phase of errors: what a client did not do, how many clients have a sentence
_FAILED = {
    "train": ("failed", _NAMED),
    "start": ("did not take part in the start pass", 1),
    "gradient": ("did not tell the gradient by which clients are grouped", 1),
    "evaluate": ("did not evaluate the model", 1),
    "diagnose": ("did not tell loss and gradient for the diagnostics", 1),
}


def summary_of(
    runs: Sequence[RecordedRun],
    names: Sequence[str],
    found: Ranked,
    failed: Sequence[tuple[str, str]] = (),
) -> list[str]:
    """Return sentences: of the comparison, then of each run that is worth one."""
    lines = [*_comparability(runs)]
    if len(found.curves) > 1:
        lines += _ranking(found, is_comparable=not lines)
    lines += [f"{name} could not be run: {error}" for name, error in failed]
    told = 0
    for run, name in zip(runs, names, strict=True):
        own = [*_of_run(run, found.main, is_alone=len(runs) == 1)]
        if own and told < _MOST_TOLD:
            lines += [text if len(runs) == 1 else f"{name}: {text}" for text in own]
        told += bool(own)
    if told > _MOST_TOLD:
        lines.append(f"{told - _MOST_TOLD} more runs have such remarks; see the tables.")
    return lines


def _comparability(runs: Sequence[RecordedRun]) -> Iterator[str]:
    """Say where values of different runs do not say which is better."""
    different = {
        "data": dict.fromkeys(run.config.data.name for run in runs),
        "metrics": dict.fromkeys(run.config.model.metric for run in runs),
        "losses": dict.fromkeys(run.config.model.loss for run in runs),
    }
    for what, values in different.items():
        if len(values) > 1:
            yield (
                f"These runs have different {what} ({in_words(values)}): the order does not say "
                "which is better."
            )


def _ranking(found: Ranked, *, is_comparable: bool) -> Iterator[str]:
    curves = with_values(found.curves, found.main)
    diverged = [c.name for c in curves if any(t.diverged_at is not None for t in c.traces)]
    results = [(curve.name, result_of(curve, found.main)) for curve in curves]
    known = [(n, value) for n, value in results if math.isfinite(value) and n not in diverged]
    if is_comparable and len(known) > 1 and found.main.is_known:
        what, shown = found.main.title.lower(), found.main.shown
        (first, best), (second, next_best) = known[:2]
        extreme = "lowest" if found.main.is_lower_better else "highest"
        others = " of those that did not diverge" if diverged else ""
        follows = f"{second} follows, {shown(next_best)}"
        if shown(best) == shown(next_best):
            follows = f"that of {second} is the same to these digits"
        yield f"{first} has the {extreme} {what}{others}, {shown(best)}; {follows}."
    if diverged:
        yield f"Diverged: {_some(diverged)}."


def _of_run(run: RecordedRun, main: Measure, *, is_alone: bool) -> Iterator[str]:
    if not run.rounds:
        yield "no round is over yet."
        return
    last, planned = run.rounds[-1].round, run.config.federation.num_rounds
    if is_alone:
        yield _outcome(run, main)
    elif not run.is_finished:
        yield f"not finished: {last} of {planned} rounds are over."
    if run.diverged_at is not None:
        yield (
            f"It diverged in round {run.diverged_at}: losses were no longer finite, 20 times the "
            "first, or again those of an untrained model."
        )
    taken_back = [str(record.round) for record in run.rounds if record.taken_back]
    if taken_back:
        what = "round was" if len(taken_back) == 1 else "rounds were"
        yield (
            f"{len(taken_back):,} {what} taken back, as the model or its loss would not have been "
            f"finite: {_some(taken_back)}."
        )
    yield from _stillness(run, main)
    yield from _clients(run)


def _outcome(run: RecordedRun, main: Measure) -> str:
    last, planned = run.rounds[-1].round, run.config.federation.num_rounds
    start = f"Not finished, at work or stopped on the way: {last} of {planned} rounds are over"
    if run.is_finished:
        start = f"Finished after round {last}"
    if run.stopped:
        start = f"Stopped {foreign_text(run.stopped)}"
    curves = with_values([Curve("", [Trace(run.rounds)])], main)
    value = f"; {main.title.lower()} {main.shown(result_of(curves[0], main))}" if curves else ""
    sent = sum(r.uplink_bytes + r.downlink_bytes for r in run.rounds) / 1e6
    seconds = sum(record.seconds for record in run.rounds)
    return f"{start}{value}; {_short(sent)} MB sent down and up; {_short(seconds)} s of rounds."


def _stillness(run: RecordedRun, main: Measure) -> Iterator[str]:
    """Say since when the main measure has not become better, if that is long."""
    if not main.is_known or run.diverged_at is not None:
        return
    values = [(r.round, v) for r in run.rounds if (v := main.drawn(r)) is not None]
    finite = [(number, value) for number, value in values if math.isfinite(value)]
    if not finite:
        return
    sign = 1 if main.is_lower_better else -1
    best_round, _ = min(finite, key=lambda item: sign * item[1])
    since = sum(number > best_round for number, _ in values)
    if since >= _FEWEST_STILL and run.rounds[-1].round - best_round >= _STILL_SHARE * max(
        run.rounds[-1].round, 1
    ):
        what = "accuracy has not risen" if main.is_error else f"{main.title.lower()} is not better"
        text = f"{what} since round {best_round}."
        yield f"{text[0].upper()}{text[1:]}"


def _clients(run: RecordedRun) -> Iterator[str]:
    for phase, (what, most) in _FAILED.items():
        failures = failures_of(run, phase)
        yield from (_failure(what, failure) for failure in failures[:most])
        if more := failures[most:]:
            total = sum(failure.times for failure in more)
            who = f"{len(more):,} more client{'s' if len(more) > 1 else ''}"
            yield f"{who} {what}, {_times(total)} in all."
    number = run.config.federation.num_clients
    counted = {client for record in run.rounds if record.round for client in record.clients}
    if isinstance(number, int) and counted and (missing := number - len(counted)) > 0:
        had_start = run.rounds[0].round == 0  # what all clients sent in it moves the model later
        what = "after the start pass" if had_start else "so the model knows nothing of their data"
        who = f"{missing:,} of {number:,} clients {'has' if missing == 1 else 'have'}"
        yield f"{who} not been counted in any round{' ' if had_start else ', '}{what}."


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _failure(what: str, failure: Failure) -> str:
    client, count, reason, of_reason = failure
    often = "" if of_reason == count else ", most often"
    end = "" if reason.endswith(("…", ".")) else "."
    return f"Client {client} {what} {_times(count)}{often}: {reason}{end}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED])
    return f"{shown} and {len(names) - _NAMED:,} more" if len(names) > _NAMED else shown

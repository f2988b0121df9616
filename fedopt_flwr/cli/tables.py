"""Rows of a comparison: means over seeds, the first rounds that reach a target, a table."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.table import Table

from ..algorithms import ALGORITHMS
from ..run.result import Outcome
from ..run.summary import Target, holds_from, rounds_to_target
from .console import steady_console

_MEANS = (
    "final_test_accuracy",
    "final_test_metric",
    "best_test_accuracy",
    "final_test_loss",
    "gigabytes",
    "simulated_seconds",
    "seconds",
)


def result_row(
    name: str, ended: Sequence[Outcome | str], targets: Sequence[Target]
) -> dict[str, Any]:
    """Return means over the seeds, and the standard deviation of the final main metric.

    Where a run failed, which is then text instead of an outcome, there are no means.
    """
    errors = [run for run in ended if isinstance(run, str)]
    runs = [] if errors else [run for run in ended if not isinstance(run, str)]
    summaries = [run.summary for run in runs]
    finals = [s["final_test_metric"] for s in summaries if s["final_test_metric"] is not None]
    return {
        "algorithm": name,
        "seeds": len(ended),
        "hyperparameters": summaries[0]["hyperparameters"] if summaries else None,
        **{key: _mean([s[key] for s in summaries]) for key in _MEANS},
        "accuracy_deviation": statistics.stdev(finals) if len(finals) > 1 else None,
        "rounds_to": {t.key: _mean_round(t, rounds_to_target, runs) for t in targets},
        "holds_from": {t.key: _mean_round(t, holds_from, runs) for t in targets},
        "failures": sum(s["failures"] - s["late"] for s in summaries),
        "metrics": _mean_metrics(runs),
        "on_clients": _mean_spread(runs),
        "stopped": [s["stopped"] for s in summaries],
        "best_round": _mean([s["best_round"] for s in summaries]),
        "best_value": _mean([s["best_value"] for s in summaries]),
        "diverged_at": next((s["diverged_at"] for s in summaries if s["diverged_at"]), None),
        "warmup_rounds": summaries[0].get("warmup_rounds") if summaries else None,
        "error": errors[0] if errors else None,
    }


def _mean_round(
    target: Target, first: Callable[..., int | None], runs: Sequence[Outcome]
) -> float | None:
    """Return the mean over the runs of the round that `first` finds."""
    return _mean([first(run.rounds, target.value, target.measure) for run in runs])


def _mean_metrics(runs: Sequence[Outcome]) -> dict[str, float | None]:
    found = [run.summary["final_test_metrics"] for run in runs]
    names = dict.fromkeys(name for metrics in found for name in metrics)
    return {name: _mean([metrics.get(name) for metrics in found]) for name in names}


def _mean_spread(runs: Sequence[Outcome]) -> dict[str, float | None]:
    """Return means over the runs of what clients found of the first metric, else of the loss: with
    their own models, where parts of those stay local."""
    found = [run.summary["final_on_clients"] for run in runs]
    if not found or None in found:
        return {}
    spreads = [each["own_spread"] or each["spread"] for each in found]
    name = next(iter([*spreads[0]][1:2] or spreads[0]), "")  # after the loss, which is first
    values = [spread.get(name, {}) for spread in spreads]
    return {key: _mean([value.get(key) for value in values]) for key in ("mean", "worst")}


def _mean(values: list[float | None]) -> float | None:
    """None as soon as one run has none: it never got there."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def print_results(rows: list[dict[str, Any]], targets: Sequence[Target]) -> None:
    """Print the table; a metric of the user's own stands in the place of accuracy."""
    table = Table()
    for cells in _cells(rows, targets):
        if not table.columns:
            for heading in cells:
                table.add_column(heading)
        table.add_row(*cells.values())
    console = steady_console(sys.stdout)
    if not sys.stdout.isatty():
        console.width = 160
    console.print(table)
    for row in rows:
        for reason in filter(None, row["stopped"]):
            console.print(f"{row['algorithm']}: stopped {reason}", soft_wrap=True)
        if row["warmup_rounds"]:
            console.print(
                f"{row['algorithm']}: in the first {row['warmup_rounds']} rounds all clients took "
                "part, to be grouped; they count above",
                soft_wrap=True,
            )


def _cells(rows: list[dict[str, Any]], targets: Sequence[Target]) -> Iterator[dict[str, str]]:
    """Yield each row's cells by their headings, the same in all rows."""
    ran = [row for row in rows if row["error"] is None]
    # it may be measured beside another main metric
    has_accuracy = not ran or any(
        row["final_test_metric"] == row["final_test_accuracy"] is not None for row in ran
    )
    more = list(dict.fromkeys(name for row in ran for name in row["metrics"]))
    more = [name for name in more if name != "accuracy"] if has_accuracy else more[1:]
    on_clients = any(row["on_clients"] for row in ran)
    keeps_best = any(row["best_round"] is not None for row in ran)
    for row in rows:
        name = row["algorithm"]
        is_experimental = ALGORITHMS[name.partition(":")[0]].experimental
        yield {
            "algorithm": f"{name} (experimental)" if is_experimental else name,
            "accuracy" if has_accuracy else "metric": _final(row),
            "best": _number(row["best_test_accuracy"], ".4f"),
            **{name: _number(row["metrics"].get(name), ".4f") for name in more},
            "test loss": _number(row["final_test_loss"], ".4f"),
            **(_client_cells(row) if on_clients else {}),
            **({"best round": _number(row["best_round"], ".4g")} if keeps_best else {}),
            **{t.heading: _number(row["rounds_to"][t.key], ".4g") for t in targets},
            "GB": _number(row["gigabytes"], ".3g"),
            "SRT s": _number(row["simulated_seconds"], ".1f"),
            "seconds": _number(row["seconds"], ".1f"),
            "failures": str(row["failures"]),
        }


def _client_cells(row: dict[str, Any]) -> dict[str, str]:
    found = row["on_clients"]
    return {
        "clients": _number(found.get("mean"), ".4f"),
        "worst tenth": _number(found.get("worst"), ".4f"),
    }


def _final(row: dict[str, Any]) -> str:
    if row["error"] is not None:
        return "failed"
    text = _number(row["final_test_metric"], ".4f")
    if row["accuracy_deviation"] is not None:
        text += f" ± {row['accuracy_deviation']:.4f}"
    return f"{text} (diverged)" if row["diverged_at"] else text


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"

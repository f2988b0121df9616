"""`fedopt compare`: several rules on the same data, model and seeds."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from ..algorithms import ALGORITHMS
from ..config.run_config import RunConfig
from ..data import load_federated_data
from ..errors import ConfigError, RunError
from ..rounds.record import RoundRecord, as_json
from ..run.directory import CURVES
from ..run.experiment import Experiment
from ..run.plots import draw_curves
from ..run.result import Result
from ..run.simulate import run_experiment
from ..run.summary import Measure, holds_from, rounds_to_target
from .options import new_folder
from .show import RunDisplay

COMPARISON = "comparison.json"


class Targets(NamedTuple):
    """What a run should reach; in rows "0.9" is an accuracy and "loss 0.5" a test loss."""

    accuracies: Sequence[float] = (0.8, 0.9)
    losses: Sequence[float] = ()

    def rounds(
        self,
        runs: list[Result],
        first: Callable[[Sequence[RoundRecord], float, Measure], int | None],
    ) -> dict[str, float | None]:
        """Return the means over the runs of the round that `first` finds."""
        measures: list[tuple[str, float, Measure]] = [
            *((f"{value:g}", value, "test_accuracy") for value in self.accuracies),
            *((f"loss {value:g}", value, "test_loss") for value in self.losses),
        ]
        return {
            key: _mean([first(run.rounds, value, measure) for run in runs])
            for key, value, measure in measures
        }

    @property
    def headings(self) -> list[str]:
        accuracies = [f"rounds to {100 * value:g} %" for value in self.accuracies]
        return accuracies + [f"rounds to loss {value:g}" for value in self.losses]


def run_comparison(
    path: Path | None,
    labels: list[str],
    algorithm: str | None,
    settings: list[str],
    workers: int,
    targets: Targets,
    seeds: list[int],
) -> None:
    """Run every rule with every seed, print the table, write curves and comparison.json.

    A label is a rule's name, or NAME:KEY=VALUE for one of its variants. Without seeds, that of the
    configuration is the only one.
    """
    configs = _configs(path, labels, algorithm, settings)
    base = next(iter(configs.values()))
    directory = base.output.directory or new_folder("compare")
    _require_empty(directory)
    results = _run_all(configs, seeds or [base.federation.seed], bool(seeds), directory, workers)
    rows = [result_row(name, runs, targets) for name, runs in results.items()]
    numbers = ", ".join(map(str, seeds or [base.federation.seed]))
    print_results(rows, targets)
    _write_results(directory, rows, results, f"{base.data.name}, {base.model.name}, seed {numbers}")
    print(f"results in {directory}, curves in {directory / CURVES}")
    idle = [name for name, runs in results.items() if any(run.last_error for run in runs)]
    if idle:
        raise RunError(
            f"{', '.join(idle)}: no reply was counted, at least at the end; see the warnings above"
        )


def _run_all(
    configs: dict[str, RunConfig],
    seeds: list[int],
    shows_seed: bool,
    directory: Path,
    workers: int,
) -> dict[str, list[Result]]:
    results: dict[str, list[Result]] = {name: [] for name in configs}
    for seed in seeds:
        values = {"federation.seed": seed}
        data = load_federated_data(next(iter(configs.values())).with_values(values))
        for name, config in configs.items():
            label = f"{name}, seed {seed}" if shows_seed else name
            folder = name.replace(":", "-").replace("=", "-")
            place = directory / (f"{folder}-seed{seed}" if shows_seed else folder)
            own = config.with_values({**values, "output.directory": str(place)})
            shown = label if any(results.values()) else None
            with RunDisplay(shown, directory=place) as display:
                experiment = Experiment(own, data=data)
                results[name].append(run_experiment(experiment, workers=workers, listener=display))
    return results


def _write_results(
    directory: Path, rows: list[dict[str, Any]], results: dict[str, list[Result]], title: str
) -> None:
    curves = {name: [run.rounds for run in runs] for name, runs in results.items()}
    try:
        text = json.dumps(as_json(rows), indent=2) + "\n"
        (directory / COMPARISON).write_text(text, encoding="utf-8")
        draw_curves(curves, directory / CURVES, title)
    except OSError as error:
        raise RunError(
            f"output.directory: the table above, or {CURVES}, cannot be written: {error}; the "
            f"results of each run are in {directory}"
        ) from error


def _require_empty(directory: Path) -> None:
    try:
        is_free = not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))
        text = "exists and is not empty"
    except (OSError, ValueError) as error:
        is_free = False
        text = f"cannot be used: {error}"
    if not is_free:
        raise ConfigError(
            f"output.directory: {str(directory)!r} {text}; name another folder or remove this one"
        )


def _configs(
    path: Path | None, labels: list[str], algorithm: str | None, settings: list[str]
) -> dict[str, RunConfig]:
    """One configuration a label; everything is checked before anything runs."""
    names = [label.partition(":")[0] for label in labels]
    keys = [setting.partition(".")[0] for setting in settings]
    absent = [key for key in keys if key in ALGORITHMS and key not in names]
    if absent:
        raise ConfigError(
            f"--set {absent[0]}.…: {absent[0]} is not among --algorithms ({', '.join(names)})"
        )
    shared = [s for s, key in zip(settings, keys, strict=True) if key not in (*names, "algorithm")]
    named = [f"algorithm.name={algorithm}"] if algorithm else []
    base = RunConfig.from_file(path, [*shared, *named])
    for_all = {
        s.partition("=")[0].strip().removeprefix("algorithm."): s
        for s, key in zip(settings, keys, strict=True)
        if key == "algorithm"
    }
    unknown = [k for k in for_all if not any(k in ALGORITHMS[n].model_fields for n in names)]
    if unknown:
        raise ConfigError(
            f"--set algorithm.{unknown[0]}: none of {', '.join(names)} has this hyperparameter"
        )
    configs = {}
    for label in labels:
        name, _, variant = label.partition(":")
        if variant and "=" not in variant:
            raise ConfigError(f"--algorithms: got {label!r}; a variant is NAME:KEY=VALUE")
        own = [s.replace(f"{name}.", "algorithm.", 1) for s in settings if s.startswith(f"{name}.")]
        common = [s for key, s in for_all.items() if key in ALGORITHMS[name].model_fields]
        own += [f"algorithm.{variant}"] if variant else []
        configs[label] = base.for_rule(name).updated([*common, *own])
    return configs


def result_row(name: str, runs: list[Result], targets: Targets) -> dict[str, Any]:
    """Return means over the seeds, and the standard deviation of the final accuracy."""
    summaries = [run.summary for run in runs]
    finals = [s["final_test_accuracy"] for s in summaries if s["final_test_accuracy"] is not None]
    means = (
        "final_test_accuracy",
        "final_test_metric",
        "best_test_accuracy",
        "final_test_loss",
        "gigabytes",
    )
    return {
        "algorithm": name,
        "seeds": len(runs),
        "hyperparameters": summaries[0]["hyperparameters"],
        **{key: _mean([s[key] for s in summaries]) for key in means},
        "accuracy_deviation": statistics.stdev(finals) if len(finals) > 1 else None,
        "rounds_to": targets.rounds(runs, rounds_to_target),
        "holds_from": targets.rounds(runs, holds_from),
        **{key: _mean([s[key] for s in summaries]) for key in ("simulated_seconds", "seconds")},
        "failures": sum(s["failures"] for s in summaries),
        "diverged_at": next((s["diverged_at"] for s in summaries if s["diverged_at"]), None),
    }


def _mean(values: list[float | None]) -> float | None:
    """None as soon as one run has none: it never got there."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def print_results(rows: list[dict[str, Any]], targets: Targets) -> None:
    """Print the table; a metric of the user's own stands in the place of accuracy."""
    has_accuracy = any(row["final_test_accuracy"] is not None for row in rows)
    columns = [
        "algorithm",
        "accuracy" if has_accuracy else "metric",
        "best",
        "test loss",
        *targets.headings,
        "GB",
        "SRT s",
        "seconds",
        "failures",
    ]
    table = Table(*columns)
    for row in rows:
        numbers = [row[k] for k in ("best_test_accuracy", "final_test_loss")]
        kind = ALGORITHMS[row["algorithm"].partition(":")[0]]
        table.add_row(
            f"{row['algorithm']} (experimental)" if kind.experimental else row["algorithm"],
            _final(row),
            *("–" if number is None else f"{number:.4f}" for number in numbers),
            *("–" if r is None else f"{r:.4g}" for r in row["rounds_to"].values()),
            f"{row['gigabytes']:.3g}",
            f"{row['simulated_seconds']:.1f}",
            f"{row['seconds']:.1f}",
            str(row["failures"]),
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _final(row: dict[str, Any]) -> str:
    value = row["final_test_metric"]
    deviation = row["accuracy_deviation"]
    text = "–" if value is None else f"{value:.4f}"
    if deviation is not None:
        text += f" ± {deviation:.4f}"
    return f"{text} (diverged)" if row["diverged_at"] else text

"""`fedopt compare`: several rules on the same data, model and seeds."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from ..algorithms import ALGORITHMS
from ..config.run_config import RunConfig
from ..data import load_federated_data
from ..errors import ConfigError, RunError
from ..rounds.record import as_json
from ..run.directory import CURVES
from ..run.experiment import Experiment
from ..run.plots import draw_curves
from ..run.result import Result
from ..run.simulate import run_experiment
from ..run.summary import Measure, holds_from, rounds_to_target
from .console import steady_console
from .options import new_folder
from .show import RunDisplay


class Target(NamedTuple):
    """What a run should reach; in rows "0.9" is an accuracy and "loss 0.5" a test loss."""

    measure: Measure
    value: float

    @property
    def key(self) -> str:
        return f"{self.value:g}" if self.measure == "test_accuracy" else f"loss {self.value:g}"

    @property
    def heading(self) -> str:
        is_accuracy = self.measure == "test_accuracy"
        return f"rounds to {100 * self.value:g} %" if is_accuracy else f"rounds to {self.key}"

    def mean_round(self, first: Callable[..., int | None], runs: list[Result]) -> float | None:
        """Return the mean over the runs of the round that `first` finds."""
        return _mean([first(run.rounds, self.value, self.measure) for run in runs])


def run_comparison(
    path: Path | None,
    labels: list[str],
    algorithm: str | None,
    settings: list[str],
    workers: int,
    targets: Sequence[Target],
    seeds: list[int],
) -> None:
    """Run every rule with every seed, print the table, write curves and comparison.json.

    A label is a rule's name, or NAME:KEY=VALUE, with more of :KEY=VALUE, for one of its variants.
    Without seeds, that of the configuration is the only one.
    """
    configs = _configs(path, labels, algorithm, settings)
    base = next(iter(configs.values()))
    directory = base.output.directory or new_folder("compare")
    _require_empty(directory)
    results = _run_all(configs, seeds, directory, workers)
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
    configs: dict[str, RunConfig], seeds: list[int], directory: Path, workers: int
) -> dict[str, list[Result]]:
    results: dict[str, list[Result]] = {name: [] for name in configs}
    first = next(iter(configs.values()))
    for seed in seeds or [first.federation.seed]:
        values = {"federation.seed": seed}
        data = load_federated_data(first.with_values(values))
        for name, config in configs.items():
            folder = name.replace(":", "-").replace("=", "-")
            place = directory / (f"{folder}-seed{seed}" if seeds else folder)
            own = config.with_values({**values, "output.directory": str(place)})
            with RunDisplay(place, shows_setting=not any(results.values())) as display:
                experiment = Experiment(own, data=data)
                results[name].append(run_experiment(experiment, workers=workers, listener=display))
    return results


def _write_results(
    directory: Path, rows: list[dict[str, Any]], results: dict[str, list[Result]], title: str
) -> None:
    curves = {name: [run.rounds for run in runs] for name, runs in results.items()}
    try:
        text = json.dumps(as_json(rows), indent=2) + "\n"
        (directory / "comparison.json").write_text(text, encoding="utf-8")
        draw_curves(curves, directory / CURVES, title)
    except OSError as error:
        raise RunError(
            f"output.directory: the table above, or {CURVES}, cannot be written: {error}; the "
            f"results of each run are in {directory}"
        ) from error


def _require_empty(directory: Path) -> None:
    try:
        if not directory.exists() or not any(directory.iterdir()):
            return
        text = "exists and is not empty"
    except (OSError, ValueError) as error:
        text = f"cannot be used: {error}"
    raise ConfigError(
        f"output.directory: {str(directory)!r} {text}; name another folder or remove this one"
    )


def _configs(
    path: Path | None, labels: list[str], algorithm: str | None, settings: list[str]
) -> dict[str, RunConfig]:
    """One configuration a label; everything is checked before anything runs."""
    names = [label.partition(":")[0] for label in labels]
    by_section: dict[str, list[str]] = {"algorithm": [], **{name: [] for name in names}}
    for setting in settings:
        by_section.setdefault(setting.partition(".")[0], []).append(setting)
    absent = [section for section in by_section if section in ALGORITHMS and section not in names]
    if absent:
        raise ConfigError(
            f"--set {absent[0]}.…: {absent[0]} is not among --algorithms ({', '.join(names)})"
        )
    own = {name: by_section.pop(name) for name in dict.fromkeys(names)}
    for_all = {
        setting.partition("=")[0][len("algorithm.") :].strip(): setting
        for setting in by_section.pop("algorithm")
    }
    shared = [setting for section in by_section.values() for setting in section]
    base = RunConfig.from_file(path, shared, {"algorithm.name": algorithm} if algorithm else {})
    unknown = [k for k in for_all if not any(k in ALGORITHMS[n].model_fields for n in names)]
    if unknown:
        raise ConfigError(
            f"--set algorithm.{unknown[0]}: none of {', '.join(names)} has this hyperparameter"
        )
    configs = {}
    for label, name in zip(labels, names, strict=True):
        variant = label.split(":")[1:]
        if not all("=" in setting for setting in variant):
            raise ConfigError(
                f"--algorithms: got {label!r}; a variant is NAME:KEY=VALUE, and :KEY=VALUE for "
                "each other key"
            )
        chosen = [s for key, s in for_all.items() if key in ALGORITHMS[name].model_fields]
        chosen += [s.replace(f"{name}.", "algorithm.", 1) for s in own[name]]
        chosen += [f"algorithm.{setting}" for setting in variant]
        configs[label] = base.for_rule(name).updated(chosen)
    return configs


def result_row(name: str, runs: list[Result], targets: Sequence[Target]) -> dict[str, Any]:
    """Return means over the seeds, and the standard deviation of the final accuracy."""
    summaries = [run.summary for run in runs]
    finals = [s["final_test_accuracy"] for s in summaries if s["final_test_accuracy"] is not None]
    means = (
        "final_test_accuracy",
        "final_test_metric",
        "best_test_accuracy",
        "final_test_loss",
        "gigabytes",
        "simulated_seconds",
        "seconds",
    )
    return {
        "algorithm": name,
        "seeds": len(runs),
        "hyperparameters": summaries[0]["hyperparameters"],
        **{key: _mean([s[key] for s in summaries]) for key in means},
        "accuracy_deviation": statistics.stdev(finals) if len(finals) > 1 else None,
        "rounds_to": {t.key: t.mean_round(rounds_to_target, runs) for t in targets},
        "holds_from": {t.key: t.mean_round(holds_from, runs) for t in targets},
        "failures": sum(s["failures"] for s in summaries),
        "diverged_at": next((s["diverged_at"] for s in summaries if s["diverged_at"]), None),
    }


def _mean(values: list[float | None]) -> float | None:
    """None as soon as one run has none: it never got there."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def print_results(rows: list[dict[str, Any]], targets: Sequence[Target]) -> None:
    """Print the table; a metric of the user's own stands in the place of accuracy."""
    has_accuracy = any(row["final_test_accuracy"] is not None for row in rows)
    table = Table()
    for row in rows:
        name = row["algorithm"]
        is_experimental = ALGORITHMS[name.partition(":")[0]].experimental
        cells = {
            "algorithm": f"{name} (experimental)" if is_experimental else name,
            "accuracy" if has_accuracy else "metric": _final(row),
            "best": _number(row["best_test_accuracy"], ".4f"),
            "test loss": _number(row["final_test_loss"], ".4f"),
            **{t.heading: _number(row["rounds_to"][t.key], ".4g") for t in targets},
            "GB": f"{row['gigabytes']:.3g}",
            "SRT s": f"{row['simulated_seconds']:.1f}",
            "seconds": f"{row['seconds']:.1f}",
            "failures": str(row["failures"]),
        }
        if not table.columns:
            for heading in cells:
                table.add_column(heading)
        table.add_row(*cells.values())
    console = steady_console(sys.stdout)
    if not sys.stdout.isatty():
        console.width = 160
    console.print(table)


def _final(row: dict[str, Any]) -> str:
    text = _number(row["final_test_metric"], ".4f")
    if row["accuracy_deviation"] is not None:
        text += f" ± {row['accuracy_deviation']:.4f}"
    return f"{text} (diverged)" if row["diverged_at"] else text


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"

"""`fedopt compare`: several rules on the same data, model and seeds."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..algorithms import ALGORITHMS
from ..config import RunConfig
from ..data import load_federated_data
from ..errors import ConfigError
from ..experiment import Experiment, make_rule
from ..metrics import rounds_to_target
from ..outputs import CURVES
from ..plots import draw_curves
from ..runs import Result
from ..simulation import run_experiment
from .show import RunDisplay

COMPARISON = "comparison.json"


def run_comparison(
    path: Path | None,
    names: list[str],
    algorithm: str | None,
    settings: list[str],
    workers: int,
    targets: list[float],
) -> None:
    """Run every named rule, print the table, write curves and comparison.json."""
    configs = _configs(path, names, algorithm, settings)
    directory = next(iter(configs.values())).output.directory or Path(
        f"runs/{datetime.now():%Y%m%d-%H%M%S}-compare"
    )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(
            f"output.directory: {str(directory)!r} is there and not empty; name another folder or "
            "remove this one"
        )
    data = load_federated_data(next(iter(configs.values())))
    results: dict[str, Result] = {}
    for number, (name, config) in enumerate(configs.items()):
        own = config.updated([f"output.directory={directory / name}"])
        with RunDisplay(None if number == 0 else name) as display:
            results[name] = run_experiment(
                Experiment(own, data=data), workers=workers, listener=display
            )
    rows = [result_row(name, result, targets) for name, result in results.items()]
    (directory / COMPARISON).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    title = f"{config.data.name}, {config.model.name}, seed {config.federation.seed}"
    draw_curves({name: r.rounds for name, r in results.items()}, directory / CURVES, title)
    print_results(rows, targets)
    print(f"results in {directory}, curves in {directory / CURVES}")


def _configs(
    path: Path | None, names: list[str], algorithm: str | None, settings: list[str]
) -> dict[str, RunConfig]:
    """One configuration a rule; everything is checked before anything runs."""
    keys = [setting.partition(".")[0] for setting in settings]
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
    for name in names:
        own = [s.replace(f"{name}.", "algorithm.", 1) for s in settings if s.startswith(f"{name}.")]
        common = [s for key, s in for_all.items() if key in ALGORITHMS[name].model_fields]
        configs[name] = base.for_rule(name).updated([*common, *own])
        make_rule(configs[name])
    return configs


def result_row(name: str, result: Result, targets: list[float]) -> dict[str, Any]:
    summary = result.summary
    return {
        "algorithm": name,
        "hyperparameters": summary["hyperparameters"],
        "final_test_accuracy": summary["final_test_accuracy"],
        "best_test_accuracy": summary["best_test_accuracy"],
        "final_test_loss": summary["final_test_loss"],
        "rounds_to": {f"{t:g}": rounds_to_target(result.rounds, t) for t in targets},
        "gigabytes": summary["gigabytes"],
        "simulated_seconds": summary["simulated_seconds"],
        "seconds": summary["seconds"],
        "failures": summary["failures"],
    }


def print_results(rows: list[dict[str, Any]], targets: list[float]) -> None:
    headings = [f"rounds to {100 * t:g} %" for t in targets]
    columns = [
        "algorithm",
        "accuracy",
        "best",
        "test loss",
        *headings,
        "GB",
        "SRT s",
        "seconds",
        "failures",
    ]
    table = Table(*columns)
    for row in rows:
        numbers = [row[k] for k in ("final_test_accuracy", "best_test_accuracy", "final_test_loss")]
        table.add_row(
            row["algorithm"],
            *("–" if number is None else f"{number:.4f}" for number in numbers),
            *("–" if r is None else str(r) for r in row["rounds_to"].values()),
            f"{row['gigabytes']:.3g}",
            f"{row['simulated_seconds']:.1f}",
            f"{row['seconds']:.1f}",
            str(row["failures"]),
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)

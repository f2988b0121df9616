"""`fedopt compare`: several rules on the same data, model and seeds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from ..algorithms import ALGORITHMS
from ..config.run_config import RunConfig
from ..data import load_federated_data
from ..errors import ConfigError, RunError
from ..rounds.record import DIAGNOSTICS, SPREADS, as_json
from ..run.directory import CURVES
from ..run.experiment import Experiment
from ..run.needs import require_measured
from ..run.plots.comparison import draw_comparison
from ..run.plots.curves import Curve, Trace, measure_of, with_values
from ..run.plots.subject import subject_of
from ..run.plots.sweeps import Row, draw_sweeps
from ..run.result import Outcome
from ..run.summary import Target
from .cells import attempt, finished, run_side_by_side, train
from .console import errors_console
from .options import new_folder
from .show import RunDisplay
from .tables import print_results, result_row

SWEEP = "sweep.png"
Cell = tuple[str, int]  # a row's label, and the seed of one of its runs


class Sweep(NamedTuple):
    """Values of one hyperparameter of one rule; each is a row of its own."""

    rule: str
    key: str
    values: tuple[float, ...]

    @property
    def labels(self) -> list[str]:
        values = [repr(value).removesuffix(".0") for value in self.values]
        return [f"{self.rule}:{self.key}={value}" for value in values]


class Comparison(NamedTuple):
    """What is compared. A label is a rule's name, or NAME:KEY=VALUE, with more of :KEY=VALUE, for
    one of its variants. Without seeds, that of the configuration is the only one."""

    path: Path | None
    labels: list[str]
    algorithm: str | None
    settings: list[str]
    targets: Sequence[Target]
    seeds: list[int]
    sweeps: Sequence[Sweep]


def run_comparison(asked: Comparison, *, workers: int, jobs: int) -> None:
    """Run every rule with every seed, print the table, write curves and comparison.json.

    Cells that the folder holds already, finished, are not run again.
    """
    configs = _configs(asked)
    base = next(iter(configs.values()))
    directory = base.output.directory or new_folder("compare")
    seeds = asked.seeds or [base.federation.seed]
    cells = _cells(configs, seeds, directory, named_by_seed=bool(asked.seeds))
    _require_ours(directory, cells)
    found = _run_all(cells, workers, jobs, directory)
    ended = {label: [found[label, seed] for seed in seeds] for label in configs}
    rows = [result_row(label, runs, asked.targets) for label, runs in ended.items()]
    print_results(rows, asked.targets)
    _write_results(directory, rows, ended, asked, [*cells.values()])
    print(f"results in {directory}, curves in {directory / CURVES}")
    problems = [f"{row['algorithm']}: {row['error']}" for row in rows if row["error"]]
    idle = [label for label, runs in ended.items() if any(map(_is_idle, runs))]
    if idle:
        why = "no reply was counted, at least at the end; see the warnings above"
        problems.append(f"{', '.join(idle)}: {why}")
    if problems:
        raise RunError("\n".join(problems))


def _is_idle(run: Outcome | str) -> bool:
    return not isinstance(run, str) and run.last_error is not None


def _cells(
    configs: Mapping[str, RunConfig], seeds: list[int], directory: Path, *, named_by_seed: bool
) -> dict[Cell, RunConfig]:
    """Return each run's configuration, with a folder of its own, seed by seed."""
    cells = {}
    for seed in seeds:
        for label, config in configs.items():
            folder = label.replace(":", "-").replace("=", "-")
            place = directory / (f"{folder}-seed{seed}" if named_by_seed else folder)
            values = {"federation.seed": seed, "output.directory": str(place)}
            cells[label, seed] = config.with_values(values)
    return cells


def _require_ours(directory: Path, cells: Mapping[Cell, RunConfig]) -> None:
    """Raise ConfigError if the folder holds anything but runs of this comparison."""
    try:
        present = set(directory.iterdir()) if directory.exists() else set()
        if not present or present & {config.output.directory for config in cells.values()}:
            return
        text = "exists and is not empty"
    except (OSError, ValueError) as error:
        text = f"cannot be used: {error}"
    raise ConfigError(
        f"output.directory: {str(directory)!r} {text}; name another folder or remove this one"
    )


def _run_all(
    cells: Mapping[Cell, RunConfig], workers: int, jobs: int, directory: Path
) -> dict[Cell, Outcome | str]:
    advice = f"to continue give the same command with --set output.directory={directory}"
    ended: dict[Cell, Outcome | str] = {}
    for cell, config in cells.items():
        before = finished(config)
        if before is not None:
            ended[cell] = before
    if ended:
        print(f"{len(ended)} of {len(cells)} runs were finished before and are taken as they are")
    left = {cell: config for cell, config in cells.items() if cell not in ended}
    if jobs == 1:
        return ended | _one_by_one(left, workers, advice)

    told: set[str] = set()
    if left:
        Experiment(next(iter(left.values())))  # what no cell can do without is refused before all

    def tell(cell: Cell, outcome: Outcome | str, warned: list[str]) -> None:
        ended[cell] = outcome
        name = f"{cell[0]}, seed {cell[1]}"
        for text in (f"warning: {cell[0]}: {text}" for text in warned):
            if text not in told:  # of another seed
                errors_console().print(text, markup=False, soft_wrap=True)
            told.add(text)
        print(f"{len(ended)}/{len(cells)}  {name}: {_in_short(outcome)}", flush=True)

    try:
        run_side_by_side(left, jobs=jobs, workers=workers, on_end=tell)
    except KeyboardInterrupt:
        errors_console().print(f"stopped; {advice}", markup=False, soft_wrap=True)
        raise
    return ended


def _in_short(outcome: Outcome | str) -> str:
    if isinstance(outcome, str):
        return f"failed: {outcome}"
    metric = outcome.summary["final_test_metric"]
    measured = "no metric" if metric is None else f"{metric:.4f}"
    return f"{measured} in {outcome.summary['seconds']:.1f} s"


def _one_by_one(
    cells: Mapping[Cell, RunConfig], workers: int, advice: str
) -> dict[Cell, Outcome | str]:
    configs = {seed: config for (_, seed), config in cells.items()}
    data = lru_cache(maxsize=1)(lambda seed: load_federated_data(configs[seed]))
    ended: dict[Cell, Outcome | str] = {}
    for (label, seed), config in cells.items():
        # a model or data that cannot be used is every cell's problem: it ends the command
        experiment = Experiment(config, data=data(seed))
        directory = config.output.directory
        with RunDisplay(directory, shows_setting=not ended, how_to_continue=advice) as display:
            run = partial(train, config, workers, display, experiment)
            ended[label, seed] = outcome = attempt(config, run)
        if isinstance(outcome, str):
            print(f"{label}, seed {seed}: {_in_short(outcome)}", flush=True)
    return ended


def _write_results(
    directory: Path,
    rows: list[dict[str, Any]],
    ended: Mapping[str, Sequence[Outcome | str]],
    asked: Comparison,
    configs: Sequence[RunConfig],
) -> None:
    subject = subject_of(configs)
    try:
        directory.mkdir(parents=True, exist_ok=True)  # where no run came as far as its own
        text = json.dumps(as_json(rows), indent=2) + "\n"
        (directory / "comparison.json").write_text(text, encoding="utf-8")
        _draw_curves(directory / CURVES, ended, asked, configs)
        if asked.sweeps:
            title = f"{subject.data}: {subject.setting}"
            _draw_sweeps(directory / SWEEP, rows, asked, title)
    except OSError as error:
        raise RunError(
            f"output.directory: the table above, or {CURVES}, cannot be written: {error}; the "
            f"results of each run are in {directory}"
        ) from error


def _draw_curves(
    path: Path,
    ended: Mapping[str, Sequence[Outcome | str]],
    asked: Comparison,
    configs: Sequence[RunConfig],
) -> None:
    """Draw the runs that did not fail, if any has a value."""
    curves = [
        Curve(
            label.replace(":", ", "),
            [Trace(r.rounds, r.summary["diverged_at"]) for r in runs if not isinstance(r, str)],
        )
        for label, runs in ended.items()
    ]
    records = [record for curve in curves for trace in curve.traces for record in trace.rounds]
    measure = measure_of(records, configs[0].model.metric)
    if with_values(curves, measure):
        draw_comparison(curves, measure, subject_of(configs), path, targets=asked.targets)


def _configs(asked: Comparison) -> dict[str, RunConfig]:
    """One configuration a label; everything is checked before anything runs."""
    names = [label.partition(":")[0] for label in asked.labels]
    by_section: dict[str, list[str]] = {"algorithm": [], **{name: [] for name in names}}
    for setting in asked.settings:
        by_section.setdefault(setting.partition(".")[0], []).append(setting)
    absent = [section for section in by_section if section in ALGORITHMS and section not in names]
    if absent:
        raise ConfigError(
            f"--set {absent[0]}.…: {absent[0]} is not among --algorithms ({', '.join(names)})"
        )
    own = {name: by_section.pop(name) for name in set(names)}
    for_all = {
        setting.partition("=")[0][len("algorithm.") :].strip(): setting
        for setting in by_section.pop("algorithm")
    }
    shared = [setting for section in by_section.values() for setting in section]
    named = {"algorithm.name": asked.algorithm} if asked.algorithm else {}
    base = RunConfig.from_file(asked.path, shared, named)
    unknown = [k for k in for_all if not any(k in ALGORITHMS[n].model_fields for n in names)]
    if unknown:
        raise ConfigError(
            f"--set algorithm.{unknown[0]}: none of {', '.join(names)} has this hyperparameter"
        )
    configs = {}
    for label, name in zip(asked.labels, names, strict=True):
        chosen = [s for key, s in for_all.items() if key in ALGORITHMS[name].model_fields]
        chosen += [s.replace(f"{name}.", "algorithm.", 1) for s in own[name]]
        configs[label] = base.for_rule(name).updated([*chosen, *_variant(label)])
    _require_measured(base, asked.targets)
    return configs


def _variant(label: str) -> list[str]:
    """Return the settings that a label adds to its rule's."""
    variant = label.split(":")[1:]
    if not all("=" in setting for setting in variant):
        raise ConfigError(
            f"--algorithms: got {label!r}; a variant is NAME:KEY=VALUE, and :KEY=VALUE for "
            "each other key"
        )
    return [f"algorithm.{setting}" for setting in variant]


def _require_measured(config: RunConfig, targets: Sequence[Target]) -> None:
    for target in targets:
        if target.measure in (*DIAGNOSTICS, *SPREADS):
            require_measured(config, "--targets", target.measure)
            continue
        named = {"test_accuracy", "test_loss", config.model.metric, *config.evaluation.metrics}
        if target.measure not in named:
            raise ConfigError(
                f"--targets: got {target.measure}, which is not measured; add it to "
                "evaluation.metrics"
            )


def _first_round(key: str, row: Row) -> float | None:
    found: float | None = row["rounds_to"][key]
    return found


def _draw_sweeps(path: Path, rows: Sequence[Row], asked: Comparison, title: str) -> None:
    """Draw accuracy, and rounds to each target, over the values; other rows are level lines."""
    by_label = {row["algorithm"]: row for row in rows}
    panels: dict[str, Callable[[Row], float | None]] = {
        "final accuracy": itemgetter("final_test_metric")
    }
    for target in asked.targets:
        panels[target.heading] = partial(_first_round, target.key)
    curves = {
        f"{sweep.rule}: {sweep.key}": (sweep.values, [by_label[label] for label in sweep.labels])
        for sweep in asked.sweeps
    }
    swept = {label for sweep in asked.sweeps for label in sweep.labels}
    levels = {label: row for label, row in by_label.items() if label not in swept}
    draw_sweeps(curves, levels, panels, path, title)

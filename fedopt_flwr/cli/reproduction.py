"""`fedopt reproduce`: run what is missing of the studies, and say which claims hold."""

from __future__ import annotations

import json
import math
import re
import statistics
import subprocess  # nosec B404
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config.run_config import RunConfig
from ..data import load_test_data
from ..errors import ConfigError, RunError
from ..files import replacing
from ..run.result import Outcome
from ..run.summary import rounds_to_target
from .cells import run_side_by_side
from .claims import STUDIES, Claim, Measure, Point, Row, Study

FOLDER = Path("examples/papers")
RESULTS = FOLDER / "results.json"
REPORT = Path("docs/reproduction.md")
SEEDS = (0, 1, 2)
R10 = "benchmarks/gradient_error.py"
_R10_SLOPE = "R10 | slope of the error over T, momentum_rule = proved"
_WORST: dict[Measure, float] = {"accuracy": 0.0, "loss": math.inf, "rounds": math.inf}
_HEADING = """
# The papers' claims, tried

    fedopt reproduce        # runs what is missing of examples/papers/results.json

Small versions of the papers' experiments on a CPU (`examples/papers/r1.small.toml` to
`r9.small.toml`; each says what is as in the text and what is not). Grids run on seed 0, the best
point of each row then on seeds 1 and 2; figures are means over the three. A claim that fails stays
in the table. The papers' own experiments, for machines with GPUs, are the other files there.
"""
Cell = tuple[str, str, str, int]  # study, variant, row with its point, seed


class Results:
    """What was measured, by cell, in a file that is written after every run."""

    def __init__(self, path: Path = RESULTS) -> None:
        self._path = path
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else "{}"
            self.known: dict[str, Any] = json.loads(text)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path}: cannot be read: {error}; restore it, or remove it to run all anew"
            ) from error

    def keep(self, key: str, value: Any) -> None:
        self.known[key] = value
        with replacing(self._path) as file:
            text = json.dumps(dict(sorted(self.known.items())), indent=1, ensure_ascii=False)
            file.write(f"{text}\n".encode())

    def measured(self, cell: Cell, measure: Measure) -> float:
        """Return a value of one cell; what diverged or was never reached is the worst of all."""
        value = self.known[_key(cell)].get(measure)
        return _WORST[measure] if value is None else float(value)

    def best_point(self, name: str, variant: str, row: str) -> Point:
        """Return the point that did best on the first seed."""
        study = STUDIES[name]
        sign = -1 if study.best_by == "accuracy" else 1

        def merit(point: Point) -> float:
            cell = (name, variant, _label(row, point), SEEDS[0])
            return sign * self.measured(cell, study.best_by)

        return min(study.rows[row].grid, key=merit)

    def values(self, name: str, variant: str, row: str, measure: Measure) -> list[float]:
        """Return the value of each seed at the best point."""
        label = _label(row, self.best_point(name, variant, row))
        return [self.measured((name, variant, label, seed), measure) for seed in SEEDS]


def _label(row: str, point: Point) -> str:
    return ", ".join([row, *(f"{key}={value:g}" for key, value in point.items())])


def _key(cell: Cell) -> str:
    return " | ".join(map(str, cell))


def reproduce_studies(names: Sequence[str], jobs: int) -> None:
    """Run what is missing of these studies, seed 0 of all points first, and write the report."""
    if not FOLDER.is_dir():
        raise ConfigError(
            f"fedopt reproduce: there is no {FOLDER} here; run it in the folder of a clone"
        )
    results = Results()
    for name in names:
        if name == "R10":
            _run_r10(results)
            continue
        study = STUDIES[name]
        print(f"{name}: {study.source}", flush=True)
        every = {row: study.rows[row].grid for row in study.rows}
        _run(
            name,
            {(v, row): grid for v in study.variants for row, grid in every.items()},
            SEEDS[:1],
            jobs,
            results,
        )
        best = {
            (variant, row): (results.best_point(name, variant, row),)
            for variant in study.variants
            for row in study.rows
        }
        _run(name, best, SEEDS[1:], jobs, results)
    with replacing(REPORT) as file:
        file.write(report(results).encode())
    print(f"report in {REPORT}, every cell in {RESULTS}")


def _run(
    name: str,
    points: Mapping[tuple[str, str], Sequence[Point]],
    seeds: Sequence[int],
    jobs: int,
    results: Results,
) -> None:
    study = STUDIES[name]
    cells: dict[Cell, RunConfig] = {}
    for (variant, row), grid in points.items():
        for point in grid:
            for seed in seeds:
                cell = (name, variant, _label(row, point), seed)
                if _key(cell) not in results.known:
                    cells[cell] = _config(study, variant, study.rows[row], point, seed)
    if cells:
        load_test_data(next(iter(cells.values())))  # data that is absent is said once

    failed: list[str] = []

    def keep(cell: Cell, outcome: Outcome | str, warned: list[str]) -> None:
        if isinstance(outcome, str):  # not kept: it says nothing of the rule
            failed.append(f"{_key(cell)}: {outcome}")
            return
        found = _measures(outcome, study.target)
        results.keep(_key(cell), found)
        print(f"  {_key(cell)}: {json.dumps(found)}", flush=True)

    run_side_by_side(cells, jobs=jobs, workers=1, on_end=keep)
    if failed:
        raise RunError("\n".join([*failed, f"{name}: run it again for what is missing"]))


def _config(study: Study, variant: str, row: Row, point: Point, seed: int) -> RunConfig:
    values = {f"algorithm.{key}": value for key, value in {**row.fixed, **point}.items()}
    config = RunConfig.from_file(FOLDER / study.file, study.variants[variant])
    return config.for_rule(row.rule).with_values({**values, "federation.seed": seed})


def _measures(outcome: Outcome, target: float) -> dict[str, Any]:
    summary = outcome.summary
    loss = summary["final_test_loss"]
    is_finite = loss is not None and math.isfinite(loss)
    return {
        "accuracy": round(summary["final_test_accuracy"], 4) if is_finite else None,
        "loss": round(loss, 4) if is_finite else None,
        "rounds": rounds_to_target(outcome.rounds, target),
        "seconds": round(summary["seconds"], 1),
    }


def _run_r10(results: Results) -> None:
    if _R10_SLOPE in results.known:
        return
    command = [sys.executable, R10]  # ours
    ended = subprocess.run(command, capture_output=True, text=True, check=False)  # nosec B603
    found = re.search(r"^proved .*slope (-?[\d.]+)", ended.stdout, re.MULTILINE)
    if found is None:
        raise RunError(f"R10: {R10} failed: {ended.stderr.strip()[-500:]}")
    results.keep(_R10_SLOPE, float(found[1]))


def report(results: Results) -> str:
    """Return docs/reproduction.md: all claims in one table, then each study."""
    tables, rows = [], []
    for name, study in STUDIES.items():
        try:
            tables.append(_study_table(name, study, results))
            rows += [_claim_row(name, study, claim, results) for claim in study.claims]
        except KeyError:  # a cell is missing
            rows += [
                f"| {name} | {claim.text} | {_bound(claim)} | – | not run yet |  |"
                for claim in study.claims
            ]
    rows.append(_r10_row(results))
    lines = [
        *_HEADING.strip().splitlines(),
        "",
        "| study | figure | must be | found | held | more |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        *tables,
    ]
    return "\n".join(lines).rstrip() + "\n"


def _claim_row(name: str, study: Study, claim: Claim, results: Results) -> str:
    def found(row: str, measure: Measure = "accuracy", variant: str = "") -> float:
        return statistics.fmean(results.values(name, variant, row, measure))

    figure = claim.figure(found)
    held = figure > claim.bound if claim.relation == ">" else figure < claim.bound
    shown = "never reached" if math.isnan(figure) or math.isinf(figure) else f"{figure:.4g}"
    mark = "yes" if held else "**no**"
    return f"| {name} | {claim.text} | {_bound(claim)} | {shown} | {mark} | {claim.why} |"


def _bound(claim: Claim) -> str:
    return f"{claim.relation} {claim.bound:g}"


def _r10_row(results: Results) -> str:
    text = '| R10 | slope of log E‖∇f − g‖ over log T, padamfed_vr "proved"; the theorem\'s: −1/3'
    if _R10_SLOPE not in results.known:
        return f"{text} | < -0.25 | – | not run yet |  |"
    found = results.known[_R10_SLOPE]
    return f"{text} | < -0.25 | {found:.4g} | {'yes' if found < -0.25 else '**no**'} | `{R10}` |"


def _study_table(name: str, study: Study, results: Results) -> str:
    lines = [f"## {name}", "", f"{study.source}. `examples/papers/{study.file}`", ""]
    rounds = f"rounds to {100 * study.target:g} % | " if study.counts_rounds else ""
    lines += [
        f"| | row | best point | accuracy | test loss | {rounds}".rstrip(),
        f"|---|---|---|---|---|{'---|' if rounds else ''}",
    ]
    for variant in study.variants:
        for row in study.rows:
            point = results.best_point(name, variant, row)
            cells = [variant, row, _label("", point).removeprefix(", ") or "–"]
            forms: dict[Measure, str] = {"accuracy": ".4f", "loss": ".4f"}
            if rounds:
                forms["rounds"] = ".1f"
            for measure, form in forms.items():
                cells.append(_mean_of(results.values(name, variant, row, measure), form))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _mean_of(values: Sequence[float], form: str) -> str:
    if not all(map(math.isfinite, values)):
        return "–"
    return f"{statistics.fmean(values):{form}} ± {statistics.stdev(values):{form}}"

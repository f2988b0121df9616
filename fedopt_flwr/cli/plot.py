"""`fedopt plot`: any runs in one picture, finished or not."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..errors import ConfigError, FedoptWarning
from .console import Debug
from .options import require_place

if TYPE_CHECKING:
    from ..run.plots.curves import Curve, Measure
    from ..run.reading import RecordedRun

_KINDS = (".png", ".svg", ".pdf")


def plot(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of runs, finished or not; of comparisons."),
    ],
    x: Annotated[
        Literal["rounds", "bytes", "seconds"], typer.Option("--x", help="What curves are over.")
    ] = "rounds",
    output: Annotated[
        Path, typer.Option(help="Where the picture goes: a name that ends with .png, .svg or .pdf.")
    ] = Path("plot.png"),
    debug: Debug = False,
) -> None:
    """Draw runs together: who is ahead, and what it costs to reach a target.

    Runs that differ in their seed alone become one curve with a band; the others are named by what
    differs. A single run is drawn with its losses, who took part, seconds and bytes.
    """
    require_place(output, _KINDS)
    from ..run.grouping import curves_of
    from ..run.plots.comparison import draw_comparison
    from ..run.plots.one_run import draw_run
    from ..run.plots.subject import subject_of
    from ..run.reading import read_so_far, run_folders

    found = _with_rounds([read_so_far(folder) for folder in run_folders(runs)])
    configs = [run.config for run in found]
    curves = curves_of(found)
    try:
        if len(found) == 1:
            draw_run(curves[0].name, curves[0].traces[0], configs[0], output, x)
        else:
            measure = _measure(found)
            _require_values(curves, measure)
            draw_comparison(curves, measure, subject_of(configs), output, unit=x)
    except OSError as error:
        raise ConfigError(
            f"--output: cannot write {str(output)!r}: {error.strerror or error}; name another file"
        ) from error
    count = f"{len(found)} runs" if len(found) > 1 else "1 run"
    print(f"{count} drawn in {output}")


def _with_rounds(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Leave out runs without a round, with a warning; ConfigError if that leaves none."""
    begun = [run for run in runs if run.rounds]
    empty = ", ".join(repr(str(run.path)) for run in runs if not run.rounds)
    if not begun:
        raise ConfigError(f"RUN: no round is over yet in {empty}; try again when one is")
    if empty:
        _warn(f"RUN: no round is over yet in {empty}, which is left out")
    return begun


def _measure(runs: Sequence[RecordedRun]) -> Measure:
    """Return what all runs can be judged by; warn where that says little."""
    from ..run.plots.curves import measure_of

    records = [record for run in runs for record in run.rounds]
    metrics = dict.fromkeys(run.config.model.metric for run in runs)
    measure = measure_of(records, next(iter(metrics)) if len(metrics) == 1 else "")
    if len(metrics) > 1:
        _warn(
            f"RUN: these runs have different metrics ({', '.join(metrics)}); their "
            f"{measure.title.lower()} is drawn"
        )
    losses = dict.fromkeys(run.config.model.loss for run in runs)
    if len(losses) > 1 and measure.name in ("test_loss", "train_loss"):
        _warn(
            f"RUN: these runs have different losses ({', '.join(losses)}); {measure.title.lower()} "
            "is drawn, and does not say which is better"
        )
    data = dict.fromkeys(run.config.data.name for run in runs)
    if len(data) > 1:
        _warn(
            f"RUN: these runs are of different data ({', '.join(data)}); {measure.title.lower()} "
            "is drawn, and does not say which is better"
        )
    return measure


def _require_values(curves: Sequence[Curve], measure: Measure) -> None:
    """Warn of curves without a value; ConfigError if none has one."""
    from ..run.plots.curves import with_values

    kept = {curve.name for curve in with_values(curves, measure)}
    what = measure.title.lower()
    if not kept:
        raise ConfigError(f"RUN: none of these runs has a {what} yet; try again when one has")
    if missing := [curve.name for curve in curves if curve.name not in kept]:
        _warn(f"RUN: no {what} yet of {'; '.join(missing)}, which is left out")


def _warn(text: str) -> None:
    warnings.warn(text, FedoptWarning, stacklevel=3)

"""`fedopt compare`: several rules on the same data, model and seeds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

from ..algorithms import ALGORITHMS
from ..config.sections import KNOWN_BETTER, MAX_SEED
from ..errors import ConfigError
from ..problems import unknown_name
from ..run.summary import Target
from .console import Debug
from .options import AlgorithmName, ConfigFile, Settings, Workers

if TYPE_CHECKING:
    from .comparison import Sweep


def compare(
    config: ConfigFile = None,
    algorithms: Annotated[
        str | None,
        typer.Option(
            help="Names with commas, NAME:KEY=VALUE too, or 'all', which it is if left out."
        ),
    ] = None,
    algorithm: AlgorithmName = None,
    settings: Settings = None,
    workers: Workers = 1,
    targets: Annotated[
        str,
        typer.Option(
            help="Accuracies whose first round is shown, with commas; NAME=VALUE too, of a metric "
            "in evaluation.metrics, with output.diagnostics as gradient_norm=0.1 or drift=0.5, "
            "with evaluation.on_clients as worst_test_accuracy=0.7."
        ),
    ] = "0.8,0.9",
    loss_targets: Annotated[
        str, typer.Option(help="Test losses whose first round is shown, with commas.")
    ] = "",
    seeds: Annotated[
        str, typer.Option(help="Run with each of these seeds, with commas; means are shown.")
    ] = "",
    curve_over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="rules.NAME.KEY=V1,V2,...",
            help="A row for each value, and a picture of accuracy over them; repeatable.",
        ),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Runs at the same time, each in a process of its own.")
    ] = 1,
    debug: Debug = False,
) -> None:
    """Run several rules on one configuration: a table and curves.

    The hyperparameters in the file's \\[algorithm] belong to the rule that it names, those in
    \\[rules.NAME] to the rule NAME; --set algorithm.KEY=VALUE goes to every rule that has that key,
    --set NAME.KEY=VALUE to one rule. --algorithms padamfed,padamfed:momentum=1 runs one rule twice;
    a variant may have several keys, as in padamfed:momentum=0.5:step_scale=3. Runs that
    output.directory holds, finished, are taken as they are: give it again to continue.
    """
    from .comparison import Comparison, run_comparison

    sweeps = [_sweep(text) for text in curve_over or []]
    labels = [label.strip() for label in algorithms.split(",")] if algorithms else []
    if algorithms == "all" or not (algorithms or sweeps):
        labels = [*ALGORITHMS, "padamfed_vr:momentum_rule=printed"]  # both of its momentum rules
    labels += [label for sweep in sweeps for label in sweep.labels if label not in labels]
    unknown = [n for label in labels if (n := label.partition(":")[0]) not in ALGORITHMS]
    if unknown:
        raise ConfigError([unknown_name("--algorithms", name, ALGORITHMS) for name in unknown])
    if len(set(labels)) < len(labels):
        raise ConfigError(f"--algorithms: got {algorithms!r}; name each rule once")
    wanted = _targets(targets)
    wanted += [Target("test_loss", n) for n in _numbers("--loss-targets", loss_targets)]
    chosen = settings or []
    asked = Comparison(config, labels, algorithm, chosen, wanted, _seeds(seeds), sweeps)
    run_comparison(asked, workers=workers, jobs=jobs)


def _targets(text: str) -> list[Target]:
    found = []
    measures = KNOWN_BETTER.keys() - {"test_accuracy", "test_loss", "train_loss"}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, number = part.partition("=")
        if equals and name not in measures:
            raise ConfigError(unknown_name("--targets", name, measures))
        measure = name if equals else "test_accuracy"
        limits = {} if equals else {"largest": 1.0}
        found += [Target(measure, n) for n in _numbers("--targets", number or part, **limits)]
    return list(dict.fromkeys(found))


def _sweep(text: str) -> Sweep:
    """Read rules.NAME.KEY=V1,V2,..."""
    from .comparison import Sweep

    place, _, values = text.partition("=")
    section, _, rest = place.strip().partition(".")
    name, _, key = rest.rpartition(".")
    try:
        numbers = [float(part) for part in values.split(",")]
    except ValueError:
        numbers = []
    if section != "rules" or not name or not all(map(math.isfinite, numbers)) or not numbers:
        raise ConfigError(
            f"--curve-over: got {text!r}; must be rules.NAME.KEY=V1,V2,... with numbers, as in "
            "rules.padamfed.step_scale=0.1,1,10"
        )
    if name not in ALGORITHMS:
        raise ConfigError(unknown_name("--curve-over", name, ALGORITHMS))
    if key not in ALGORITHMS[name].model_fields:
        raise ConfigError(unknown_name("--curve-over", key, ALGORITHMS[name].model_fields))
    return Sweep(name, key, tuple(dict.fromkeys(numbers)))


def _seeds(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) <= MAX_SEED for part in parts):
        raise ConfigError(
            f"--seeds: got {text!r}; must be whole numbers from 0 to {MAX_SEED} with commas between"
        )
    return [int(part) for part in dict.fromkeys(parts)]


def _numbers(option: str, text: str, largest: float = 1e9) -> list[float]:
    try:
        values = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = [-1.0]
    if not all(0 < value <= largest for value in values):
        raise ConfigError(
            f"{option}: got {text!r}; must be numbers in (0, {largest:g}] with commas between"
        )
    return list(dict.fromkeys(values))

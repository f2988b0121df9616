"""`fedopt compare`: several rules on the same data, model and seeds."""

from __future__ import annotations

from typing import Annotated

import typer

from ..algorithms import ALGORITHMS
from ..config.sections import MAX_SEED
from ..errors import ConfigError
from ..problems import unknown_name
from .console import Debug
from .options import AlgorithmName, ConfigFile, Settings, Workers


def compare(
    config: ConfigFile = None,
    algorithms: Annotated[
        str, typer.Option(help="Names with commas between them, NAME:KEY=VALUE too, or 'all'.")
    ] = "all",
    algorithm: AlgorithmName = None,
    settings: Settings = None,
    workers: Workers = 1,
    targets: Annotated[
        str, typer.Option(help="Accuracies whose first round is shown, with commas.")
    ] = "0.8,0.9",
    loss_targets: Annotated[
        str, typer.Option(help="Test losses whose first round is shown, with commas.")
    ] = "",
    seeds: Annotated[
        str, typer.Option(help="Run with each of these seeds, with commas; means are shown.")
    ] = "",
    debug: Debug = False,
) -> None:
    """Run several rules on one configuration, one after another: a table and curves.

    The hyperparameters in the file's \\[algorithm] belong to the rule that it names, those in
    \\[rules.NAME] to the rule NAME; --set algorithm.KEY=VALUE goes to every rule that has that key,
    --set NAME.KEY=VALUE to one rule. --algorithms padamfed,padamfed:momentum=1 runs one rule twice;
    a variant may have several keys, as in padamfed:momentum=0.5:step_scale=3.
    """
    from .comparison import Target, run_comparison

    labels = [label.strip() for label in algorithms.split(",")]
    if algorithms == "all":
        labels = [*ALGORITHMS, "padamfed_vr:momentum_rule=printed"]  # both of its momentum rules
    unknown = [n for label in labels if (n := label.partition(":")[0]) not in ALGORITHMS]
    if unknown:
        raise ConfigError([unknown_name("--algorithms", name, ALGORITHMS) for name in unknown])
    if len(set(labels)) < len(labels):
        raise ConfigError(f"--algorithms: got {algorithms!r}; name each rule once")
    wanted = [Target("test_accuracy", n) for n in _numbers("--targets", targets, largest=1)]
    wanted += [Target("test_loss", n) for n in _numbers("--loss-targets", loss_targets)]
    run_comparison(config, labels, algorithm, settings or [], workers, wanted, _seeds(seeds))


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

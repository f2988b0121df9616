"""The verbs of `fedopt`."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ..algorithms import ALGORITHMS
from ..config.run_config import RunConfig
from ..config.sections import MAX_SEED
from ..errors import ConfigError
from ..problems import unknown_name
from . import federation
from .console import Debug
from .options import AlgorithmName, ConfigFile, Settings, read_config, with_directory

app = typer.Typer(
    help="Federated optimisation on Flower.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Engine(StrEnum):
    """What runs the clients of a simulation."""

    IN_PROCESS = "in-process"
    RAY = "ray"


Workers = Annotated[int, typer.Option(min=1, help="Clients that train at the same time.")]


app.command()(federation.server)
app.command()(federation.client)
app.command()(federation.launch)
app.add_typer(federation.certs, name="certs")


@app.command()
def simulate(
    config: ConfigFile = None,
    algorithm: AlgorithmName = None,
    settings: Settings = None,
    workers: Workers = 1,
    engine: Annotated[
        Engine, typer.Option(help="in-process, or Flower's own simulation on Ray.")
    ] = Engine.IN_PROCESS,
    cpus_per_client: Annotated[float, typer.Option(min=0, help="Only with --engine ray.")] = 1,
    gpus_per_client: Annotated[float, typer.Option(min=0, help="Only with --engine ray.")] = 0,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIRECTORY", help="Continue from this run's checkpoint.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Train on this machine, in this process or with Ray."""
    if engine is Engine.RAY:
        if workers > 1 or resume is not None:
            raise ConfigError("--engine ray: knows neither --workers nor --resume; leave them out")
        _simulate_on_ray(read_config(config, algorithm, settings), cpus_per_client, gpus_per_client)
        return
    if resume is not None:
        if config or algorithm or settings:
            raise ConfigError(
                "--resume: takes the configuration from its directory; give no other beside it"
            )
        from ..run.simulate import resume as resume_run
        from .show import RunDisplay

        with RunDisplay(directory=resume) as display:
            result = resume_run(resume, workers=workers, listener=display)
        display.finish(result, resume)
        return
    run_config = with_directory(read_config(config, algorithm, settings))
    from ..run.simulate import simulate as simulate_run
    from .show import RunDisplay

    with RunDisplay(directory=run_config.output.directory) as display:
        result = simulate_run(run_config, workers=workers, listener=display)
    display.finish(result, run_config.output.directory)


def _simulate_on_ray(config: RunConfig, cpus: float, gpus: float) -> None:
    run_config = with_directory(config)
    from ..run.flower_apps import simulate_on_ray
    from .show import RunDisplay

    with RunDisplay(directory=run_config.output.directory) as display:
        result = simulate_on_ray(run_config, display, cpus_per_client=cpus, gpus_per_client=gpus)
    display.finish(result, run_config.output.directory)


@app.command()
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
    --set NAME.KEY=VALUE to one rule. --algorithms padamfed,padamfed:momentum=1 runs one rule twice.
    """
    from .comparison import Targets, run_comparison

    labels = [label.strip() for label in algorithms.split(",")]
    if algorithms == "all":
        labels = [*ALGORITHMS, "padamfed_vr:momentum_rule=proved"]  # both of its momentum rules
    for label in labels:
        name = label.partition(":")[0]
        if name not in ALGORITHMS:
            raise ConfigError(unknown_name("--algorithms", name, ALGORITHMS))
    if len(set(labels)) < len(labels):
        raise ConfigError(f"--algorithms: got {algorithms!r}; name each rule once")
    wanted = Targets(
        _numbers("--targets", targets, largest=1), _numbers("--loss-targets", loss_targets)
    )
    run_comparison(config, labels, algorithm, settings or [], workers, wanted, _seeds(seeds))


@app.command("algorithms")
def list_algorithms(
    name: Annotated[str | None, typer.Argument(help="Only this one, in full.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects.")] = False,
    markdown: Annotated[bool, typer.Option(help="Print docs/algorithms.md.")] = False,
) -> None:
    """Say which rules there are, what they need and what travels."""
    from .rules import describe, markdown_pages, print_rule, print_rules

    if name is not None and name not in ALGORITHMS:
        raise ConfigError(unknown_name("algorithms NAME", name, ALGORITHMS))
    chosen = [ALGORITHMS[name]] if name else list(ALGORITHMS.values())
    if as_json:
        print(json.dumps([describe(rule) for rule in chosen], indent=2, ensure_ascii=False))
    elif markdown:
        print(markdown_pages([describe(rule) for rule in chosen]))
    elif name:
        print_rule(describe(chosen[0]))
    else:
        print_rules([describe(rule) for rule in chosen])


@app.command()
def verify(
    name: Annotated[
        str | None, typer.Argument(help="A rule, or module:attribute of one; all without it.")
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:ATTRIBUTE",
            help="Makes a Flower strategy; NAME then is the module:attribute that makes a client.",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Check rules, or any Flower strategy with its client, against problems with known answers.

    A strategy is made by ATTRIBUTE(model, num_clients=, clients_per_round=, num_rounds=), a client
    by ATTRIBUTE(model, dataset, client_id=); model is an nn.Module of 4 inputs and 3 classes.
    """
    from .conformance import verify as run_checks

    if not run_checks(name, strategy):
        raise typer.Exit(1)


@app.command()
def partition(
    config: ConfigFile = None,
    settings: Settings = None,
    plot: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("partition.png"),
    debug: Debug = False,
) -> None:
    """Print and draw how many examples of each class each client holds."""
    run_config = read_config(config, None, settings)
    from ..data import load_federated_data
    from ..run.plots import draw_partition
    from .show import print_label_counts

    data = load_federated_data(run_config)
    if data.num_classes == 0 or any((c.targets() < 0).any() for c in data.clients):
        raise ConfigError(f"data.name: {run_config.data.name!r} has no classes to count")
    counts = data.label_counts()
    print_label_counts(counts)
    kind = run_config.data.partition.kind or "default"
    try:
        draw_partition(counts, plot, f"{run_config.data.name}, {kind} partition")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot: cannot write {str(plot)!r}: {error}") from error
    print(f"drawn in {plot}")


@app.command()
def doctor(config: ConfigFile = None, settings: Settings = None, debug: Debug = False) -> None:
    """Say what this machine has, which data is there, and whether a configuration would run."""
    from .diagnosis import run_checks

    if not run_checks(config, settings or []):
        raise typer.Exit(1)


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

"""`fedopt verify`: rules against problems with known answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..algorithms import ALGORITHMS, load_rule
from ..errors import ConfigError
from ..own_code import is_import_path, load_attribute
from .console import Debug

if TYPE_CHECKING:
    from ..conformance import Outcome

_COLOURS = {"passed": "green", "failed": "red", "not applicable": "dim"}


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
    if not run_checks(name, strategy):
        raise typer.Exit(1)


def run_checks(name: str | None, strategy: str | None) -> bool:
    """Print what holds and what does not; return whether everything that applies holds."""
    from ..conformance import verify_pair, verify_rule

    folders = [Path.cwd()]
    if strategy is not None:
        for option, value in (("NAME", name), ("--strategy", strategy)):
            if value is None or not is_import_path(value):
                raise ConfigError(
                    f"verify {option}: got {value!r}; with --strategy, NAME must be the "
                    "module:attribute that makes a client, --strategy the one that makes a strategy"
                )
        make_client = load_attribute("verify NAME", str(name), folders)
        make_strategy = load_attribute("verify --strategy", strategy, folders)
        return _print_outcomes(f"{strategy} with {name}", verify_pair(make_strategy, make_client))
    if name is not None:
        return _print_outcomes(name, verify_rule(load_rule(name, folders)))
    return _print_all({rule: verify_rule(kind) for rule, kind in ALGORITHMS.items()})


def _print_outcomes(title: str, outcomes: list[Outcome]) -> bool:
    table = Table("check", "outcome", "why", box=None, pad_edge=False)
    for outcome in outcomes:
        colour = _COLOURS[outcome.verdict]
        table.add_row(outcome.check, f"[{colour}]{outcome.verdict}[/]", escape(outcome.note))
    _console().print(table)
    return _summary(title, outcomes)


def _print_all(results: dict[str, list[Outcome]]) -> bool:
    table = Table("rule", *_COLOURS, "why", box=None, pad_edge=False)
    for rule, outcomes in results.items():
        counts = [str(sum(o.verdict == verdict for o in outcomes)) for verdict in _COLOURS]
        failed = [f"{o.check}: {o.note}" for o in outcomes if o.verdict == "failed"]
        table.add_row(rule, *counts, escape("\n".join(failed)))
    _console().print(table)
    everything = [outcome for outcomes in results.values() for outcome in outcomes]
    return _summary(f"{len(results)} rules", everything)


def _summary(title: str, outcomes: list[Outcome]) -> bool:
    counts = {v: sum(o.verdict == v for o in outcomes) for v in _COLOURS}
    print(f"{title}: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return counts["failed"] == 0


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 140, highlight=False)

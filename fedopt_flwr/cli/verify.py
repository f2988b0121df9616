"""`fedopt verify`: rules against problems with known answers."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..algorithms import ALGORITHMS, load_rule
from ..errors import ConfigError
from ..own_code import load_attribute
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
    results = _run_checks(name, strategy)
    title = f"{len(results)} rules" if len(results) > 1 else next(iter(results))
    table = _totals(results) if len(results) > 1 else _details(results[title])
    Console(width=None if sys.stdout.isatty() else 140, highlight=False).print(table)
    counts: Counter[str] = Counter(o.verdict for group in results.values() for o in group)
    print(f"{title}: " + ", ".join(f"{counts[verdict]} {verdict}" for verdict in _COLOURS))
    if counts["failed"]:
        raise typer.Exit(1)


def _run_checks(name: str | None, strategy: str | None) -> dict[str, list[Outcome]]:
    from ..conformance import verify_pair, verify_rule

    folders = [Path.cwd()]
    if strategy is not None:
        if name is None:
            raise ConfigError(
                "verify NAME: is missing; with --strategy, NAME must be the module:attribute that "
                "makes a client"
            )
        make_client = load_attribute("verify NAME", name, folders)
        make_strategy = load_attribute("verify --strategy", strategy, folders)
        return {f"{strategy} with {name}": verify_pair(make_strategy, make_client)}
    if name is not None:
        return {name: verify_rule(load_rule(name, folders))}
    return {rule: verify_rule(kind) for rule, kind in ALGORITHMS.items()}


def _details(outcomes: list[Outcome]) -> Table:
    table = Table("check", "outcome", "why", box=None, pad_edge=False)
    for outcome in outcomes:
        colour = _COLOURS[outcome.verdict]
        table.add_row(outcome.check, f"[{colour}]{outcome.verdict}[/]", escape(outcome.note))
    return table


def _totals(results: dict[str, list[Outcome]]) -> Table:
    table = Table("rule", *_COLOURS, "why", box=None, pad_edge=False)
    for rule, outcomes in results.items():
        counts = [str(sum(o.verdict == verdict for o in outcomes)) for verdict in _COLOURS]
        failed = [f"{o.check}: {o.note}" for o in outcomes if o.verdict == "failed"]
        table.add_row(rule, *counts, escape("\n".join(failed)))
    return table

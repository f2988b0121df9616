"""`fedopt algorithms`: the rules, their formulas and what travels; needs no torch."""

from __future__ import annotations

import inspect
import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..algorithm import Algorithm, Plan
from ..algorithms import ALGORITHMS
from ..errors import ConfigError
from ..problems import unknown_name

_USUAL = Plan(  # equal clients and a long run: nothing is capped, everything lean is lean
    num_clients=2,
    clients_per_round=1,
    num_rounds=10**6,
    num_examples={0: 100, 1: 100},
    local_steps={0: 10, 1: 10},
    importance={0: 0.5, 1: 0.5},
)


def algorithms(
    name: Annotated[str | None, typer.Argument(help="Only this one, in full.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects.")] = False,
    markdown: Annotated[bool, typer.Option(help="Print docs/algorithms.md.")] = False,
) -> None:
    """Say which rules there are, what they need and what travels."""
    if name is not None and name not in ALGORITHMS:
        raise ConfigError(unknown_name("algorithms NAME", name, ALGORITHMS))
    described = [describe(rule) for rule in ([ALGORITHMS[name]] if name else ALGORITHMS.values())]
    if as_json:
        print(json.dumps(described, indent=2, ensure_ascii=False))
    elif markdown:
        print(markdown_pages(described))
    elif name:
        from rich.markdown import Markdown

        width = None if sys.stdout.isatty() else 100
        Console(width=width, highlight=False).print(Markdown(_markdown(described[0])))
    else:
        table = Table(
            "name", "what it does", "vectors down/up", "start pass", box=None, pad_edge=False
        )
        for rule in described:
            travel = f"{len(rule['down'])}/{len(rule['up'])}"
            start = "yes" if rule["start_pass"] else "no"
            table.add_row(rule["name"], rule["title"], travel, start)
        Console().print(table)


def describe(rule: type[Algorithm]) -> dict[str, Any]:
    """Return name, title, equations, citation, fields and travel of a rule as plain values."""
    documentation = inspect.cleandoc(sys.modules[rule.__module__].__doc__ or "")
    title, _, source = documentation.partition("\n")
    instance = rule().resolve(_USUAL)
    fields = {
        name: {"symbol": info.title, "default": info.default, "description": info.description}
        for name, info in rule.model_fields.items()
    }
    return {
        "name": rule.name,
        "title": title,
        "equations": inspect.cleandoc(rule.__doc__ or ""),
        "source": source.strip(),
        "fields": fields,
        "down": list(instance.broadcast_names),
        "up": list(instance.upload_names),
        "start_pass": list(instance.start_names),
        "server_state": list(rule.server_state),
        "client_state": list(rule.client_state),
    }


def markdown_pages(rules: list[dict[str, Any]]) -> str:
    """Return docs/algorithms.md: for every rule formula, source, fields and what travels."""
    head = ["# The rules", "Written by `fedopt algorithms --markdown`; do not edit by hand."]
    return "\n\n".join([*head, *map(_markdown, rules)])


def _markdown(rule: dict[str, Any]) -> str:
    fields = ["| field | symbol | default | meaning |", "|---|---|---|---|"]
    for name, field in rule["fields"].items():
        default = "–" if field["default"] is None else f"`{field['default']}`"
        meaning = field["description"]
        fields.append(f"| `{name}` | {field['symbol'] or ''} | {default} | {meaning} |")
    formula = "\n".join(f"    {line}".rstrip() for line in rule["equations"].splitlines())
    travel = {
        "down": rule["down"],
        "up": rule["up"],
        "round 0, all clients, up": rule["start_pass"],
        "the server keeps": rule["server_state"],
        "a client keeps": rule["client_state"] or ["nothing"],
    }
    parts = [f"## {rule['name']}", f"{rule['title'].rstrip('.')}.", formula, rule["source"]]
    lines = [f"- {what}: {', '.join(names)}" for what, names in travel.items() if names]
    parts += ["\n".join(fields), "\n".join(lines)]
    return "\n\n".join(parts)

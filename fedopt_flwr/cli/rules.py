"""What `fedopt algorithms` says; needs no torch."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from ..algorithm import Algorithm


def describe(rule: type[Algorithm]) -> dict[str, Any]:
    """Return name, title, equations, citation, fields and travel of a rule as plain values."""
    documentation = inspect.cleandoc(sys.modules[rule.__module__].__doc__ or "")
    title, _, source = documentation.partition("\n")
    instance = rule()
    fields = {
        name: {
            "symbol": info.title,
            "default": info.default,
            "description": info.description,
        }
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
    }


def print_rules(rules: list[dict[str, Any]]) -> None:
    """Print one line a rule."""
    table = Table("name", "what it does", "vectors down/up", "start pass", box=None, pad_edge=False)
    for rule in rules:
        travel = f"{len(rule['down'])}/{len(rule['up'])}"
        table.add_row(rule["name"], rule["title"], travel, "yes" if rule["start_pass"] else "no")
    Console().print(table)


def print_rule(rule: dict[str, Any]) -> None:
    """Print all there is to know about one rule."""
    console = Console(highlight=False)
    console.print(rule["title"], style="bold", soft_wrap=True)
    text = f"\n{rule['equations']}\n\n{rule['source']}\n"
    console.print(text, markup=False, soft_wrap=True)
    table = Table("field", "symbol", "default", "meaning", box=None, pad_edge=False)
    for name, field in rule["fields"].items():
        default = "derived" if field["default"] is None else str(field["default"])
        table.add_row(name, field["symbol"] or "", default, field["description"])
    console.print(table)
    console.print(f"\ndown: {', '.join(rule['down'])}\nup:   {', '.join(rule['up'])}", markup=False)
    if rule["start_pass"]:
        console.print(f"round 0, all clients, up: {', '.join(rule['start_pass'])}", markup=False)

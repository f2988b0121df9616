"""How much must be read to know a rule, and that its docstring says where the rest stands."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import fedopt_flwr
from fedopt_flwr.algorithms import ALGORITHMS

PACKAGE = Path(fedopt_flwr.__file__).parent


def imported(path: Path) -> set[str]:
    """Modules beside this one that it imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found |= {node.module} if node.module else {alias.name for alias in node.names}
    return {name.split(".")[0] for name in found}


def to_read(name: str, folder: Path) -> set[str]:
    """A module and all that it imports from its own folder, directly or not."""
    found, waiting = set(), [name]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting += imported(folder / f"{current}.py")
    return found


@pytest.mark.parametrize("name", ALGORITHMS)
def test_at_most_three_files_hold_a_whole_rule(name: str) -> None:
    files = to_read(name, PACKAGE / "algorithms")
    assert len(files) <= 3, sorted(files)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_rule_names_the_rules_it_takes_something_from(name: str) -> None:
    folder = PACKAGE / "algorithms"
    text = ast.get_docstring(ast.parse((folder / f"{name}.py").read_text(encoding="utf-8"))) or ""
    others = {file for file in to_read(name, folder) if not file.startswith("_")} - {name}
    assert set(re.findall(r"Taken from `(\w+)`", text)) == others


def test_the_conformance_suite_has_no_circle_of_imports() -> None:
    folder = PACKAGE / "conformance"
    modules = [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]
    for module in modules:
        below = set().union(*(to_read(name, folder) for name in imported(folder / f"{module}.py")))
        assert module not in below

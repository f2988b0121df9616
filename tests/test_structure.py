"""Import directions, start-up imports, and that every table says what the folders hold."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedopt_flwr
from fedopt_flwr.algorithms import ALGORITHMS
from fedopt_flwr.cli.rules import describe, markdown_pages, markdown_table

PACKAGE = Path(fedopt_flwr.__file__).parent
ROOMS = {
    "errors": 0,
    "seeding": 0,
    "generators": 0,
    "devices": 1,
    "imports": 1,
    "vectors": 1,
    "settings": 1,
    "config": 1,
    "algorithm": 1,
    "client_ids": 1,
    "checkpoints": 2,
    "algorithms": 2,
    "sampling": 2,
    "schedules": 2,
    "conformance": 3,
    "joining": 1,
    "single_examples": 1,
    "shapes": 1,
    "objectives": 2,
    "trial": 3,
    "models": 2,
    "data": 2,
    "metrics": 2,
    "outputs": 2,
    "plots": 2,
    "flower": 3,
    "engines": 3,
    "experiment": 4,
    "resuming": 4,
    "runs": 4,
    "simulation": 4,
    "deployment": 4,
    "strategies": 4,
    "clients": 4,
    "cli": 5,
    "__main__": 5,
}
MAY_IMPORT = {
    "flwr": {"flower", "engines"},
    "grpc": {"engines"},
    "ray": {"engines"},
    "typer": {"cli"},
}


def imports(path: Path) -> Iterator[str]:
    """Absolute names of everything a file imports, inside functions too."""
    package = list(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            level = node.level - (path.name == "__init__.py")
            base = package[: len(package) - level] if node.level else []
            yield ".".join([*base, *([node.module] if node.module else [])])


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "fedopt_flwr" else None


def violations(path: Path, names: Iterator[str]) -> list[str]:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    found = []
    for name in names:
        room = room_of(name)
        if room and ROOMS[room] > ROOMS[own]:
            found.append(
                f"{path}: imports {name}: room {ROOMS[own]} must not import room {ROOMS[room]}"
            )
        allowed = MAY_IMPORT.get(name.split(".")[0])
        if allowed is not None and own not in allowed:
            found.append(f"{path}: imports {name}: only {sorted(allowed)} may")
    return found


FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if p != PACKAGE / "__init__.py"]


def test_no_room_imports_a_higher_one() -> None:
    found = [line for path in FILES for line in violations(path, imports(path))]
    assert not found, "\n".join(found)


def test_the_import_test_can_fail() -> None:
    path = PACKAGE / "algorithms" / "fedavg.py"
    names = ["fedopt_flwr.experiment", "flwr.common", "typer", "fedopt_flwr.algorithm"]
    assert len(violations(path, iter(names))) == 3


def test_modules_stay_small() -> None:
    long = {p.name: n for p in FILES if (n := len(p.read_text().splitlines())) > 300}
    assert not long, long


def test_table_of_rules_equals_the_files() -> None:
    files = {p.stem for p in (PACKAGE / "algorithms").glob("*.py") if not p.stem.startswith("_")}
    assert set(ALGORITHMS) == files
    assert all(rule.__module__.endswith(f".{name}") for name, rule in ALGORITHMS.items())


def test_every_rule_documents_source_deviations_and_defaults() -> None:
    for name, rule in ALGORITHMS.items():
        text = sys.modules[rule.__module__].__doc__ or ""
        assert "Deviations:" in text, name
        assert "Algorithm" in text, name
        dated = any(str(year) in text for year in range(2017, 2026))
        assert dated or "withheld for\nreview" in text or "see `fadamgc`" in text, name
        assert all(info.description for info in rule.model_fields.values()), name


def loaded_after(code: str) -> set[str]:
    program = f"import sys\n{code}\nprint('\\n'.join(sys.modules))"
    output = subprocess.check_output([sys.executable, "-W", "ignore", "-c", program], text=True)
    return {line.split(".")[0] for line in output.splitlines()}


@pytest.mark.parametrize(
    "code",
    [
        "import fedopt_flwr.cli",
        "from fedopt_flwr.algorithms import ALGORITHMS",
        "from typer.testing import CliRunner; from fedopt_flwr.cli import app\n"
        "assert CliRunner().invoke(app, ['algorithms']).exit_code == 0",
        "from typer.testing import CliRunner; from fedopt_flwr.cli import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0",
    ],
)
def test_help_and_the_list_of_rules_import_nothing_heavy(code: str) -> None:
    heavy = {
        "torch",
        "torchvision",
        "flwr",
        "flwr_datasets",
        "datasets",
        "ray",
        "sklearn",
        "matplotlib",
    }
    assert not loaded_after(code) & heavy


def test_public_names_are_those_that_can_be_imported() -> None:
    for name in fedopt_flwr.__all__:
        assert getattr(fedopt_flwr, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fedopt_flwr.nothing


def test_version_is_the_same_everywhere() -> None:
    import tomllib

    root = PACKAGE.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    changelog = (root / "CHANGELOG.md").read_text()
    assert fedopt_flwr.__version__ == project["version"]
    assert f"## {project['version']}" in changelog


def test_json_list_of_rules_is_a_list_of_objects_with_names() -> None:
    output = subprocess.check_output(
        [Path(sys.executable).parent / "fedopt", "algorithms", "--json"]
    )
    rules = json.loads(output)
    assert [rule["name"] for rule in rules] == list(ALGORITHMS)


def test_readme_and_docs_hold_what_the_table_of_rules_says() -> None:
    described = [describe(rule) for rule in ALGORITHMS.values()]
    root = PACKAGE.parent
    assert markdown_table(described) in (root / "README.md").read_text(encoding="utf-8")
    pages = (root / "docs" / "algorithms.md").read_text(encoding="utf-8")
    assert pages == markdown_pages(described) + "\n"  # else: fedopt algorithms --markdown


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_rule_names_the_state_that_it_keeps(name: str) -> None:
    import torch
    from helpers import make_plan

    rule = ALGORITHMS[name]()
    server = rule.init_server(torch.zeros(2), make_plan(2, [1, 1]))
    assert set(server.vectors) <= set(rule.server_state)
    assert tuple(rule.init_client(2)) == rule.client_state

"""Size and order of the package, start-up imports, and that every table says what folders hold."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import structure

import fedopt_flwr
from fedopt_flwr.algorithms import ALGORITHMS
from fedopt_flwr.cli.algorithms import describe, markdown_pages

PACKAGE = Path(fedopt_flwr.__file__).parent


def test_the_structure_stays_within_its_limits() -> None:
    found = structure.counts()
    assert {name: n for name, n in found.items() if n > structure.LIMITS[name]} == {}
    assert structure.circles() == []


def test_a_circle_of_imports_is_noticed() -> None:
    graph = {"one": {"two"}, "two": {"three"}, "three": {"one"}, "four": {"one"}}
    assert structure.reach(graph, "one") == {"one", "two", "three"}
    assert structure.groups_in_a_circle(graph) == [["one", "three", "two"]]


def lint(config: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache", "--config", config]
    return subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True)


def test_the_order_of_the_rooms_is_held_by_the_linter(tmp_path: Path) -> None:
    """`make lint` runs it; here with two rooms exchanged, which must be noticed."""
    whole = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    contracts = whole[whole.index("[tool.importlinter]") :]
    config = tmp_path / "pyproject.toml"
    config.write_text(contracts)
    assert lint(config).returncode == 0
    exchanged = contracts.replace('"config",\n', '"X",\n', 1)
    exchanged = exchanged.replace('"data",\n', '"config",\n', 1).replace('"X"', '"data"', 1)
    assert exchanged != contracts
    config.write_text(exchanged)
    found = lint(config)
    assert found.returncode == 1
    assert (
        "fedopt_flwr.config is not allowed to import" in found.stdout
        or "fedopt_flwr.data is not allowed to import" in found.stdout
    )


def test_contributing_names_every_room() -> None:
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tree = text[text.index("## The rooms") : text.index("## Adding a rule")]
    assert {room for room in structure.rooms() if f"{room}" not in tree} == set()


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
    rows = [
        f"| `{rule['name']}` | {rule['title']} | {len(rule['down'])}/{len(rule['up'])} | "
        f"{'yes' if rule['start_pass'] else ''} |"
        for rule in described
    ]
    table = ["| name | what it does | vectors down/up | round 0 |", "|---|---|---|---|", *rows]
    assert "\n".join(table) in (root / "README.md").read_text(encoding="utf-8")
    pages = (root / "docs" / "algorithms.md").read_text(encoding="utf-8")
    assert pages == markdown_pages(described) + "\n"  # else: fedopt algorithms --markdown


def test_promises_name_tests_that_exist() -> None:
    root = PACKAGE.parent
    text = (root / "docs" / "reliability.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_/]+\.py)`", text))
    assert len(named) > 15
    assert [name for name in sorted(named) if not (root / "tests" / name).is_file()] == []


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_rule_names_the_state_that_it_keeps(name: str) -> None:
    import torch
    from helpers import make_plan

    rule = ALGORITHMS[name]()
    server = rule.init_server(torch.zeros(2), make_plan(2, [1, 1]))
    assert set(server.vectors) <= set(rule.server_state)
    assert tuple(rule.init_client(2)) == rule.client_state

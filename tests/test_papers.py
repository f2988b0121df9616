"""The papers' experiments as files: each is a configuration, and each of its commands is valid."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedopt_flwr import RunConfig
from fedopt_flwr.cli import app, comparison
from fedopt_flwr.cli.claims import STUDIES

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "examples/papers").glob("*.toml"))
AUDITED = [
    *(f"p{i}" for i in range(1, 7)),
    *(f"c{i}" for i in range(1, 8)),
    *(f"m{i}" for i in range(1, 4)),
    *(f"g{i}" for i in range(1, 10)),
]


def test_every_experiment_and_every_study_has_its_file() -> None:
    names = {file.stem for file in FILES if not file.stem.endswith(".small")}
    assert names == set(AUDITED)
    small = {file.name for file in FILES if file.stem.endswith(".small")}
    assert small == {study.file for study in STUDIES.values()}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_commands_of_a_file_are_valid(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that `compare` checks before it reads data, with the arguments as they stand there."""
    RunConfig.from_file(file)
    text = file.read_text(encoding="utf-8")
    commands = re.findall(r"^#     fedopt (compare .*)$", text, re.MULTILINE)
    assert commands
    checked: list[Any] = []

    def check(asked: comparison.Comparison, **_: int) -> None:
        checked.append(comparison._configs(asked))

    monkeypatch.setattr(comparison, "run_comparison", check)
    monkeypatch.chdir(ROOT)
    for command in commands:
        assert f"examples/papers/{file.name}" in command
        result = CliRunner().invoke(app, shlex.split(command))
        assert result.exit_code == 0, (command, result.output, result.exception)
    assert len(checked) == len(commands)
    for configs in checked:
        assert all(config.make_rule() for config in configs.values())

"""The command where Python lacks what only some systems have, as on Windows and macOS."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
sys.modules["fcntl"] = None
for name in ("sched_getaffinity", "sched_setaffinity"):
    if hasattr(os, name):
        delattr(os, name)
sys.argv = ["fedopt", *sys.argv[1:]]
from fedopt_flwr.cli import main
main()
"""


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["simulate", "--set", "federation.num_rounds=2"], marks=pytest.mark.slow),
        ["algorithms"],
        pytest.param(["partition"], marks=pytest.mark.slow),
        pytest.param(["doctor"], marks=pytest.mark.slow),
        pytest.param(
            ["launch", "--clients", "5", "--processes", "1", "--set", "federation.num_rounds=1"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_verb_works_without_fcntl_and_affinity(tmp_path: Path, arguments: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr


def test_the_python_interface_can_be_imported_without_fcntl() -> None:
    program = "import sys; sys.modules['fcntl'] = None; from fedopt_flwr import simulate"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)

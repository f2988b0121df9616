"""The wheel holds all that a user's installation needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = "Scripts" if os.name == "nt" else "bin"


@pytest.fixture(scope="module")
def fedopt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of an environment that has the wheel, and the dependencies of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet"]
    source = folder / "source"  # a copy, as building leaves files beside the package
    source.mkdir()
    shutil.copytree(ROOT / "fedopt_flwr", source / "fedopt_flwr")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source]
    subprocess.run(build, check=True, cwd=folder)
    (wheel,) = folder.glob("fedopt_flwr-*.whl")
    environment = folder / "environment"
    venv.create(environment, with_pip=False)
    python = environment / BIN / "python"
    subprocess.run([*pip, "--python", python, "install", "--no-deps", wheel], check=True)
    # a path file inside of another environment's is not read, so this repository stays unknown
    (own,) = environment.glob("**/site-packages")
    (own / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    where = "import fedopt_flwr; print(fedopt_flwr.__file__)"
    found = subprocess.check_output([python, "-c", where], cwd=folder, text=True)
    assert str(environment) in found
    return environment / BIN / "fedopt"


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["simulate", "launch"])
def test_an_installed_wheel_runs_from_an_empty_folder(
    verb: str, fedopt: Path, tmp_path: Path
) -> None:
    settings = ["--set", "federation.num_rounds=5", "--set", "federation.num_clients=5"]
    run = subprocess.run(
        [fedopt, verb, *settings], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert {"model.safetensors", "summary.json", "curves.png"} <= {p.name for p in folder.iterdir()}
    page = [fedopt, "report", folder, "--output", "page.html"]  # needs files that are no modules
    subprocess.run(page, cwd=tmp_path, check=True, timeout=120)
    assert (tmp_path / "page.html").stat().st_size > 4_000_000

"""Apps of Flower's Message API under Flower's runtimes: Ray, and a SuperLink with SuperNodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import message_app
import pytest
from message_app import ROUNDS, SIZES, data, make_model
from superlinks import SuperLink

from fedopt_flwr import serverapp, simulate, strategies

ROOT = Path(__file__).parents[2]
RULES = sorted({*serverapp.__all__} - {"RuleStrategy", "Strategy"})
SIMULATED = """
import sys
import torch
from flwr.simulation import run_simulation
torch.manual_seed(0)  # the example draws its first model at random
import {app} as app
resources = {{"client_resources": {{"num_cpus": 1, "num_gpus": 0.0}}}}
run_simulation(app.server_app, app.client_app, num_supernodes={nodes}, backend_config=resources)
"""
PROJECT = """
[project]
name = "message-app"
version = "1.0.0"
[tool.flwr.app]
publisher = "test"
[tool.flwr.app.components]
serverapp = "message_app:server_app"
clientapp = "message_app:client_app"
[tool.flwr.app.config]
rules = ""
results = ""
"""


def in_process(rule: str) -> list[str]:
    """What the same rule ends with in `fedopt simulate`."""
    sizes = {name: SIZES[name] for name in ("num_clients", "clients_per_round")}
    config = {
        "algorithm": {"name": getattr(strategies, rule).kind.name},
        "federation": sizes | {"num_rounds": ROUNDS},
        "training": {name: SIZES[name] for name in ("local_steps", "batch_size")},
    }
    result = simulate(config, make_model, [data(i) for i in range(3)])
    return [value.numpy().tobytes().hex() for value in result.model.state_dict().values()]


def simulated(app: str, folder: Path, nodes: int, **environment: str) -> str:
    script = SIMULATED.format(app=app, nodes=nodes)
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_rule_ends_with_the_same_bits_on_ray(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    path = str(Path(message_app.__file__).parent)
    environment = {"RULES": ",".join(RULES), "RESULTS": str(results), "PYTHONPATH": path}
    simulated("message_app", tmp_path, 3, **environment)
    found = json.loads(results.read_text())
    assert found == {rule: in_process(rule) for rule in RULES}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_three_rules_end_with_the_same_bits_on_a_superlink(
    superlink: SuperLink, tmp_path: Path
) -> None:
    rules, results = ("FedAvg", "ScaffoldM", "PAdaMFed"), tmp_path / "results.json"
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(PROJECT)
    (project / "message_app.py").write_text(Path(message_app.__file__).read_text())
    run = superlink.run(f'rules="{",".join(rules)}" results="{results}"', project)
    assert results.exists(), run.stdout + run.stderr + superlink.logs()
    assert json.loads(results.read_text()) == {rule: in_process(rule) for rule in rules}


@pytest.mark.slow
def test_the_example_runs_on_ray_and_learns(tmp_path: Path) -> None:
    path = str(ROOT / "examples" / "message_api")
    words = simulated("app", tmp_path, 5, PYTHONPATH=path)
    last = words.rpartition("20: {'accuracy': '")[2].partition("'")[0]
    assert float(last) > 0.7, words[-3000:]


def test_the_example_is_under_50_lines() -> None:
    source = (ROOT / "examples" / "message_api" / "app.py").read_text().splitlines()
    assert sum(1 for line in source if line.strip() and not line.startswith(("#", '"""'))) < 50

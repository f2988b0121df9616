"""Under Flower's own runtimes: Ray, and a real SuperLink with SuperNodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import RecordDict
from processes import Processes, require_c_is_the_mean, wait_until
from superlinks import RUN_SECONDS, SuperLink

from fedopt_flwr import ConfigError, MessageError, RunConfig, simulate
from fedopt_flwr.algorithms import ALGORITHMS
from fedopt_flwr.flower import ContextStates
from fedopt_flwr.run.flower_apps import _PLACES, client_of_node, read_run_config

ROOT = Path(__file__).parents[2]
DEFAULTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
ON_RAY = ("autofed", "fadamgc")  # unlike in what travels


def test_pyproject_declares_the_keys_that_are_read() -> None:
    assert DEFAULTS.keys() == {*_PLACES, "algorithm-options", "config-file"}
    defaults = RunConfig().to_dict()
    for key, place in _PLACES.items():
        section, name = place.split(".")
        assert DEFAULTS[key] == defaults[section].get(name, "")
    assert read_run_config(DEFAULTS).to_dict() == defaults


def test_run_config_keys_reach_their_places() -> None:
    config = read_run_config(
        {**DEFAULTS, "algorithm": "fedavg_m", "num-rounds": 7, "data": "synthetic"}
        | {"algorithm-options": "momentum = 0.5, client_learning_rate = 0.1"}
    )
    assert config.algorithm.hyperparameters == {"momentum": 0.5, "client_learning_rate": 0.1}
    assert (config.algorithm.name, config.data.name) == ("fedavg_m", "synthetic")
    assert config.federation.num_rounds == 7


def test_a_config_file_counts_and_keys_beside_it_where_they_are_not_the_default(
    tmp_path: Path,
) -> None:
    path = tmp_path / "own.toml"
    path.write_text("[federation]\nnum_rounds = 9\nseed = 3\n[algorithm]\nname = 'scaffold'\n")
    config = read_run_config({**DEFAULTS, "config-file": str(path), "seed": 4})
    assert (config.federation.num_rounds, config.federation.seed) == (9, 4)
    assert config.algorithm.name == "scaffold"


def test_options_that_are_no_toml_are_refused_with_an_example() -> None:
    with pytest.raises(ConfigError, match=r"algorithm-options: got 'momentum: 1'.*write it as"):
        read_run_config({**DEFAULTS, "algorithm-options": "momentum: 1"})


def test_a_node_without_an_id_is_told_how_to_get_one() -> None:
    context = SimpleNamespace(node_config={}, state=RecordDict())
    with pytest.raises(ConfigError, match=r'--node-config "client-id=0"'):
        client_of_node(RunConfig(), context)


def test_states_in_a_context_are_kept_by_run_client_and_version() -> None:
    records = RecordDict()
    states = ContextStates(records, "a")
    for version in (0, 2):
        states.save(1, version, {"control_variate": torch.full((3,), float(version))})
    states.save(11, 2, {"control_variate": torch.ones(3)})
    assert ContextStates(records, "a").load(1, 2)["control_variate"].tolist() == [2.0] * 3
    states.prune(1, {2})
    with pytest.raises(MessageError, match=r"client 1: state of round 0 is asked for; has \[2\]"):
        states.load(1, 0)
    assert states.load(11, 2)["control_variate"].tolist() == [1.0] * 3
    with pytest.raises(MessageError, match=r"has \[\]"):
        ContextStates(records, "b").load(1, 2)


def settings_of(rule: str, folder: Path, num_clients: int = 3) -> list[str]:
    return [
        f"algorithm.name={rule}",
        f"federation.num_clients={num_clients}",
        "federation.clients_per_round=2",
        "federation.num_rounds=3",
        f"output.directory={folder}",
    ]


def vector_in(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def evaluations_in(folder: Path) -> list[Any]:
    return [record["on_clients"] for record in read_records(folder)]


# that of the Message API has all rules on Ray in one simulation
@pytest.mark.slow
@pytest.mark.parametrize(
    "rule",
    [*ON_RAY, *(pytest.param(r, marks=pytest.mark.long) for r in ALGORITHMS if r not in ON_RAY)],
)
def test_ray_gives_the_same_bits_as_one_process(processes: Processes, rule: str) -> None:
    folder, alone = processes.folder / "ray", processes.folder / "alone"
    beside = ["data.holdout=0.2", "evaluation.on_clients=true", "evaluation.every=2"]
    if rule == "autofed":  # what it found is in use from round 11 on
        beside.append("federation.num_rounds=16")
    given = [part for s in [*settings_of(rule, folder), *beside] for part in ("--set", s)]
    run = processes.start("ray", "simulate", "--engine", "ray", *given)
    assert run.ended() == 0, run.log
    simulate(RunConfig.from_file(None, [*settings_of(rule, alone), *beside]))
    assert vector_in(folder) == vector_in(alone)
    assert evaluations_in(folder) == evaluations_in(alone)
    assert evaluations_in(folder)[-1]["spread"]["accuracy"]["clients"] == 3
    assert rule != "autofed" or 0 < read_records(folder)[-1]["chosen"]["ramp_end"] < 16


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_on_ray_that_is_stopped_ends(
    processes: Processes, ending: signal.Signals, code: int
) -> None:
    folder = processes.folder / "ray"
    endless = [*settings_of("scaffold_m", folder), "federation.num_rounds=100000"]
    endless.append("output.checkpoint_every=1")
    given = [part for setting in endless for part in ("--set", setting)]
    run = processes.start("ray", "simulate", "--engine", "ray", *given)
    records = folder / "rounds.jsonl"
    wait_until(lambda: records.exists() and records.stat().st_size > 0, lambda: run.log)
    run.process.send_signal(ending)
    assert run.ended() == code, run.log
    assert "with this rule and --engine ray cannot be resumed" in run.log
    assert "Traceback" not in run.log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("superlink", "rules"),
    [
        ("subprocess", ["fedavg", "fadamgc", "mb_storm"]),
        ("process", ["padamfed"]),
        ("simulation", ["scaffold_m"]),
    ],
    indirect=["superlink"],
)
def test_flwr_run_with_three_supernodes_gives_the_same_bits(
    superlink: SuperLink, rules: Sequence[str]
) -> None:
    for rule in rules:
        folder = superlink.folder / f"link-{rule}"
        keys = "num-clients=3 clients-per-round=2 num-rounds=3"
        result = superlink.run(f'{keys} algorithm="{rule}" output-directory="{folder}"')
        assert (folder / "model.safetensors").exists(), result.stdout + result.stderr
        alone = superlink.folder / f"alone-{rule}"
        simulate(RunConfig.from_file(None, settings_of(rule, alone)))
        assert vector_in(folder) == vector_in(alone)


@pytest.mark.slow
def test_a_supernode_restarted_between_rounds_goes_on_from_its_disk(superlink: SuperLink) -> None:
    config = superlink.folder / "federation.toml"
    folder = superlink.folder / "run"
    config.write_text(
        f"""
        [federation]
        num_clients = 3
        clients_per_round = 3
        num_rounds = 4
        round_timeout = 60.0
        [data]
        holdout = 0.2
        [evaluation]
        on_clients = true
        every = 4
        [output]
        directory = "{folder}"
        checkpoint_every = 1
        """
    )
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(superlink.run, f'config-file="{config}"')
        wait_until(
            lambda: (
                running.done()
                or ((folder / "rounds.jsonl").exists() and len(read_records(folder)) >= 2)
            ),
            superlink.logs,
            RUN_SECONDS,
        )
        assert not running.done(), running.result().stdout + superlink.logs()
        superlink.stop_node(1)
        superlink.start_node(1)
        running.result()
    records = read_records(folder)
    assert [r["round"] for r in records] == [0, 1, 2, 3, 4]
    assert records[-1]["clients"] == [0, 1, 2]
    assert [c["client"] for c in records[-1]["on_clients"]["clients"]] == [0, 1, 2]
    require_c_is_the_mean(superlink.folder)


def read_records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_quickstart_runs_on_ray_and_learns(tmp_path: Path) -> None:
    script = """
import torch
torch.manual_seed(0)  # the example draws its first model at random
import app
from flwr.simulation import run_simulation
run_simulation(
    server_app=app.server_app,
    client_app=app.client_app,
    num_supernodes=app.CLIENTS,
    backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
)
print("accuracy", app.evaluate(0, [p.detach().numpy() for p in app.model.parameters()], {})[1])
"""
    (tmp_path / "run.py").write_text(script)
    path = str(ROOT / "examples" / "quickstart")
    run = subprocess.run(
        [sys.executable, "run.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    accuracy = float(run.stdout.split("'accuracy':")[-1].strip(" }\n"))
    assert accuracy > 0.7, run.stdout


def test_the_quickstart_is_under_40_lines() -> None:
    source = (ROOT / "examples" / "quickstart" / "app.py").read_text().splitlines()
    assert sum(1 for line in source if line.strip() and not line.startswith(("#", '"""'))) < 40


@pytest.mark.slow
def test_own_code_that_fails_on_rays_clients_ends_the_run_with_its_text(
    processes: Processes, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "x, y = torch.randn(40, 4), torch.arange(40) % 3\n"
        "def data(num_clients, seed):\n"
        "    return torch.utils.data.TensorDataset(x, y), None\n"
        "def model():\n"
        "    return torch.nn.Linear(4, 3)\n"
        "def loss(outputs, targets):\n"
        "    raise ValueError('no loss today')\n"
    )
    own = ["data.name=own:data", "model.name=own:model", "model.loss=own:loss"]
    sizes = ["num_clients=3", "clients_per_round=2", "num_rounds=1"]
    settings = [*own, *(f"federation.{size}" for size in sizes), "data.partition.kind=iid"]
    options = [part for setting in settings for part in ("--set", setting)]
    run = processes.start("ray", "simulate", "--engine", "ray", "--algorithm", "scaffold", *options)
    assert run.ended() == 1
    assert "Traceback" not in run.log
    assert "no client finished the start pass; client 0: ValueError: no loss today (" in run.log


@pytest.mark.slow
def test_a_simulation_that_cannot_start_ends_with_the_reason(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("raise ImportError('ray is broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = processes.start("ray", "simulate", "--engine", "ray", "--algorithm", "fedavg")
    assert run.ended() == 1
    assert "error: --engine ray: Flower's simulation ended: ImportError: ray is broken" in run.log
    assert "Traceback" not in run.log
    assert not (tmp_path / "runs").exists()

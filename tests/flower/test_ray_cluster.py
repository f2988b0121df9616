"""`fedopt simulate --engine ray`: on a cluster of two nodes, and where processes die."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from processes import PATIENCE, Process, Processes, fedopt, refused, wait_until
from ray_clusters import RayCluster

from fedopt_flwr import RunConfig, simulate

OWN = '''
import json, os, time
from pathlib import Path
import numpy as np
import torch

if os.environ.get("CANNOT_IMPORT"):
    import a_module_of_another_machine

def data(num_clients, seed):
    """What lies beside this file, or where TABLE says."""
    table = np.load(os.environ.get("TABLE") or Path(__file__).parent / "table.npz")
    data = torch.utils.data.TensorDataset(*map(torch.from_numpy, (table["x"], table["y"])))
    return data, data

class Net(torch.nn.Linear):
    """Notes where it trains, on what; with a file DEADLY its process dies in that."""

    def forward(self, x):
        import ray

        if self.training and torch.is_grad_enabled() and ray.is_initialized():
            deadly = os.environ.get("DEADLY")
            if deadly and (os.path.exists(deadly + ".always") or os.path.exists(deadly)):
                Path(deadly).unlink(missing_ok=True)
                os._exit(1)
            node = ray.get_runtime_context().get_node_id()
            with open(os.environ["TRACE"], "a") as file:
                file.write(json.dumps([node, round(float(x.sum()), 3), __file__]) + "\\n")
            time.sleep(float(os.environ.get("STEP", "0")))
        return super().forward(x)

def model():
    return Net(20, 4)
'''


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with own code and its data, and beside it what the runs leave."""
    home = tmp_path_factory.mktemp("cluster")
    own = home / "own"
    own.mkdir()
    (own / "own.py").write_text(OWN)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 20)).astype(np.float32)
    np.savez(own / "table.npz", x=x, y=x[:, :4].argmax(1))
    config = {
        "algorithm": {"name": "scaffold_m"},
        "federation": {"num_clients": 8, "clients_per_round": 8, "num_rounds": 4},
        "training": {"local_steps": 2, "batch_size": 0},
        "model": {"name": "own:model"},
        "data": {"name": "own:data", "partition": {"kind": "iid"}},
    }
    (own / "run.toml").write_text(tomli_w.dumps(config))
    return home


@pytest.fixture(scope="module")
def cluster(home: Path) -> Iterator[RayCluster]:
    cluster = RayCluster({"TRACE": str(home / "trace"), "STEP": "0.1", "OMP_NUM_THREADS": "1"})
    try:
        cluster.start_head()
        cluster.start_other()
        yield cluster
    finally:
        cluster.close()


def start(processes: Processes, home: Path, *more: object) -> Process:
    (home / "trace").unlink(missing_ok=True)
    out = f"output.directory={processes.folder / 'ray'}"
    config = home / "own" / "run.toml"
    return processes.start("ray", "simulate", config, "--engine", "ray", "--set", out, *more)


def traced(home: Path) -> list[tuple[str, float, str]]:
    path = home / "trace"
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()]


def require_the_bits_of_one_process(home: Path, folder: Path, *more: str) -> None:
    settings = [f"output.directory={folder / 'alone'}", *more]
    simulate(RunConfig.from_file(home / "own" / "run.toml", settings))
    ray, alone = ((folder / name / "model.safetensors").read_bytes() for name in ("ray", "alone"))
    assert ray == alone


def failures(folder: Path) -> list[str]:
    lines = (folder / "ray" / "rounds.jsonl").read_text().splitlines()
    return [error["error"] for line in lines for error in json.loads(line)["errors"]]


@pytest.mark.slow
def test_clients_on_both_nodes_with_own_code_give_the_bits_of_one_process(
    processes: Processes, home: Path, cluster: RayCluster
) -> None:
    run = start(processes, home, "--ray-address", cluster.address)
    assert run.ended() == 0, run.log
    seen = traced(home)
    assert len({client for _, client, _ in seen}) == 8
    clients = {node: {c for n, c, _ in seen if n == node} for node, _, _ in seen}
    assert len(clients) == 2, clients
    assert all(len(own) > 1 for own in clients.values()), clients
    # a copy on each node, not the folder of this machine
    files = {Path(file) for _, _, file in seen}
    assert len(files) == 2, files
    assert not any(file.is_relative_to(home) for file in files)
    require_the_bits_of_one_process(home, processes.folder)


@pytest.mark.slow
def test_a_run_goes_on_where_a_node_is_killed_and_uses_one_that_comes_back(
    processes: Processes, home: Path, cluster: RayCluster
) -> None:
    # most of its processes are idle when it is killed
    cluster.kill("other")
    cluster.wait_until_alone()
    cluster.start_other(cpus=3)
    sizes = ("federation.num_rounds=120", "federation.clients_per_round=2")
    settings = (part for size in sizes for part in ("--set", size))
    run = start(processes, home, "--ray-address", cluster.address, *settings)
    run.wait_for("round 12/120")
    before = {node for node, *_ in traced(home)}
    cluster.kill("other")
    trained = len(traced(home))
    wait_until(lambda: len(traced(home)) > trained + 20, lambda: run.log)  # four rounds and more
    left = {node for node, *_ in traced(home)[-8:]}
    assert len(before) == 2
    assert len(left) == 1
    assert run.process.poll() is None, "over before the node came back"
    cluster.start_other()
    wait_until(lambda: run.process.poll() is not None, lambda: run.log, 300)
    assert run.process.returncode == 0, run.log
    after = {node for node, *_ in traced(home)}
    assert len(after - before) == 1, "the node that came back was not used"
    # what the lost node had in hand was trained on the other one, from the same state
    assert failures(processes.folder) == []
    require_the_bits_of_one_process(home, processes.folder, *sizes)


@pytest.mark.slow
def test_a_machine_that_cannot_train_is_named_before_the_start(
    processes: Processes, home: Path, cluster: RayCluster, tmp_path: Path
) -> None:
    fake = tmp_path / "elsewhere" / "torch-9.9.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    path = f"{fake.parent}:{os.environ.get('PYTHONPATH', '')}"
    for environment, text in (
        ({"TABLE": "/nowhere.npz"}, "No such file or directory: '/nowhere.npz'"),
        ({"CANNOT_IMPORT": "1"}, "No module named 'a_module_of_another_machine'"),
        ({"PYTHONPATH": path}, "has torch 9.9 (here "),
    ):
        cluster.kill("other")
        cluster.wait_until_alone()
        cluster.start_other(**environment)
        run = start(processes, home, "--ray-address", cluster.address)
        assert run.ended() == 2, run.log
        lines = [line for line in run.log.splitlines() if line.startswith("error:")]
        assert all("--ray-address: machine " in line for line in lines), run.log
        assert text in lines[0], run.log
        assert len({line.split(" (")[1][:8] for line in lines}) == 1, "only one cannot"
        assert not (processes.folder / "ray").exists()
        assert not (home / "trace").exists()
    cluster.kill("other")
    cluster.start_other()


@pytest.mark.slow
def test_what_the_cluster_cannot_do_is_said_before_the_start(
    processes: Processes, home: Path, cluster: RayCluster
) -> None:
    run = start(processes, home, "--ray-address", cluster.address, "--cpus-per-client", 4)
    assert run.ended() == 2
    assert "a client takes 4 CPU and 0 GPU, for which no machine of the Ray cluster" in run.log
    assert run.log.count(" has 1 CPU and 0 GPU") == 2
    run = start(processes, home, "--ray-address", cluster.address, "--gpus-per-client", 0.5)
    assert run.ended() == 2
    assert "a client takes 1 CPU and 0.5 GPU" in run.log
    hurried = ("--set", "federation.start_timeout=0.1")
    run = start(processes, home, "--ray-address", cluster.address, *hurried)
    assert run.ended() == 2
    assert run.log.count("no answer in 0.1 s (federation.start_timeout); are its CPUs taken") == 2
    assert "Traceback" not in run.log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            "import ray._private.utils as ray\nray.compute_version_info = lambda: ('1.13', '3.7')",
            "Ray: 1.13 Python: 3.7; install the same versions on all machines, and restart",
        ),
        (
            "import ray._private.runtime_env.packaging as ray\nray.GCS_STORAGE_MAX_SIZE = 2000",
            "own' is too large to travel, as own code does with its folder: Package size (0.0",
        ),
    ],
    ids=["version", "size"],
)
def test_what_ray_itself_refuses_is_said_with_its_remedy(
    home: Path, cluster: RayCluster, tmp_path: Path, change: str, text: str
) -> None:
    own = tmp_path / "own"  # not one that has travelled before
    shutil.copytree(home / "own", own)
    (own / "notes.txt").write_text(change)
    program = f"{change}\nfrom fedopt_flwr.cli import main\nmain()\n"
    options = ["--engine", "ray", "--ray-address", cluster.address]
    run = subprocess.run(
        [sys.executable, "-c", program, "simulate", "own/run.toml", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert run.returncode == 2, run.stderr
    assert text in run.stderr, run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_an_address_without_a_cluster_is_refused_within_seconds(
    processes: Processes, home: Path
) -> None:
    with socket.socket() as silent, socket.socket() as closed:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        closed.bind(("127.0.0.1", 0))
        for place in (silent, closed):
            address = "127.0.0.1:{1}".format(*place.getsockname())
            begun = time.monotonic()
            run = start(processes, home, "--ray-address", address)
            assert run.ended() == 2, run.log
            assert time.monotonic() - begun < 40  # of which Ray's own start is most
            assert f"--ray-address: no Ray cluster answers at '{address}' (" in run.log
            assert "Traceback" not in run.log


def test_an_address_is_host_and_port_and_for_ray_alone(tmp_path: Path) -> None:
    result = fedopt("simulate", "--ray-address", "127.0.0.1:6379", cwd=tmp_path)
    refused(result, "got '127.0.0.1:6379' beside --engine in-process", "add --engine ray, or")
    for address in ("auto", "ray://127.0.0.1:10001", "127.0.0.1"):
        result = fedopt("simulate", "--engine", "ray", "--ray-address", address, cwd=tmp_path)
        refused(result, f"--ray-address: got '{address}'; must be HOST:PORT")


@pytest.mark.slow
def test_without_an_address_no_cluster_is_joined(
    processes: Processes, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("TRACE", str(home / "trace"))
    run = start(processes, home, "--set", "federation.num_rounds=1")
    assert run.ended() == 0, run.log
    assert len({client for _, client, _ in traced(home)}) == 8


@pytest.mark.slow
def test_a_process_that_dies_once_costs_nothing_and_one_that_always_does_is_a_failure(
    processes: Processes, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadly = processes.folder / "deadly"
    monkeypatch.setenv("TRACE", str(home / "trace"))
    monkeypatch.setenv("DEADLY", str(deadly))
    deadly.touch()
    run = start(processes, home, "--set", "federation.num_rounds=2")
    assert run.ended() == 0, run.log
    assert not deadly.exists()
    assert failures(processes.folder) == []
    require_the_bits_of_one_process(home, processes.folder, "federation.num_rounds=2")
    deadly.with_name("deadly.always").touch()
    settings = [f"output.directory={processes.folder / 'again'}", "federation.num_clients=2"]
    settings += ["federation.clients_per_round=2"]
    run = start(processes, home, *(part for s in settings for part in ("--set", s)))
    assert run.ended() == 1, run.log
    assert "no client finished the start pass" in run.log
    assert "ActorDiedError" in run.log
    assert "Traceback" not in run.log


@pytest.mark.slow
def test_a_client_that_takes_no_cpu_is_refused(tmp_path: Path) -> None:
    result = fedopt("simulate", "--engine", "ray", "--cpus-per-client", "0", cwd=tmp_path)
    refused(result, "--cpus-per-client: got 0.0; must be > 0")

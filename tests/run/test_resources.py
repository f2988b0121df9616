"""What grows with clients, rounds or runs elsewhere, and must not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tomli_w
import torch
from processes import PATIENCE, Process, Processes, free_port, wait_until
from torch import nn

from fedopt_flwr import simulate


def resident_mb(process_id: int | str = "self") -> float:
    for line in Path(f"/proc/{process_id}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


def test_500_clients_of_a_resnet_share_one_model() -> None:
    from fedopt_flwr.models.networks import resnet18

    made: list[int] = []

    def model() -> nn.Module:
        made.append(1)
        return resnet18((3, 8, 8), 3)

    data = [
        torch.utils.data.TensorDataset(torch.randn(2, 3, 8, 8), torch.tensor([0, 2]))
        for _ in range(500)
    ]
    before = resident_mb()
    config = {
        "algorithm": {"name": "fedavg"},
        "federation": {"num_clients": 500, "clients_per_round": 2, "num_rounds": 1},
        "training": {"local_steps": 1},
    }
    assert simulate(config, model=model, client_data=data).rounds[0].failures == 0
    assert len(made) == 1
    assert resident_mb() - before < 12 * 45  # a ResNet-18 has 45 MB: a dozen vectors, not 500


# in a process of its own: what other tests left makes gaps, in which memory grows without a leak
REPEATED = """
import ctypes, gc, json, os, threading
import torch
from helpers import as_datasets, softmax_clients
from torch import nn
from fedopt_flwr import simulate

data = as_datasets(softmax_clients([40] * 10))
config = {
    "algorithm": {"name": "padamfed"},
    "federation": {"num_clients": 10, "clients_per_round": 5, "num_rounds": 5},
}

def model():
    return nn.Sequential(nn.Linear(4, 4000), nn.ReLU(), nn.Linear(4000, 3))  # 32k parameters

def used():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # free pages that the C library keeps
    tensors = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
    with open("/proc/self/status") as file:
        (size,) = [int(line.split()[1]) / 1024 for line in file if line.startswith("VmRSS")]
    return [threading.active_count(), len(os.listdir("/proc/self/fd")), tensors], size

def repeat(count):
    for _ in range(count):
        simulate(config, model=model, client_data=data, workers=2)
    return used()

print(json.dumps([repeat(10), repeat(50)]))
"""


@pytest.mark.slow
def test_repeated_simulations_leave_no_threads_files_or_memory_behind() -> None:
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REPEATED],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ended.returncode == 0, ended.stderr
    (before, memory), (after, later) = json.loads(ended.stdout.splitlines()[-1])
    assert after == before
    assert later - memory < 50  # MB; 50 runs' states are 100


@pytest.mark.slow
def test_a_servers_memory_does_not_grow_from_round_to_round(
    processes: Processes, tmp_path: Path
) -> None:
    config = tmp_path / "federation.toml"
    sections = {
        "algorithm": {"name": "scaffold_m"},
        "federation": {"num_clients": 10, "clients_per_round": 10, "num_rounds": 100},
        "training": {"local_steps": 1},
        "model": {"options": {"hidden": [4000]}},  # a vector has 1.2 MB
        "output": {"directory": str(tmp_path / "run"), "evaluate_every": 40},
    }
    config.write_text(tomli_w.dumps(sections))
    address = f"127.0.0.1:{free_port()}"
    server = processes.start("server", "server", config, "--address", address, "--insecure")
    ids, state = ("--client-ids", "0-9"), ("--state-dir", tmp_path / "state")
    processes.start("clients", "client", config, "--server", address, *ids, *state, "--insecure")
    early, late = (memory_at(server, tmp_path / "run" / "rounds.jsonl", n) for n in (30, 90))
    assert server.ended() == 0
    assert late - early < 15, (early, late)  # a round's replies have 12 MB; 60 rounds passed


def memory_at(server: Process, rounds: Path, number: int) -> float:
    """The least while five rounds pass: replies come and go within each."""

    def reached(count: int) -> bool:
        return rounds.exists() and len(rounds.read_text().splitlines()) >= count

    wait_until(lambda: reached(number), lambda: f"round {number}:\n{server.log}")
    seen = [resident_mb(server.process.pid)]
    while not reached(number + 5) and server.process.poll() is None:
        seen.append(resident_mb(server.process.pid))
        time.sleep(0.01)
    return min(seen)

"""`fedopt` processes of a test, and what is read from what they leave."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tomli_w

from fedopt_flwr.flower import DiskStates
from fedopt_flwr.run.directory import RunDirectory

PATIENCE = (
    270.0  # seconds; only a broken test waits so long, and Ray starts slowly beside other work
)


class Processes:
    """`fedopt` processes of one test, each with a log; all are gone when the test ends."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._running = folder, []

    def start(self, name: str, *arguments: object) -> Process:
        log = self.folder / f"{name}.log"
        with log.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "fedopt_flwr", *map(str, arguments)],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
            )
        self._running.append(process)
        return Process(process, log)

    def end(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()


class Process:
    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log
        self._start = log.stat().st_size

    @property
    def log(self) -> str:
        return self._log.read_bytes()[self._start :].decode()

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.log, lambda: f"{text!r} in the log:\n{self.log}")

    def ended(self, patience: float = PATIENCE) -> int:
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running:\n{self.log}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def wait_until(
    condition: Callable[[], bool], what: Callable[[], str], patience: float = PATIENCE
) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what()}"
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def require_c_is_the_mean(folder: Path) -> None:
    """c of the last checkpoint against the c_i on the clients' disks, at the versions it counts."""
    checkpoint = RunDirectory(folder / "run").read_checkpoint()
    states = DiskStates(folder / "state" / f"run-{checkpoint.server.run}")
    own = [
        states.load(i, version)["control_variate"].double().numpy()
        for i, version in checkpoint.server.versions.items()
    ]
    assert len(own) == 3
    c = checkpoint.server.vectors["control_variate"].numpy()
    assert np.abs(c).max() > 1e-4
    np.testing.assert_allclose(np.mean(own, axis=0), c, atol=1e-6)


SLOW_MODEL = '''
import time
import torch

class Slow(torch.nn.Sequential):
    """Logistic regression whose training takes a while, so that a kill lands in a round."""

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            time.sleep(0.1)
        return super().forward(x)

def make():
    return Slow(torch.nn.Flatten(), torch.nn.Linear(64, 10))
'''


def write_config(folder: Path, rule: str, **sections: dict[str, Any]) -> Path:
    """A federation of 3 clients whose rounds take about half a second."""
    (folder / "slow_model.py").write_text(SLOW_MODEL)
    config = {
        "algorithm": {"name": rule},
        "federation": {"num_clients": 3, "clients_per_round": 3, "num_rounds": 12},
        "training": {"local_steps": 4, "device": "cpu"},
        "model": {"name": "slow_model:make"},
        "output": {"directory": str(folder / "run"), "checkpoint_every": 1},
        "transport": {"keep_alive_seconds": 4},
    }
    for name, section in sections.items():
        config[name] = config.get(name, {}) | section
    path = folder / "federation.toml"
    path.write_text(tomli_w.dumps(config))
    return path


def start_server(processes: Processes, config: Path, port: int, *more: object) -> Process:
    address = f"127.0.0.1:{port}"
    return processes.start("server", "server", config, "--address", address, "--insecure", *more)


def start_client(
    processes: Processes, config: Path, port: int, client_id: int, *more: object
) -> Process:
    where = ("--server", f"127.0.0.1:{port}", "--state-dir", processes.folder / "state")
    who = ("--client-id", client_id, "--insecure")
    return processes.start(f"client-{client_id}", "client", config, *where, *who, *more)


def launch(processes: Processes, name: str, rule: str, count: int, *more: object) -> Process:
    settings = ["--set", "federation.num_rounds=4", "--set", "federation.clients_per_round=3"]
    settings += ["--set", "training.local_steps=3", "--set", f"output.directory={name}"]
    arguments = ("--clients", 5, "--processes", count, "--algorithm", rule, *settings, *more)
    return processes.start(name, "launch", *arguments)


FEDOPT = str(Path(sys.executable).parent / "fedopt")


QUICK = ["--set", "federation.num_rounds=4", "--set", "model.options.hidden=[8]"]


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


InProcess = Callable[..., Ended]  # the fixture `in_process` of tests/cli


def fedopt(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [FEDOPT, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120
    )


def refused(result: subprocess.CompletedProcess[str] | Ended, *texts: str) -> None:
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr + result.stdout
    for text in texts:
        assert text in result.stderr, result.stderr


def records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "run" / "rounds.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]

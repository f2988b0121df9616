"""`fedopt` processes of a test, and what is read from what they leave."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedopt_flwr.flower import DiskStates
from fedopt_flwr.outputs import RunDirectory

PATIENCE = 90.0  # seconds; only a broken test waits so long


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

    def ended(self) -> int:
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running:\n{self.log}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def wait_until(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE
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

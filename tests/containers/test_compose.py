"""deploy/compose.yaml as deploy/README.md says, and the end of each of its parts, one at a time."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from engine import ROOT, Engine
from federation import NUM_CLIENTS, PATIENCE, USER, write_digits

from fedopt_flwr.deployment.certificates import create_authority, create_client
from fedopt_flwr.flower import DiskStates
from fedopt_flwr.run.directory import RunDirectory

pytestmark = pytest.mark.containers
PROJECT = "composed"


class Composed:
    """A folder with compose.yaml, its configuration, certificates and data."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine, self._folder = engine, folder
        shutil.copy(ROOT / "deploy" / "compose.yaml", folder)
        certs = folder / "certs"
        create_authority(certs, ["server"], days=90)
        for path, end in zip(create_client(certs, "0-2", days=90), ("pem", "key"), strict=True):
            path.rename(certs / f"clients.{end}")
        for path in (certs, *certs.iterdir()):  # keys stay 0600
            os.chown(path, USER, USER)
        write_digits(folder / "data")
        config = {
            "algorithm": {"name": "scaffold_m"},
            "federation": {"num_clients": NUM_CLIENTS, "clients_per_round": NUM_CLIENTS},
            "training": {"local_steps": 400, "device": "cpu"},
            "data": {"name": "npz"},
            "output": {"directory": "/runs/run", "checkpoint_every": 1},
            "transport": {"keep_alive_seconds": 4},
        }
        config["federation"]["num_rounds"] = 10_000
        (folder / "config").mkdir()
        (folder / "config" / "federation.toml").write_text(tomli_w.dumps(config))

    def __call__(self, *arguments: str) -> str:
        command = ["docker-compose", "--project-name", PROJECT, *arguments]
        environment = os.environ | {"DOCKER_HOST": self._engine.socket, "PORT": "0"}
        done = subprocess.run(
            command, cwd=self._folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def volume(self, name: str) -> Path:
        where = self._engine("volume", "inspect", "--format={{.Mountpoint}}", f"{PROJECT}_{name}")
        return Path(where)

    def records(self) -> list[dict[str, Any]]:
        path = self.volume("runs") / "run" / "rounds.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def kill(self, container: str) -> None:
        """End its process as the system would: `docker kill` counts as a stop by hand."""
        os.kill(int(self._engine("inspect", "--format={{.State.Pid}}", container)), signal.SIGKILL)


@pytest.fixture
def composed(engine: Engine, tmp_path: Path) -> Iterator[Composed]:
    made = Composed(engine, tmp_path)
    yield made
    made("down", "--volumes", "--timeout", "5")


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what} never came"
        time.sleep(0.1)


def test_each_part_is_started_again_and_the_run_stays_whole(
    composed: Composed, engine: Engine
) -> None:
    composed("up", "--detach", "--scale", f"client={NUM_CLIENTS}")

    def is_whole(after: int) -> bool:
        """Whether a round later than that counted all clients."""
        return any(r["round"] > after and len(r["clients"]) == 3 for r in composed.records()[-3:])

    wait_for(lambda: is_whole(3), "the first rounds")
    parts = ["server_1", *(f"client_{n}" for n in range(1, NUM_CLIENTS + 1))]
    before = len(composed.records())
    for part in parts:
        last, started = len(composed.records()), time.monotonic()
        composed.kill(f"{PROJECT}_{part}")
        wait_for(lambda last=last: len(composed.records()) > last + 1, f"a round after {part}")
        wait_for(lambda: is_whole(len(composed.records()) - 2), f"all clients after {part}")
        seconds = time.monotonic() - started
        failed = [r for r in composed.records()[last:] if r["failures"]]
        lost = sorted({e["client"] for r in failed for e in r["errors"]})
        print(f"{part}: {len(failed)} rounds with failures, of clients {lost}; {seconds:.0f} s")
        assert len(lost) <= (0 if part == "server_1" else 1)
    assert len(composed.records()) > before + 8
    composed("stop", "--timeout", "20")
    logs = [engine.logs(f"{PROJECT}_client_{n}") for n in range(1, NUM_CLIENTS + 1)]
    assert not any("Traceback" in log or "lost its state" in log for log in logs)
    assert [r["round"] for r in composed.records()] == list(range(len(composed.records())))
    checkpoint = RunDirectory(composed.volume("runs") / "run").read_checkpoint()
    states = DiskStates(composed.volume("states") / f"run-{checkpoint.server.run}")
    own = [
        states.load(i, version)["control_variate"].double().numpy()
        for i, version in checkpoint.server.versions.items()
    ]
    c = checkpoint.server.vectors["control_variate"].double().numpy()
    assert len(own) == NUM_CLIENTS
    assert np.abs(c).max() > 1e-4
    np.testing.assert_allclose(np.mean(own, axis=0), c, rtol=0, atol=1e-6)

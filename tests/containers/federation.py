"""A server and three clients in containers on one Docker network, with mutual TLS, on digits."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from engine import Engine
from sklearn.datasets import load_digits

from fedopt_flwr.config.sections import PartitionSection
from fedopt_flwr.data.partitions import partition
from fedopt_flwr.deployment.certificates import create_authority, create_client
from fedopt_flwr.flower import DiskStates
from fedopt_flwr.run.directory import RunDirectory

NUM_CLIENTS = 3
USER = 10001  # of the images
PORTS = {"FEDOPT_HEALTH": "0.0.0.0:8081", "FEDOPT_METRICS": "0.0.0.0:9100"}
PATIENCE = 240.0  # seconds; only a broken test waits so long
HARDENED = ("--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges")


def write_digits(folder: Path) -> None:
    """Write digits, divided among the clients, as the files of data.name = npz."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    test = np.arange(len(labels)) % 5 == 0
    owner = np.empty(np.count_nonzero(~test), np.int64)
    unlike = PartitionSection(concentration=0.5)
    for client, rows in enumerate(partition(labels[~test], NUM_CLIENTS, unlike, seed=0)):
        owner[rows] = client
    folder.mkdir()
    np.savez(folder / "train.npz", x=images[~test], y=labels[~test], client=owner)
    np.savez(folder / "test.npz", x=images[test], y=labels[test])


class ContainerFederation:
    """Folders of a federation and the containers that share them."""

    def __init__(self, engine: Engine, folder: Path, name: str, **federation: Any) -> None:
        self.engine, self.folder, self.name = engine, folder, name
        self.run = folder / "runs" / "run"
        create_authority(folder / "certs", ["server"], days=90)
        for who in ("0", "1", "2", "probe"):
            create_client(folder / "certs", who, days=90)
        write_digits(folder / "data")
        (folder / "config").mkdir()
        self.config = folder / "config" / "federation.toml"
        own = {"num_clients": NUM_CLIENTS, "clients_per_round": NUM_CLIENTS, **federation}
        sections = {
            "algorithm": {"name": "scaffold_m"},
            "federation": own,
            "training": {"local_steps": 60, "device": "cpu"},
            "data": {"name": "npz"},
            "model": {"name": "mlp", "options": {"hidden": [32]}},
            "output": {"directory": "/runs/run", "checkpoint_every": 1},
            "transport": {"keep_alive_seconds": 4},
        }
        self.config.write_text(tomli_w.dumps(sections))
        for place in ("runs", *(f"state-{i}" for i in range(NUM_CLIENTS))):
            (folder / place).mkdir()
            os.chown(folder / place, USER, USER)
        # keys stay 0600 in a folder of 0700, of the user that needs them
        for path in (folder / "certs", *(folder / "certs").iterdir()):
            os.chown(path, USER, USER)
        engine("network", "create", name)

    def _start(self, image: str, name: str, options: list[str], *arguments: str) -> None:
        mounts = [
            f"--volume={self.folder / place}:/{place}:ro" for place in ("certs", "config", "data")
        ]
        variables = [f"--env={k}={v}" for k, v in PORTS.items()]
        network = [f"--network={self.name}", f"--name={self.name}-{name}"]
        command = ["run", "--detach", *network, *HARDENED, *mounts, *variables, *options]
        self.engine(*command, f"fedopt-{image}", *arguments)

    def start_server(self, *arguments: str) -> None:
        keys = {"CERTIFICATE": "server.pem", "KEY": "server.key", "CLIENT_CA": "ca.pem"}
        options = [f"--env=FEDOPT_{k}=/certs/{v}" for k, v in keys.items()]
        options += ["--network-alias=server", f"--volume={self.folder / 'runs'}:/runs"]
        options.append("--env=FEDOPT_ADDRESS=0.0.0.0:8080")
        self._start("server", "server", options, *arguments)

    def start_client(self, number: int) -> None:
        keys = {"CERTIFICATE": f"{number}.pem", "KEY": f"{number}.key", "CA": "ca.pem"}
        options = [f"--env=FEDOPT_{k}=/certs/{v}" for k, v in keys.items()]
        options += [f"--volume={self.folder}/state-{number}:/state"]
        options += ["--env=FEDOPT_SERVER=server:8080", f"--env=FEDOPT_CLIENT_ID={number}"]
        self._start("client", f"client-{number}", options, "federation.toml")

    def remove(self, name: str) -> None:
        """End a container at once, as a machine that loses power."""
        self.engine("rm", "--force", f"{self.name}-{name}")

    def address(self, name: str) -> str:
        field = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        return self.engine("inspect", "--format", field, f"{self.name}-{name}")

    def logs(self, name: str) -> str:
        return self.engine.logs(f"{self.name}-{name}")

    def records(self) -> list[dict[str, Any]]:
        path = self.run / "rounds.jsonl"
        return [json.loads(i) for i in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                ends = "\n".join(self.logs(name)[-2000:] for name in ("server", "client-0"))
                raise AssertionError(f"{what} never came:\n{ends}")
            time.sleep(0.1)

    def wait_for_round(self, number: int) -> None:
        self.wait_for(lambda: len(self.records()) > number, f"round {number}")

    def wait_for_end(self) -> None:
        self.wait_for((self.run / "summary.json").exists, "the end")
        for name in ("server", *(f"client-{i}" for i in range(NUM_CLIENTS))):
            assert self.engine("wait", f"{self.name}-{name}") == "0", self.logs(name)[-3000:]

    def require_c_is_the_mean(self) -> None:
        """c of the last checkpoint against the c_i in the clients' volumes."""
        checkpoint = RunDirectory(self.run).read_checkpoint()
        own = [
            DiskStates(self.folder / f"state-{i}" / f"run-{checkpoint.server.run}")
            .load(i, version)["control_variate"]
            .double()
            .numpy()
            for i, version in checkpoint.server.versions.items()
        ]
        c = checkpoint.server.vectors["control_variate"].double().numpy()
        assert len(own) == NUM_CLIENTS
        assert np.abs(c).max() > 1e-4
        np.testing.assert_allclose(np.mean(own, axis=0), c, rtol=0, atol=1e-6)

    def close(self) -> None:
        for name in self.engine("ps", "--all", "--quiet").split():
            self.engine("rm", "--force", name)
        self.engine("network", "rm", self.name)
        shutil.rmtree(self.folder)

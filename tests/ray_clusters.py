"""A real Ray cluster of two nodes on this machine, each with its own CPUs, folder and ports."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from processes import free_port, wait_until

RAY = str(Path(sys.executable).parent / "ray")
OBJECT_STORE_BYTES = 150_000_000


class RayCluster:
    """Its nodes are "head" and "other"; `close` ends them by their process groups."""

    def __init__(self, environment: dict[str, str]) -> None:
        # not in pytest's: paths of Unix sockets have at most 107 bytes
        self._folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self._environment = os.environ | environment | {"RAY_USAGE_STATS_ENABLED": "0"}
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"

    def start_head(self) -> None:
        client = f"--ray-client-server-port={free_port()}"
        self._start(
            "head",
            1,
            {},
            "--head",
            f"--port={self.port}",
            client,
            "--include-dashboard=false",
            # a busy machine answers late; one that is gone refuses at once
            '--system-config={"health_check_timeout_ms": 60000, "health_check_period_ms": 1000}',
        )

    def start_other(self, cpus: int = 1, **environment: str) -> None:
        self._start("other", cpus, environment, f"--address={self.address}")

    def _start(self, name: str, cpus: int, environment: dict[str, str], *options: str) -> None:
        log = self._folder / f"{name}.log"
        ports = ("dashboard-agent-listen-port", "dashboard-agent-grpc-port", "metrics-export-port")
        own = [f"--{port}={free_port()}" for port in (*ports, "runtime-env-agent-port")]
        size = f"--object-store-memory={OBJECT_STORE_BYTES}"
        shape = [f"--num-cpus={cpus}", "--num-gpus=0", size, f"--temp-dir={self._folder / name}"]
        with log.open("wb") as file:
            self._nodes[name] = subprocess.Popen(
                [RAY, "start", "--block", "--disable-usage-stats", *options, *own, *shape],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self._environment | environment,
                start_new_session=True,
            )
        wait_until(lambda: "Ray runtime started" in log.read_text(), log.read_text)

    def kill(self, name: str) -> None:
        """SIGKILL for all processes of a node, at the same time."""
        process = self._nodes.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def wait_until_alone(self) -> None:
        """Wait until the head knows that no other node is left."""
        from ray._raylet import GcsClient

        def alive() -> int:
            nodes = GcsClient(address=self.address).get_all_node_info().values()
            return sum(node.state == 0 for node in nodes)

        wait_until(lambda: alive() == 1, lambda: f"{alive()} nodes are alive")

    def close(self) -> None:
        for name in reversed(list(self._nodes)):
            self.kill(name)
        shutil.rmtree(self._folder, ignore_errors=True)

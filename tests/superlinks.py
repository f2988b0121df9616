"""A real SuperLink with SuperNodes, on ports of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from processes import free_port, wait_until

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
# of a whole run: Flower starts a Python for each message, seconds of one core with torch in it
RUN_SECONDS = 480.0
# from 1.40 on a SuperLink has one port for all
ONE_PORT = tuple(map(int, version("flwr").split(".")[:2])) >= (1, 40)


class SuperLink:
    """A SuperLink and SuperNodes on free ports, three unless their node configs are given, with a
    Flower home of their own.

    Under the isolation "process" they start no apps: a SuperExec beside each of them does. As
    "simulation" it is what `flwr run` starts on its own: there the nodes are Ray's.
    """

    def __init__(self, folder: Path, isolation: str, nodes: Sequence[str] = ()) -> None:
        self.folder, self.home, self._isolation = folder, folder / "flwr", isolation
        self.home.mkdir()
        own = [f'client-id={i} state-dir="{folder / "state"}"' for i in range(3)]
        self._node_configs = nodes or own
        self._control, health = free_port(), free_port()
        self._fleet = self._control if ONE_PORT else free_port()
        connection = f'address = "127.0.0.1:{self._control}"\ninsecure = true\n'
        (self.home / "config.toml").write_text(f"[superlink.here]\n{connection}")
        self.environment = os.environ | {
            "FLWR_HOME": str(self.home),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "PATH": f"{BIN}:{os.environ['PATH']}",
        }
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._executors: list[subprocess.Popen[bytes]] = []
        self._link = self._start(
            "superlink",
            *("flower-superlink", "--insecure", "--host", "127.0.0.1"),
            *("--port", self._control),
            *([] if ONE_PORT else ["--fleet-api-address", f"127.0.0.1:{self._fleet}"]),
            *("--health-server-address", f"127.0.0.1:{health}"),
            "--disable-runtime-dependency-installation",
            *(["--simulation"] if isolation == "simulation" else ["--isolation", isolation]),
        )
        self._start_executor("link", self._control)
        wait_until(lambda: self._answers(), lambda: (folder / "superlink.log").read_text())
        for number in range(0 if isolation == "simulation" else len(self._node_configs)):
            self.start_node(number)

    def _start(self, name: str, *command: object) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [str(BIN / str(command[0])), *map(str, command[1:])],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                cwd=self.folder,
                start_new_session=True,
            )

    def _answers(self) -> bool:
        result = self._flwr("list", "here")
        return result.returncode == 0

    def _flwr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(BIN / "flwr"), *arguments],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
        )

    def logs(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in logs)

    def start_node(self, number: int) -> None:
        config, port = self._node_configs[number], free_port()
        self.nodes[number] = self._start(
            f"node-{number}",
            *("flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{self._fleet}"),
            *("--host", "127.0.0.1", "--port", port, "--node-config", config),
            *("--isolation", self._isolation),
        )
        self._start_executor(f"node-{number}", port)

    def _start_executor(self, name: str, port: int) -> None:
        if self._isolation == "process":
            address = ("--insecure", "--runtime-api-address", f"127.0.0.1:{port}")
            self._executors.append(self._start(f"exec-{name}", "flower-superexec", *address))

    def stop_node(self, number: int) -> None:
        os.killpg(self.nodes[number].pid, signal.SIGKILL)
        self.nodes[number].wait()

    def run(self, run_config: str, app: Path = ROOT) -> subprocess.CompletedProcess[str]:
        nodes = f"num-supernodes={len(self._node_configs)} client-resources-num-cpus=1"
        simulated = self._isolation == "simulation"
        options = ["--federation-config", nodes] if simulated else []
        command = ["run", str(app), "here", "--stream", *options, "--run-config", run_config]
        return self._flwr(*command)

    def close(self) -> None:
        for process in [*self._executors, *self.nodes.values(), self._link]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

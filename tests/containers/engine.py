"""A Docker engine for the tests of the images, and a base image made of Debian's packages.

No image needs to be pulled, and no other engine of the machine is touched.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
BASE = "fedopt-base"
PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")  # pip in a build trusts what this one does
TOOLS = ("dockerd", "docker", "debootstrap", "iptables", "prometheus", "promtool")
_START_SECONDS = 60


class Engine:
    """Runs `docker` against one daemon."""

    def __init__(self, folder: Path) -> None:
        self.socket = f"unix://{folder}/socket"

    def __call__(self, *arguments: object, **more: object) -> str:
        """Return what the command prints; its error output if it fails."""
        command = ["docker", "-H", self.socket, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, **more)  # type: ignore[call-overload]
        assert done.returncode == 0, f"{command}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return str(done.stdout).strip()

    def logs(self, name: str) -> str:
        command = ["docker", "-H", self.socket, "logs", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return done.stdout


def missing() -> str:
    """Return why images cannot be built here; empty if they can."""
    absent = [
        name for name in TOOLS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None
    ]
    if os.geteuid() != 0:
        return "only root can start an engine of its own"
    return f"not installed: {', '.join(absent)}" if absent else ""


@contextmanager
def running_engine(folder: Path) -> Iterator[Engine]:
    """Start `dockerd` with data, socket and process id in `folder`, which is removed afterwards."""
    folder.mkdir(parents=True)
    own = {"data-root": "data", "exec-root": "exec", "pidfile": "pid"}
    options = [f"--{option}={folder / name}" for option, name in own.items()]
    engine = Engine(folder)
    with (folder / "log").open("wb") as log:
        daemon = subprocess.Popen(
            ["dockerd", *options, "-H", engine.socket],
            stdout=log,
            stderr=log,
            env=os.environ | {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"},
        )
    try:
        _await(daemon, engine, folder / "log")
        yield engine
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(60)
        for line in reversed(Path("/proc/mounts").read_text().splitlines()):
            if (place := line.split()[1]).startswith(f"{folder}/"):
                subprocess.run(["umount", "--lazy", place], check=True)
        shutil.rmtree(folder)


def _await(daemon: subprocess.Popen[bytes], engine: Engine, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and daemon.poll() is None:
        command = ["docker", "-H", engine.socket, "info"]
        if subprocess.run(command, capture_output=True).returncode == 0:
            return
        time.sleep(0.5)
    raise AssertionError(f"dockerd did not start:\n{log.read_text(errors='replace')[-4000:]}")


def import_base(engine: Engine, folder: Path) -> None:
    """Make a Debian with Python, and the authorities that this machine trusts, an image."""
    tree = folder / "base"
    command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(tree)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    shutil.copy(AUTHORITIES, tree / AUTHORITIES.relative_to("/"))
    with subprocess.Popen(["tar", "-C", tree, "-c", "."], stdout=subprocess.PIPE) as tar:
        engine("import", "-", BASE, stdin=tar.stdout)
    shutil.rmtree(tree)


def build(engine: Engine, target: str) -> str:
    """Build one image as docker/README.md says; return its name."""
    name = f"fedopt-{target}"
    arguments = [f"--build-arg={k}={v}" for k, v in (("BASE_IMAGE", BASE), ("VERSION", "0.1.0"))]
    file = ROOT / "docker" / "Dockerfile"
    engine("build", "--network=host", "--target", target, *arguments, "-t", name, "-f", file, ROOT)
    return name

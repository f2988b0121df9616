"""Rounds a second of a federation while strangers fill its port, beside the same undisturbed.

    python benchmarks/attacked.py [--seconds 30] [--windows 3] [--tls]

Server and 8 clients (digits, mlp, PAdaMFed) share one core, the attacker has another: 1,000 idle
connections, opened again a second after the server closed them, and 200 bad handshakes a second. In
plain text those are bytes that are no HTTP/2; with --tls, every second one is a whole TLS handshake
by somebody without a certificate. Windows with and without the attacker take turns in one run; a
figure is the median over windows. Needs Linux and two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

CLIENTS = 8
IDLE = 1000
HANDSHAKES = 200  # a second
FEDOPT = [sys.executable, "-m", "fedopt_flwr"]


def attack(port: int, tls: bool) -> None:
    """Hold idle connections and shake hands badly until this process is ended."""
    os.sched_setaffinity(0, {1})
    selector = selectors.DefaultSelector()
    idle = 0
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    started, shaken, reopened = time.monotonic(), 0, 0
    sent, filled = started, 0.0
    while True:
        for _ in range(IDLE - idle if time.monotonic() > filled + 1 else 0):
            filled = time.monotonic()
            with contextlib.suppress(OSError):
                connection = socket.create_connection(("127.0.0.1", port), timeout=1)
                selector.register(connection, selectors.EVENT_READ)
                idle += 1
        for key, _ in selector.select(0):
            with contextlib.suppress(OSError):
                if key.fileobj.recv(1 << 12):
                    continue
            selector.unregister(key.fileobj)
            key.fileobj.close()
            idle -= 1
            reopened += 1
        while shaken < HANDSHAKES * (time.monotonic() - started):
            shaken += 1
            with contextlib.suppress(OSError):
                shake(port, context if tls and shaken % 2 else None)
        if time.monotonic() > sent + 5:
            sent = time.monotonic()
            rate = shaken / (sent - started)
            print(f"{idle} idle, {reopened} reopened, {rate:.0f} handshakes/s", flush=True)
        time.sleep(0.002)


def shake(port: int, context: ssl.SSLContext | None) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=0.2) as connection:
        if context is None:
            connection.sendall(os.urandom(100))
        else:
            with context.wrap_socket(connection):
                pass


def pair(folder: Path, name: str) -> list[object]:
    return ["--certificate", folder / f"{name}.pem", "--key", folder / f"{name}.key"]


class Federation:
    """Server and clients on core 0."""

    def __init__(self, folder: Path, tls: bool) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._folder, self._processes = folder, []
        settings = {
            "algorithm.name": "padamfed",
            "federation.num_clients": CLIENTS,
            "federation.clients_per_round": CLIENTS,
            "federation.num_rounds": 10**6,
            "output.directory": folder / "run",
            "output.evaluate_every": 100,
            "training.device": "cpu",
        }
        given = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        server, client = ["--insecure"], ["--insecure"]
        everyone = f"0-{CLIENTS - 1}"
        if tls:
            certs = folder / "certs"
            for more in (["init", "--host", "localhost"], ["client", everyone]):
                subprocess.run([*FEDOPT, "certs", *more, "--directory", certs], check=True)
            server = [*pair(certs, "server"), "--client-ca", certs / "ca.pem"]
            client = [*pair(certs, everyone), "--ca", certs / "ca.pem"]
        address = f"localhost:{self.port}"
        self._start("server", *given, "--address", address, *server)
        who = ["--client-ids", everyone, "--state-dir", folder / "state"]
        self._start("client", *given, "--server", address, *who, *client)

    def _start(self, *arguments: object) -> None:
        log = (self._folder / f"{len(self._processes)}.log").open("wb")
        process = subprocess.Popen(
            [*FEDOPT, *map(str, arguments)],
            stdout=log,
            stderr=log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: os.sched_setaffinity(0, {0}),
        )
        self._processes.append(process)

    def wait(self) -> None:
        """Wait until it is under way."""
        while self.rounds() < 20:
            for process in self._processes:
                if process.poll() is not None:
                    raise RuntimeError((self._folder / "1.log").read_text())
            time.sleep(0.5)

    def rounds(self) -> int:
        path = self._folder / "run" / "rounds.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def failures(self) -> int:
        text = (self._folder / "run" / "rounds.jsonl").read_text()
        return sum('"failures": 0' not in line for line in text.splitlines())

    def rate(self, seconds: float) -> float:
        before, started = self.rounds(), time.monotonic()
        time.sleep(seconds)
        return (self.rounds() - before) / (time.monotonic() - started)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--attack", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.attack:
        attack(given.attack, given.tls)
    rates: dict[str, list[float]] = {"undisturbed": [], "attacked": []}
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(Path(folder), given.tls)
        try:
            federation.wait()
            for _ in range(given.windows):
                rates["undisturbed"].append(federation.rate(given.seconds))
                command = [sys.executable, __file__, "--attack", str(federation.port)]
                attacker = subprocess.Popen([*command, *(["--tls"] if given.tls else [])])
                try:
                    time.sleep(5)  # until its connections stand
                    rates["attacked"].append(federation.rate(given.seconds))
                finally:
                    attacker.kill()
                    attacker.wait()
                time.sleep(12)  # until the server has let go of them
            failures = federation.failures()
        finally:
            federation.end()
    calm, attacked = (statistics.median(found) for found in rates.values())
    for name, found in rates.items():
        print(f"{name}: {', '.join(f'{rate:.1f}' for rate in found)} rounds/s")
    print(f"attacked over undisturbed: {attacked / calm:.2f}; rounds with failures: {failures}")


if __name__ == "__main__":
    main()

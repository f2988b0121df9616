"""A federation under an adversary, and what must hold of it afterwards.

Clients are killed, stopped for a while and cut off; the server is killed and resumed. By hand:

    python tests/chaos.py --rounds 60 --seed 3 --rule padamfed [--gone-from 20]
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import socket
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from processes import (
    Process,
    Processes,
    free_port,
    records,
    start_client,
    start_server,
    wait_until,
    write_config,
)

from fedopt_flwr.flower import DiskStates
from fedopt_flwr.run.directory import RunDirectory

_MOVES = 3  # of the adversary in one round: a slow machine gets on, too
_PAUSES = (0.3, 2.0, 6.0)  # seconds for which a client is stopped; keep-alive ends after 4


class Wire:
    """A TCP connection point in front of the server that can be cut."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # this wire is gone
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._server_port))
            except OSError:  # the server is not there
                near.close()
                continue
            self._ends += [near, far]
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=_pump, args=(source, target), daemon=True).start()
            if self._listener.fileno() < 0:  # it was closed meanwhile
                self.cut()

    def cut(self) -> None:
        for end in self._ends:
            _hang_up(end)
        self._ends.clear()

    def close(self) -> None:
        self._listener.close()
        self.cut()


def _pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
    except OSError:
        pass
    _hang_up(source)
    _hang_up(target)


def _hang_up(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


@dataclass
class Chaos:
    """One run; `kills` and the like count what the adversary did."""

    processes: Processes
    rule: str
    seed: int
    num_clients: int = 8
    num_rounds: int = 60
    gone_from: int | None = None  # from this round on client 0 is gone for good
    server_kills: float = 0.05  # share of the adversary's moves
    start_timeout: int = 120  # s; also what a resumed server waits for a client that is gone
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder = self.processes.folder
        self._rng = random.Random(self.seed)
        self._config = write_config(
            self.folder,
            self.rule,
            federation={
                "num_clients": self.num_clients,
                "clients_per_round": self.num_clients // 2,
                "num_rounds": self.num_rounds,
                "start_timeout": self.start_timeout,
                "seed": self.seed,
            },
            output={"checkpoint_every": self._rng.choice([1, 2, 5])},
        )
        self._port = free_port()
        self._wires = [Wire(self._port) for _ in range(self.num_clients)]
        self._clients: dict[int, Process] = {}
        self._stopped: dict[int, float] = {}  # until when
        self._done = 0
        self._is_over = False
        self._moves: list[int] = []  # rounds that were done at each
        self._server: Process

    def run(self) -> None:
        """Let the adversary work until the run is over, then check what must hold."""
        self._server = start_server(self.processes, self._config, self._port)
        self._server.wait_for("listening")
        for client_id in range(self.num_clients):
            self._start(client_id)
        wait_until(lambda: self._rounds_done() > 0, lambda: f"a round:\n{self._server.log}")
        while self._server.process.poll() is None:
            time.sleep(self._rng.uniform(0.2, 1.2))
            self._continue_stopped()
            if self._moves.count(self._rounds_done()) < _MOVES:
                self._moves.append(self._done)
                self._move()
        for client_id in [*self._stopped]:
            self._signal(client_id, signal.SIGCONT)
        assert self._server.ended() == 0 or self._is_over, self._server.log
        for wire in self._wires:
            wire.close()
        self.check()

    def _start(self, client_id: int) -> None:
        port = self._wires[client_id].port
        self._clients[client_id] = start_client(self.processes, self._config, port, client_id)

    def _signal(self, client_id: int, number: signal.Signals) -> None:
        self._clients[client_id].process.send_signal(number)

    def _rounds_done(self) -> int:
        path = self.folder / "run" / "rounds.jsonl"
        self._done = path.read_bytes().count(b"\n") if path.exists() else self._done
        return self._done

    def _is_gone(self, client_id: int) -> bool:
        return client_id == 0 and self.gone_from is not None and self._done > self.gone_from

    def _continue_stopped(self) -> None:
        for client_id, until in [*self._stopped.items()]:
            if time.monotonic() > until:
                self._signal(client_id, signal.SIGCONT)
                del self._stopped[client_id]

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def _move(self) -> None:
        if self._is_gone(0) and self._clients[0].process.poll() is None:
            self._clients[0].kill()
            self._stopped.pop(0, None)
        client_id = self._rng.randrange(self.num_clients)
        draw = self._rng.random()
        if draw < self.server_kills:
            self._replace_server()
        elif client_id in self._stopped or self._is_gone(client_id):
            return
        elif draw < 0.3:
            self._count("kills")
            self._clients[client_id].kill()
            self._start(client_id)
        elif draw < 0.5:
            self._count("pauses")
            self._signal(client_id, signal.SIGSTOP)
            self._stopped[client_id] = time.monotonic() + self._rng.choice(_PAUSES)
        elif draw < 0.8:
            self._count("cuts")
            self._wires[client_id].cut()

    def _replace_server(self) -> None:
        if self._server.process.poll() is not None or self._moves.count(self._done) > 1:
            return
        self._count("server kills")
        self._server.kill()
        self._is_over = (self.folder / "run" / "summary.json").exists()  # it was about to end
        if self._is_over:
            return
        more = ("--resume", self.folder / "run")
        self._server = start_server(self.processes, self._config, self._port, *more)
        self._server.wait_for("listening")

    def check(self) -> None:
        """Every round once, every counted reply once, and c = Σ p_i c_i."""
        rounds = records(self.folder)
        assert [r["round"] for r in rounds] == list(range(self.num_rounds + 1))
        last: dict[int, int] = {}
        for record in rounds:
            assert len(set(record["clients"])) == len(record["clients"])
            last |= dict.fromkeys(record["clients"], record["round"])
        checkpoint = RunDirectory(self.folder / "run").read_checkpoint()
        counted = {
            i: max(r["round"] for r in rounds[: checkpoint.server.round + 1] if i in r["clients"])
            for i in last
        }
        assert checkpoint.server.versions == counted
        states = DiskStates(self.folder / "state" / f"run-{checkpoint.server.run}")
        own = [
            states.load(i, version)["control_variate"].double().numpy()
            for i, version in checkpoint.server.versions.items()
        ]
        c = checkpoint.server.vectors["control_variate"].double().numpy()
        self.largest_c = float(np.abs(c).max())
        self.error = float(np.abs(sum(own) / self.num_clients - c).max())
        assert self.error < 1e-6 < self.largest_c
        logs = [path.read_text(errors="replace") for path in self.folder.glob("*.log")]
        assert not any("Traceback" in log for log in logs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rule", default="padamfed")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gone-from", type=int)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        processes = Processes(Path(folder))
        chaos = Chaos(
            processes, given.rule, given.seed, given.clients, given.rounds, given.gone_from
        )
        started = time.monotonic()
        try:
            chaos.run()
        finally:
            processes.end()
        seconds = time.monotonic() - started
    print(
        f"{given.rule}, seed {given.seed}: {given.rounds} rounds in {seconds:.0f} s; "
        f"{chaos.counts}; largest |c| {chaos.largest_c:.3g}, |c - Σ p_i c_i| {chaos.error:.2g}"
    )


if __name__ == "__main__":
    main()

"""A server in this process and client processes beside it, all on this machine."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess  # nosec B404  # a launch is its processes
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Self

from ..config.run_config import RunConfig
from ..engines.stream import JOIN_TOKEN, Roster
from ..errors import ConfigError, FedoptError, FedoptWarning, MessageError, RunError
from ..rounds.record import RoundRecord
from ..run.checkpoints import Checkpoint
from ..run.hosts import states_in
from ..run.reading import ROUNDS
from ..run.result import Result
from ..run.run import Listener
from ..run.serve import serve
from .leash import LEASHED

_HOST = "127.0.0.1"
_DATA = "FEDOPT_DATA"
_GRACE_SECONDS = 10.0
_TAIL_LINES = 5
_KEPT_LINES = 500  # among which an ended process says why
_ERROR = "error: "  # before what a client's command says is wrong


def launch(
    config: RunConfig,
    client_arguments: Sequence[str],
    *,
    num_processes: int,
    folder: Path,
    listener: Listener,
    roster: Roster,
    checkpoint: Checkpoint | None = None,
) -> Result:
    """Run a federation of processes; `client_arguments` give clients the same configuration.

    Logs go to `folder`/logs and client states to `folder`/state. No process stays behind.
    """
    if checkpoint is not None and checkpoint.clients_keep_state:
        _require_states(checkpoint, folder / "state")
    if config.federation.client_ids == "names":
        raise ConfigError(
            "federation.client_ids: got 'names'; the clients of a launch are numbers; leave it out"
        )
    code = None if checkpoint is None else config.import_folders[0]
    token = secrets.token_hex(16)  # others on this machine reach the port, too
    with ClientProcesses(config, client_arguments, num_processes, folder, token, code) as clients:
        return serve(
            config,
            f"{_HOST}:0",
            tls=None,
            listener=_Watched(listener, clients),
            roster=roster,
            token=token,
            checkpoint=checkpoint,
            on_listening=clients.start,
            while_waiting=clients.require_alive,
        )


@dataclass
class ClientProcesses:
    """The client processes of a launch, their logs and their end."""

    config: RunConfig
    arguments: Sequence[str]
    num_processes: int
    folder: Path
    token: str  # with which they join
    code: Path | None = None  # where they run, and so find the user's own code

    def __post_init__(self) -> None:
        self._logs = self.folder / "logs"
        self._made = [p for p in (self._logs, *self._logs.parents) if not p.exists()]
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._readers: list[threading.Thread] = []
        self._said: dict[str, deque[str]] = {}  # the last lines of each process

    def __enter__(self) -> Self:
        return self

    def start(self, port: int) -> None:
        """Start all processes, each with its share of the clients, GPUs and CPU threads."""
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"output.directory: cannot make {str(self._logs)!r}: {error}; name another folder"
            ) from error
        total = self.config.federation.fixed_number("who starts all clients")
        shares = _shares(total, self.num_processes)
        for number, ids in enumerate(shares):
            process = subprocess.Popen(  # nosec B603  # this Python, the user's own arguments
                self._command(ids, port),
                stdin=subprocess.PIPE,  # the leash: it closes when this process ends
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                env=_inherited() | LEASHED | self._environment(number),
                cwd=self.code if self.code is not None and self.code.is_dir() else None,
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which ends the rest
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # Windows' own
            )
            self._processes[ids] = process
            log = self._logs / f"clients-{ids}.log"
            self._said[ids] = deque(maxlen=_KEPT_LINES)
            arguments = (process.stdout, log, ids, self._said[ids])
            reader = threading.Thread(target=_copy, args=arguments, daemon=True)
            reader.start()
            self._readers.append(reader)

    def _command(self, ids: str, port: int) -> list[str]:
        state = str(self.folder.absolute() / "state")
        own = [
            "--server",
            f"{_HOST}:{port}",
            "--client-ids",
            ids,
            "--state-dir",
            state,
            "--insecure",
        ]
        own.append("--debug")  # into the log, whole tracebacks; the console shows none of it
        return [sys.executable, "-m", "fedopt_flwr", "client", *self.arguments, *own]

    def _environment(self, number: int) -> dict[str, str]:
        import torch

        threads = str(self.config.training.threads)
        own = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}
        own[JOIN_TOKEN] = self.token
        own["PYTHONIOENCODING"] = "utf-8"  # as the log is, whatever this console can show
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
        if self.code is not None and (data := os.environ.get(_DATA)):
            own[_DATA] = os.path.abspath(data)
        if len(gpus) > 1 and self.config.training.device in ("auto", "cuda"):
            own["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
        return own

    def require_alive(self) -> None:
        """Raise RunError with the end of its log if a process ended; before round 1 all count."""
        for ids, process in self._processes.items():
            if process.poll() is not None:
                raise self._obituary(ids, process)

    def require_any_alive(self) -> None:
        """Raise RunError if no process is left that could answer."""
        if all(process.poll() is not None for process in self._processes.values()):
            raise self._obituary(*next(iter(self._processes.items())))

    def _obituary(self, ids: str, process: subprocess.Popen[str]) -> FedoptError:
        for reader in self._readers:
            reader.join(1)
        log = self._logs / f"clients-{ids}.log"
        lines = list(self._said[ids])
        errors = [line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)]
        if process.returncode == ConfigError.exit_code and errors:
            return ConfigError([f"clients {ids}: {error}" for error in errors])
        text = f"the process of clients {ids} ended with code {process.returncode}; its log {log}"
        return RunError("\n".join([f"{text} ends:", *(errors or lines[-_TAIL_LINES:])]))

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Wait for those that the server sent home; stop the others."""
        deadline = time.monotonic() + _GRACE_SECONDS
        if kind is not None:
            for process in self._processes.values():
                process.terminate()
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()
        for reader in self._readers:
            reader.join(1)
        ended_early = isinstance(error, (ConfigError, KeyboardInterrupt))
        if ended_early and self._logs in self._made and not (self.folder / ROUNDS).exists():
            shutil.rmtree(self._logs, ignore_errors=True)
            for folder in self._made:
                with contextlib.suppress(OSError):  # other things are in it
                    folder.rmdir()


class _Watched:
    """Passes on what happens, and ends a run that has lost all its client processes."""

    def __init__(self, listener: Listener, clients: ClientProcesses) -> None:
        self.on_start = listener.on_start
        self._on_round = listener.on_round
        self._clients = clients

    def on_round(self, record: RoundRecord) -> None:
        self._on_round(record)
        if record.failures:
            self._clients.require_any_alive()


def _inherited() -> dict[str, str]:
    """Return this process's environment without what would be options of `fedopt client`."""
    return {k: v for k, v in os.environ.items() if not k.startswith("FEDOPT_") or k == _DATA}


def _shares(num_clients: int, num_processes: int) -> list[str]:
    """Divide 0..N-1 into ranges, one a process, as `--client-ids` takes them."""
    cuts = [num_clients * i // num_processes for i in range(num_processes + 1)]
    ranges = [(low, high - 1) for low, high in pairwise(cuts)]
    return [str(low) if low == high else f"{low}-{high}" for low, high in ranges]


def _require_states(checkpoint: Checkpoint, directory: Path) -> None:
    """Raise ConfigError if a client's state that the checkpoint counts on is missing."""
    states = states_in(directory)(checkpoint.server.run)
    try:
        for client_id, version in checkpoint.server.versions.items():
            states.load(client_id, version)
    except MessageError as error:
        raise ConfigError(
            f"--resume: {error}; put {str(directory)!r} back as it was, continue with `fedopt "
            "server --resume` and clients that have their states, or start a new run"
        ) from error


def _copy(stream: IO[str], log: Path, ids: str, said: deque[str]) -> None:
    """Empty a process's pipe into its log, whatever becomes of that: a full pipe would stop it."""
    lost, warned = 0, False
    for line in stream:
        said.append(line.rstrip("\n"))
        gap = f"\n({lost} lines before this one could not be written)\n" if lost else ""
        try:
            # opened each time: what one failed write leaves in a buffer would fail the next
            with log.open("a", encoding="utf-8") as file:
                file.write(f"{gap}{time.strftime('%H:%M:%S')} [clients {ids}] {line}")
            lost = 0
        except OSError as error:
            lost += 1
            if not warned:
                _warn_of_lost_lines(log, error)
            warned = True


def _warn_of_lost_lines(log: Path, error: OSError) -> None:
    with contextlib.suppress(Exception):  # a console that cannot be written to, for the same reason
        text = f"{str(log)!r} cannot be written: {error.strerror}; the run goes on, and lines are "
        text += "dropped, and counted in the log, until it can; make room"
        warnings.warn(text, FedoptWarning, stacklevel=2)

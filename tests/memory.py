"""What a long federation takes of memory, files and threads, round by round.

By hand:

    python tests/memory.py --rounds 3000
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Callable
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
    write_config,
)

from fedopt_flwr.rounds.record import RoundRecord

_SETTLED = 0.4  # share of the rounds after which caches and allocators hold what they need
_NUM_CLIENTS = 4
_MANY_RECORDS = 30_000


@dataclass
class Course:
    """What one process held at rounds: bytes of its own memory, open files, threads."""

    rounds: list[int] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def sample(self, round_number: int, pid: int) -> None:
        with contextlib.suppress(OSError, IndexError):  # it has ended
            own = _own_memory(pid)
            files = len([*Path(f"/proc/{pid}/fd").iterdir()])
            threads = len([*Path(f"/proc/{pid}/task").iterdir()])
            self.rounds.append(round_number)
            self.memory.append(own)
            self.files.append(files)
            self.threads.append(threads)

    def slope(self) -> float:
        """Return bytes a round, once the process has settled: the median of the slopes between any
        two samples, which a single step, such as a larger table, does not move."""
        number, size = np.array(self.rounds, float), np.array(self.memory, float)
        settled = number > _SETTLED * number[-1]
        number, size = number[settled], size[settled]
        first, second = np.nonzero(number[:, None] + len(number) / 4 < number[None, :])
        return float(np.median((size[second] - size[first]) / (number[second] - number[first])))

    def growth(self, of: list[int]) -> int:
        """Return by how many its files or threads grew, once it has settled."""
        first = next(i for i, n in enumerate(self.rounds) if n > _SETTLED * self.rounds[-1])
        return of[-1] - max(of[first : first + 3])


def bytes_of_records(folder: Path) -> float:
    """Return how much memory a round's record takes, of which the server keeps all.

    The first ones fill what this process has free; those after them are counted.
    """
    lines = (folder / "run" / "rounds.jsonl").read_text().splitlines()
    kept = []
    for _ in range(2):
        first, before = len(kept), _own_memory("self")
        for _ in range(_MANY_RECORDS // len(lines) + 1):
            kept += [RoundRecord(**json.loads(line)) for line in lines]
    return (_own_memory("self") - before) / (len(kept) - first)


def _own_memory(pid: int | str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def run(processes: Processes, num_rounds: int) -> tuple[dict[str, Course], float]:
    """Run a federation; return each process's course and the bytes a round of the records."""
    folder = processes.folder
    config = write_config(
        folder,
        "padamfed",
        federation={
            "num_clients": _NUM_CLIENTS,
            "clients_per_round": _NUM_CLIENTS,
            "num_rounds": num_rounds,
        },
        training={"local_steps": 2, "batch_size": 16},
        model={"name": "mlp", "options": {"hidden": [64]}},
        output={"checkpoint_every": 10, "evaluate_every": 20},
    )
    port = free_port()
    server = start_server(processes, config, port)
    server.wait_for("listening")
    watched: dict[str, Process] = {"server": server}
    for i in range(_NUM_CLIENTS):
        watched[f"client {i}"] = start_client(processes, config, port, i)
    courses = {name: Course() for name in watched}
    number = _counter(folder / "run" / "rounds.jsonl")
    while server.process.poll() is None:
        if 1 < (done := number()) <= num_rounds:  # afterwards results are written
            for name, process in watched.items():
                courses[name].sample(done, process.process.pid)
        time.sleep(0.25)
    assert server.process.returncode == 0, server.log
    assert len(records(folder)) == num_rounds + 1
    return courses, bytes_of_records(folder)


def _counter(path: Path) -> Callable[[], int]:
    """Return what counts the lines of a growing file, reading each once."""
    done, at = 0, 0

    def count() -> int:
        nonlocal done, at
        if path.exists():
            with path.open("rb") as file:
                file.seek(at)
                new = file.read()
            done, at = done + new.count(b"\n"), at + len(new)
        return done

    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3000)
    given = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        processes = Processes(Path(folder))
        try:
            courses, own = run(processes, given.rounds)
        finally:
            processes.end()
    print(f"{given.rounds} rounds in {time.monotonic() - started:.0f} s; a record: {own:.0f} bytes")
    for name, course in courses.items():
        beyond = f" ({course.slope() - own:.0f} beyond the records)" if name == "server" else ""
        print(
            f"{name}: {course.memory[-1] / 2**20:.0f} MiB, {course.slope():.0f} bytes a round"
            f"{beyond}; {course.files[-1]} files ({course.growth(course.files):+d}), "
            f"{course.threads[-1]} threads ({course.growth(course.threads):+d})"
        )


if __name__ == "__main__":
    main()

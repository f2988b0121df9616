"""How a launch divides clients, GPUs and threads among processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from collections import deque
from pathlib import Path

import pytest

from fedopt_flwr import RunConfig
from fedopt_flwr.config.client_ids import parse_ids
from fedopt_flwr.deployment.launcher import ClientProcesses, _copy, _shares
from fedopt_flwr.errors import FedoptWarning


@pytest.mark.parametrize(("clients", "processes"), [(5, 2), (100, 4), (3, 3), (7, 1)])
def test_every_client_is_in_one_process(clients: int, processes: int) -> None:
    shares = [parse_ids(text) for text in _shares(clients, processes)]
    assert [i for share in shares for i in share] == list(range(clients))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(
    ("visible", "count", "device", "given"),
    [
        (None, 2, "auto", ["0", "1", "0"]),
        ("3,5", 2, "cuda", ["3", "5", "3"]),
        (None, 1, "auto", [None, None, None]),
        (None, 2, "cpu", [None, None, None]),
        (None, 2, "cuda:1", [None, None, None]),
    ],
)
def test_processes_take_the_gpus_in_turn(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    visible: str | None,
    count: int,
    device: str,
    given: list[str | None],
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = RunConfig(training={"device": device, "threads": 2})
    clients = ClientProcesses(config, [], 3, tmp_path, "secret")
    environments = [clients._environment(number) for number in range(3)]
    assert [e.get("CUDA_VISIBLE_DEVICES") for e in environments] == given
    assert {e["OMP_NUM_THREADS"] for e in environments} == {"2"}
    assert {e["FEDOPT_JOIN_TOKEN"] for e in environments} == {"secret"}
    clients.__exit__(None, None, None)


CHILD = """
import sys, time
from fedopt_flwr.deployment.leash import follow_parent
follow_parent()
print(repr(sys.stdin.read()), flush=True)
time.sleep(60)
"""
PARENT = f"""
import os, subprocess, sys, time
from fedopt_flwr.deployment.leash import LEASHED
command = [sys.executable, "-c", {CHILD!r}]
child = subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | LEASHED)
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_child_ends_with_its_parent_and_finds_no_input() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert parent.stdout.readline() == "''\n"
    os.kill(child, 0)
    parent.kill()
    assert parent.stdout.read() == ""  # until the child, too, has closed it
    parent.wait()
    parent.stdout.close()


TALKATIVE = """
import sys
for number in range(5000):
    print(number, "x" * 100)  # far more than a pipe holds
print("all said", flush=True)
sys.stdin.readline()
print("after", flush=True)
"""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a file that is always full")
def test_a_client_goes_on_while_its_log_cannot_be_written(tmp_path: Path) -> None:
    log = tmp_path / "clients-0.log"
    log.symlink_to("/dev/full")
    said: deque[str] = deque(maxlen=5)

    def wait_until_said(text: str) -> None:
        deadline = time.monotonic() + 60
        while text not in said:
            assert time.monotonic() < deadline, f"the client stopped after {said}"
            time.sleep(0.01)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with subprocess.Popen(
            [sys.executable, "-c", TALKATIVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdin is not None
            reader = threading.Thread(target=_copy, args=(process.stdout, log, "0", said))
            reader.start()
            wait_until_said("all said")
            log.unlink()  # there is room again
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.wait(60) == 0
            reader.join(60)
    assert "(5001 lines before this one could not be written)" in log.read_text()
    assert log.read_text().endswith("[clients 0] after\n")
    (warning,) = warned  # said once
    assert warning.category is FedoptWarning
    assert "No space left on device; the run goes on" in str(warning.message)

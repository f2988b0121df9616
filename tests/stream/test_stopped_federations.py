"""Federations of processes that are stopped, resumed, or lose whoever reads what they print."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import checkpoint_file
from processes import (
    PATIENCE,
    SLOW_MODEL,
    Processes,
    free_port,
    launch,
    start_client,
    start_server,
    wait_until,
    write_config,
)

from fedopt_flwr.run.checkpoints import has_checkpoint

pytestmark = pytest.mark.slow
FEDOPT = f"{sys.executable} -m fedopt_flwr"


def test_a_launch_goes_on_from_anywhere_with_its_own_code_and_states(processes: Processes) -> None:
    folder = processes.folder
    write_config(folder, "scaffold_m", federation={"num_rounds": 5}, output={"checkpoint_every": 3})
    more = ("--processes", 2, "--set", "output.directory=whole")
    assert processes.start("whole", "launch", "federation.toml", *more).ended() == 0
    expected = (folder / "whole" / "model.safetensors").read_bytes()
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    for name in ("model.safetensors", "summary.json"):
        (folder / "whole" / name).unlink()
    for place in (elsewhere / "run", folder / "stateless"):
        shutil.copytree(folder / "whole", place)
    other = SLOW_MODEL.replace("64, 10))", "64, 10), torch.nn.Linear(10, 10))")
    (elsewhere / "slow_model.py").write_text(other)  # of another project
    processes.folder = elsewhere
    again = processes.start("again", "launch", "--resume", "run", "--processes", 3)
    assert again.ended() == 0, again.log
    assert "not counted" not in again.log
    assert (elsewhere / "run" / "model.safetensors").read_bytes() == expected
    processes.folder = folder
    (states,) = (folder / "stateless" / "state").iterdir()
    shutil.rmtree(states / "client-0")
    before = checkpoint_file(folder / "stateless").read_bytes()
    for verb, text in (
        ("launch", "--resume: client 0: state of round 3 is asked for; has []"),
        (
            "simulate",
            "were processes of their own that keep its state; continue with `fedopt launch",
        ),
        ("launch", "put 'stateless/state' back as it was, continue with `fedopt server --resume`"),
    ):
        refused = processes.start(verb, verb, "--resume", "stateless")
        assert refused.ended() == 2, refused.log
        assert text in refused.log
        assert "Traceback" not in refused.log
        if verb == "simulate":
            shutil.rmtree(states.parent)
    assert checkpoint_file(folder / "stateless").read_bytes() == before
    assert not (folder / "stateless" / "model.safetensors").exists()


def test_a_simulation_is_not_gone_on_with_by_processes(processes: Processes) -> None:
    folder = processes.folder
    write_config(folder, "padamfed", federation={"num_rounds": 3}, output={"checkpoint_every": 2})
    assert processes.start("run", "simulate", "federation.toml").ended() == 0
    (folder / "run" / "model.safetensors").unlink()
    for verb, more in (("launch", ()), ("server", ("--insecure",))):
        refused = processes.start(verb, verb, "--resume", "run", *more)
        assert refused.ended() == 2, refused.log
        assert "was a simulation, whose clients left no state" in refused.log
    assert not (folder / "run" / "model.safetensors").exists()


def test_clients_that_all_lost_their_state_end_a_resumed_run_and_keep_the_checkpoint(
    processes: Processes,
) -> None:
    folder, port = processes.folder, free_port()
    config = write_config(folder, "padamfed", federation={"num_rounds": 12})
    server = start_server(processes, config, port)
    clients = [start_client(processes, config, port, i) for i in range(3)]
    server.wait_for("round 5/12")
    server.kill()
    for client in clients:
        client.kill()
    shutil.rmtree(folder / "state")
    kept = checkpoint_file(folder / "run").read_bytes()
    rounds = (folder / "run" / "rounds.jsonl").read_text()
    again = start_server(processes, config, port, "--resume", folder / "run")
    for i in range(3):
        start_client(processes, config, port, i)
    assert again.ended() == 1, again.log
    assert "the client lost its state" in again.log
    assert "start the clients with the --state-dir that they had" in again.log
    assert "Traceback" not in again.log
    assert checkpoint_file(folder / "run").read_bytes() == kept
    assert rounds.startswith((folder / "run" / "rounds.jsonl").read_text())


def test_a_server_goes_on_with_the_transport_of_its_run_and_no_other_setting(
    processes: Processes,
) -> None:
    folder, port = processes.folder, free_port()
    config = write_config(folder, "fedavg", federation={"num_rounds": 6})
    server = start_server(processes, config, port)
    clients = [start_client(processes, config, port, i) for i in range(3)]
    server.wait_for("round 2/6")
    server.kill()
    wrong = start_server(
        processes, config, port, "--resume", "run", "--set", "federation.num_rounds=7"
    )
    assert wrong.ended() == 2
    assert f"--resume: federation.num_rounds is 7 in '{config}' and --set" in wrong.log
    address = ("--address", f"127.0.0.1:{port}", "--insecure")
    again = processes.start("again", "server", *address, "--resume", "run")
    again.wait_for("of 3 clients connected")
    assert again.ended() == 0, again.log
    assert [client.ended() for client in clients] == [0, 0, 0]


@pytest.mark.parametrize(
    ("ending", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_launch_that_is_stopped_says_how_to_go_on(
    processes: Processes, ending: signal.Signals, code: int
) -> None:
    many = ("--set", "federation.num_rounds=100000", "--set", "output.checkpoint_every=2")
    run = launch(processes, "run", "fedavg", 2, *many)
    run.wait_for("5 of 5 clients connected")
    wait_until(lambda: has_checkpoint(processes.folder / "run"), lambda: f"checkpoint: {run.log}")
    run.process.send_signal(ending)
    assert run.ended() == code
    assert "continue with --resume run" in run.log
    assert "Traceback" not in run.log


@pytest.mark.parametrize("lines", [1, 7])
def test_a_launch_that_nobody_reads_goes_on_to_its_end(processes: Processes, lines: int) -> None:
    """The pipe breaks while clients join, or in training."""
    settings = "--clients 4 --set federation.clients_per_round=2 --set federation.num_rounds=3"
    command = f"{FEDOPT} launch {settings} --set output.directory=run | head -{lines}"
    done = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"],
        cwd=processes.folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert "4 clients in 4 processes" in done.stdout
    assert "Traceback" not in done.stderr
    assert (processes.folder / "run" / "model.safetensors").exists()
    assert done.returncode == 0, done.stderr


def test_a_client_that_nobody_reads_serves_on(processes: Processes) -> None:
    folder, port = processes.folder, free_port()
    config = write_config(folder, "fedavg", federation={"num_rounds": 4})
    server = start_server(processes, config, port)
    who = f"--server 127.0.0.1:{port} --client-ids 0-2 --insecure --state-dir state"
    command = f"{FEDOPT} client federation.toml {who} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.stdout.count("client ") == 1
    assert "Traceback" not in done.stderr
    assert server.ended() == 0, server.log
    assert done.returncode == 0, done.stderr
    assert "failed" not in server.log


@pytest.mark.parametrize("place", ["new", "new/below", "there"])
def test_bad_input_that_only_clients_find_leaves_nothing(processes: Processes, place: str) -> None:
    """The server has the test data alone; that a client has none shows at that client."""
    kept = processes.folder / "there"
    kept.mkdir()
    bad = ("data.partition.min_examples=0", "data.partition.concentration=0.01")
    more = [word for setting in bad for word in ("--set", setting)]
    more += ["--set", f"output.directory={place}"]
    run = processes.start("launch", "launch", "--clients", 20, "--processes", 2, *more)
    assert run.ended() == 2, run.log
    assert "has no data; every client needs at least one example; set data.parti" in run.log
    assert "Traceback" not in run.log
    assert [p.name for p in processes.folder.iterdir() if p.name != "launch.log"] == ["there"]
    assert not list(kept.iterdir())


def test_a_launch_without_test_data_needs_a_model_of_its_own(processes: Processes) -> None:
    (processes.folder / "mine.py").write_text(
        "import torch\n"
        "def load(num_clients, seed):\n"
        "    rows = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))\n"
        "    data = torch.utils.data.TensorDataset(rows, torch.arange(20) % 3)\n"
        "    return [data for _ in range(num_clients)], None\n"
        "def net():\n"
        "    return torch.nn.Linear(5, 3)\n"
    )
    clients = ("--clients", 3, "--set", "federation.clients_per_round=2")
    data = ("--set", "data.name=mine:load", "--set", "federation.num_rounds=2")
    refused = processes.start("mlp", "launch", *clients, *data)
    assert refused.ended() == 2, refused.log
    assert "model.name: 'mlp' has the shape of the test data, and 'mine:load' gives" in refused.log
    assert not (processes.folder / "runs").exists()
    own = processes.start("own", "launch", *clients, *data, "--set", "model.name=mine:net")
    assert own.ended() == 0, own.log


def test_a_folder_that_cannot_hold_logs_is_refused(processes: Processes) -> None:
    (processes.folder / "run").mkdir()
    file = processes.folder / "run" / "logs"
    file.write_text("mine")
    run = launch(processes, "run", "fedavg", 2)
    assert run.ended() == 2, run.log
    assert "output.directory: cannot make 'run/logs'" in run.log
    assert list(Path(file.parent).iterdir()) == [file]

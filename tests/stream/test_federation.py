"""Federations of real processes, and what happens to them when processes are killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from processes import (
    SLOW_MODEL,
    Processes,
    free_port,
    launch,
    records,
    require_c_is_the_mean,
    start_client,
    start_server,
    wait_until,
    write_config,
)

from fedopt_flwr import RunConfig, simulate
from fedopt_flwr.algorithms import ALGORITHMS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("rule", ["scaffold_m", "padamfed"])
def test_a_client_killed_in_mid_round_comes_back_and_c_stays_the_mean(
    processes: Processes, rule: str
) -> None:
    folder, port = processes.folder, free_port()
    config = write_config(folder, rule, federation={"num_rounds": 40})
    server = start_server(processes, config, port)
    clients = [start_client(processes, config, port, i) for i in range(3)]
    clients[1].wait_for("client 1: round 3:")
    time.sleep(0.2)  # into round 4
    clients[1].kill()
    again = start_client(processes, config, port, 1)
    assert server.ended() == 0, server.log
    assert [client.ended() for client in (clients[0], clients[2], again)] == [0, 0, 0]
    done = records(folder)
    assert [r["round"] for r in done] == list(range(41))
    failed = [e for r in done for e in r["errors"]]
    assert {e["client"] for e in failed} == {1}
    assert "connection lost" in failed[0]["error"]
    assert done[-1]["clients"] == [0, 1, 2]
    require_c_is_the_mean(folder)


def test_a_killed_server_goes_on_where_it_was_while_clients_wait(processes: Processes) -> None:
    folder, port = processes.folder, free_port()
    config = write_config(folder, "padamfed")
    server = start_server(processes, config, port)
    clients = [start_client(processes, config, port, i) for i in range(3)]
    server.wait_for("round 5/12")
    server.kill()
    clients[0].wait_for("next attempt in")
    server = start_server(processes, config, port, "--resume", folder / "run")
    assert server.ended() == 0, server.log
    assert [client.ended() for client in clients] == [0, 0, 0]
    assert [r["round"] for r in records(folder)] == list(range(13))
    assert all(r["failures"] == 0 for r in records(folder))
    require_c_is_the_mean(folder)
    model = (folder / "run" / "model.safetensors").read_bytes()
    alone = RunConfig.from_file(config, [f"output.directory={folder / 'alone'}"])
    simulate(alone)
    assert model == (folder / "alone" / "model.safetensors").read_bytes()


def test_a_client_that_loses_its_state_fails_by_name_and_never_counts_as_zero(
    processes: Processes,
) -> None:
    folder, port = processes.folder, free_port()
    config = write_config(folder, "padamfed", federation={"num_rounds": 40})
    server = start_server(processes, config, port)
    clients = [start_client(processes, config, port, i) for i in range(3)]
    clients[1].wait_for("client 1: round 2:")
    clients[1].kill()
    for file in (folder / "state").rglob("client-1/*"):
        file.unlink()
    start_client(processes, config, port, 1)
    assert server.ended() == 0, server.log
    last = records(folder)[-1]
    assert last["clients"] == [0, 2]
    assert "client 1: state of round" in last["errors"][0]["error"]
    assert "is asked for; has []" in last["errors"][0]["error"]


def test_a_frozen_client_is_noticed_and_one_at_work_is_not(processes: Processes) -> None:
    """Keep-alive of 4 s: a stopped process answers no ping, a long training step answers all."""
    folder, port = processes.folder, free_port()
    config = write_config(folder, "fedavg", federation={"num_rounds": 2})
    busy = "end = time.time() + 3; sum(iter(lambda: time.time() < end, False))"
    (folder / "slow_model.py").write_text(SLOW_MODEL.replace("time.sleep(0.1)", busy))
    server = start_server(processes, config, port)
    clients = [start_client(processes, config, port, i) for i in range(3)]
    server.wait_for("3 of 3 clients connected")
    clients[2].process.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    server.wait_for("client 2: left")
    assert time.monotonic() - stopped < 12
    assert server.ended() == 0, server.log
    first, second = records(folder)[-2:]
    assert [e["client"] for e in first["errors"]] == [2]
    assert (first["clients"], second["clients"]) == ([0, 1], [0, 1])  # 12 s of work without a break
    assert "left" not in server.log.replace("client 2: left", "")


def test_a_second_client_of_an_id_gets_in_once_keep_alive_has_declared_the_first_dead(
    processes: Processes,
) -> None:
    folder, port = processes.folder, free_port()
    config = write_config(
        folder,
        "fedavg",
        federation={"num_clients": 2, "clients_per_round": 2, "num_rounds": 2},
        transport={"keep_alive_seconds": 12},
    )
    server = start_server(processes, config, port)
    first = start_client(processes, config, port, 0)
    server.wait_for("client 0: joined")
    first.process.send_signal(signal.SIGSTOP)
    where = ("--server", f"127.0.0.1:{port}", "--state-dir", folder / "state")
    second = processes.start("again", "client", config, *where, "--client-id", 0, "--insecure")
    second.wait_for("must wait until the first is gone or was silent for 12 s")
    second.wait_for("client 0: connected to")
    start_client(processes, config, port, 1)
    assert server.ended() == 0, server.log
    assert second.ended() == 0
    assert records(folder)[-1]["clients"] == [0, 1]


def test_sigterm_makes_a_client_leave_at_once_in_the_middle_of_training(
    processes: Processes,
) -> None:
    folder, port = processes.folder, free_port()
    config = write_config(folder, "fedavg", federation={"num_rounds": 4})
    server = start_server(processes, config, port)
    clients = [start_client(processes, config, port, i) for i in range(3)]
    clients[0].wait_for("client 0: round 1:")
    clients[0].process.terminate()
    told = time.monotonic()
    assert clients[0].ended() == 0
    assert time.monotonic() - told < 7
    assert "stop requested; leaving" in clients[0].log
    server.wait_for("client 0: left")
    assert server.ended() == 0, server.log
    assert records(folder)[-1]["clients"] == [1, 2]


def test_an_error_in_a_clients_own_code_reaches_the_servers_terminal(processes: Processes) -> None:
    folder, port = processes.folder, free_port()
    config = write_config(folder, "fedavg", federation={"num_rounds": 3})
    server = start_server(processes, config, port)
    start_client(processes, config, port, 0)
    own = folder / "other"
    own.mkdir()
    broken = SLOW_MODEL.replace("time.sleep(0.1)", "raise ValueError('sensor 7 is blind')")
    (own / "slow_model.py").write_text(broken)
    elsewhere = own / "federation.toml"
    elsewhere.write_bytes(config.read_bytes())
    start_client(processes, elsewhere, port, 1)
    start_client(processes, config, port, 2)
    assert server.ended() == 0, server.log
    assert "round 2: client 1 not counted: ValueError: sensor 7 is blind (" in server.log
    assert "slow_model.py, line " in server.log
    assert "client 1: failed in 3 of the 3 rounds in which it was asked" in server.log
    errors = [e for r in records(folder) for e in r["errors"]]
    assert [(e["client"], e["phase"]) for e in errors] == [(1, "train")] * 3
    assert all("ValueError: sensor 7 is blind" in e["error"] for e in errors)


@pytest.mark.parametrize("rule", sorted(ALGORITHMS))
def test_launch_gives_the_same_bytes_as_a_simulation(processes: Processes, rule: str) -> None:
    runs = [launch(processes, "four", rule, 4)]
    if rule in ("fedavg", "padamfed"):
        runs.append(launch(processes, "one", rule, 1))
    assert [run.ended() for run in runs] == [0] * len(runs), runs[0].log
    config = RunConfig.from_file(processes.folder / "four" / "config.toml")
    simulate(config.updated([f"output.directory={processes.folder / 'alone'}"]))
    expected = (processes.folder / "alone" / "model.safetensors").read_bytes()
    for name in ["four", "one"][: len(runs)]:
        assert (processes.folder / name / "model.safetensors").read_bytes() == expected
    assert (
        "[clients 0] client 0: round"
        in next((processes.folder / "four" / "logs").glob("clients-0.log")).read_text()
    )


def test_samplers_schedules_and_options_give_the_same_bytes_over_grpc(
    processes: Processes,
) -> None:
    """Clusters need a message of their own, tracked clients send more than the others."""
    options = {
        "algorithm.tracked_clients": 1,
        "federation.sampler": "clustered",
        "federation.warmup_rounds": 1,
        "schedule.client": "cosine",
        "training.clip_norm": 0.5,
        "training.gradient_momentum": 0.5,
    }
    more = [part for key, value in options.items() for part in ("--set", f"{key}={value}")]
    run = launch(processes, "four", "fadamgc", 4, *more)
    assert run.ended() == 0, run.log
    config = RunConfig.from_file(processes.folder / "four" / "config.toml")
    simulate(config.updated([f"output.directory={processes.folder / 'alone'}"]))
    found, expected = (
        (processes.folder / name / "model.safetensors").read_bytes() for name in ("four", "alone")
    )
    assert found == expected


def processes_of(folder: Path) -> list[int]:
    """Ids of processes whose command line names the folder's run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
            own = Path(os.readlink(entry / "cwd")) == folder
        except OSError:
            continue
        if own and b"fedopt_flwr" in command:
            found.append(int(entry.name))
    return found


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_launch_leaves_no_process_behind(processes: Processes, ending: signal.Signals) -> None:
    run = launch(processes, "run", "fedavg", 2, "--set", "federation.num_rounds=100000")
    run.wait_for("5 of 5 clients connected")
    assert len(processes_of(processes.folder)) == 3
    run.process.send_signal(ending)
    assert run.ended() != 0
    assert "Traceback" not in run.log
    wait_until(lambda: not processes_of(processes.folder), lambda: "the end of all processes")


def test_launch_ends_when_its_clients_cannot_start(processes: Processes) -> None:
    run = launch(processes, "run", "fedavg", 2, "--set", "data.name=npz", "--set", "data.path=.")
    assert run.ended() != 0
    assert "holds neither train.npz nor test.npz" in run.log
    assert "Traceback" not in run.log
    assert processes_of(processes.folder) == []


def test_launch_ends_when_all_its_clients_are_killed(processes: Processes) -> None:
    run = launch(processes, "run", "fedavg", 2, "--set", "federation.num_rounds=100000")
    run.wait_for("5 of 5 clients connected")
    for number in processes_of(processes.folder):
        if number != run.process.pid:
            os.kill(number, signal.SIGKILL)
    assert run.ended() == 1
    assert "ended with code -9" in run.log
    assert processes_of(processes.folder) == []


def test_two_machines_with_certificates_as_the_readme_says(processes: Processes) -> None:
    folder, port = processes.folder, free_port()
    config = write_config(folder, "fedavg", federation={"num_rounds": 2})
    assert processes.start("ca", "certs", "init", "--host", "localhost").ended() == 0
    for i in range(3):
        assert processes.start("ca", "certs", "client", i).ended() == 0
    files = ("--certificate", "certs/server.pem", "--key", "certs/server.key")
    address = ("--address", f"0.0.0.0:{port}", "--client-ca", "certs/ca.pem")
    server = processes.start("server", "server", config, *address, *files)
    clients = []
    for i in range(3):
        own = ("--certificate", f"certs/{i}.pem", "--key", f"certs/{i}.key")
        where = ("--server", f"localhost:{port}", "--ca", "certs/ca.pem", "--client-id", i)
        clients.append(processes.start(f"c{i}", "client", config, *where, *own))
    assert server.ended() == 0, server.log
    assert [client.ended() for client in clients] == [0, 0, 0]
    other = ("--set", "output.directory=two")
    second = processes.start("two", "server", config, *address, *files, *other)
    second.wait_for("listening at")
    own = ("--certificate", "certs/0.pem", "--key", "certs/0.key")
    where = ("--server", f"localhost:{port}", "--ca", "certs/ca.pem", "--client-id", 1)
    refused = processes.start("thief", "client", config, *where, *own)
    assert refused.ended() == 2
    assert "this certificate is for 0" in refused.log
    where = ("--server", f"localhost:{port}", "--ca", "certs/ca.pem", "--client-id", 1)
    stranger = processes.start("stranger", "client", config, *where)
    assert stranger.ended() == 2
    assert "it wants a certificate: give --certificate and --key" in stranger.log

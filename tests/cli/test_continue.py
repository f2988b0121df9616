"""`fedopt server --continue`, as a service manager starts it again and again."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from processes import (
    InProcess,
    Process,
    Processes,
    free_port,
    records,
    refused,
    require_c_is_the_mean,
    start_client,
    start_server,
    write_config,
)


@pytest.mark.slow
def test_a_server_is_continued_wherever_it_ended(tmp_path: Path, processes: Processes) -> None:
    config = write_config(tmp_path, "scaffold_m")
    port = free_port()

    def start() -> None:
        nonlocal server
        server = start_server(processes, config, port, "--continue")
        server.wait_for("listening")

    server = start_server(processes, config, port, "--continue")
    server.wait_for("listening")
    server.kill()  # before a client came: config.toml and an empty rounds.jsonl are left
    assert (tmp_path / "run" / "rounds.jsonl").read_bytes() == b""
    start()
    clients = [start_client(processes, config, port, i) for i in range(3)]
    server.wait_for("round 2/12")
    server.kill()
    start()
    server.wait_for("round 6/12")
    server.process.send_signal(signal.SIGTERM)
    assert server.ended() == 143
    start()
    assert server.ended() == 0
    assert [client.ended() for client in clients] == [0, 0, 0]
    assert [r["round"] for r in records(tmp_path)] == list(range(13))
    require_c_is_the_mean(tmp_path)
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.is_file()}
    again = start_server(processes, config, port, "--continue")
    assert again.ended() == 0
    assert "is over" in again.log
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.is_file()} == before


RUN = ["--set", "output.directory=run", "--set", "output.checkpoint_every=1"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "--continue: set output.directory"),
        (["--set", "output.directory=run"], "output.checkpoint_every, without which"),
        ([*RUN, "--resume", "run"], "--resume: takes the run from its directory; leave out"),
    ],
)
def test_what_cannot_be_continued_is_refused(
    in_process: InProcess, arguments: list[str], text: str
) -> None:
    refused(in_process("server", "--insecure", "--continue", *arguments), text)


def test_a_run_of_more_than_round_0_without_a_checkpoint_is_left_alone(
    in_process: InProcess, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    lines = '{"round": 0}\n{"round": 1}\n'
    (tmp_path / "run" / "rounds.jsonl").write_text(lines)
    (tmp_path / "run" / "summary.json").write_text("{}")  # but no model: it is not over
    refused(in_process("server", "--insecure", "--continue", *RUN), "'run' already holds a run")
    assert (tmp_path / "run" / "rounds.jsonl").read_text() == lines


@pytest.mark.slow
def test_replicas_that_are_started_alike_share_out_the_ids(
    tmp_path: Path, processes: Processes
) -> None:
    config = write_config(tmp_path, "scaffold_m", federation={"num_rounds": 100})
    port = free_port()
    server = start_server(processes, config, port)
    server.wait_for("listening")
    where = ("--server", f"127.0.0.1:{port}", "--state-dir", tmp_path / "state")

    def start(name: str) -> Process:
        return processes.start(name, "client", config, *where, "--one-of", "0-2", "--insecure")

    replicas = [start(f"replica-{n}") for n in range(3)]
    server.wait_for("round 0/100")
    extra = start("extra")
    assert extra.ended() == 2
    assert "all of its 3 ids are taken" in extra.log
    replicas[1].kill()
    replicas[1] = start("replica-again")  # has the id that is free, and so its state
    replicas[1].wait_for("connected to")
    assert server.ended() == 0
    assert [replica.ended() for replica in replicas] == [0, 0, 0]
    assert not any("state" in e["error"] for r in records(tmp_path) for e in r["errors"])
    require_c_is_the_mean(tmp_path)

"""Checkpoints of a federation: clients keep the states that any kept one of them counts on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import checkpoint_file
from processes import (
    Processes,
    free_port,
    require_c_is_the_mean,
    start_client,
    start_server,
    write_config,
)
from streams import ServerThread, hosted_clients, make_config

from fedopt_flwr.flower import DiskStates
from fedopt_flwr.run.directory import RunDirectory


def test_each_kept_checkpoint_finds_the_states_that_it_counts_on(tmp_path: Path) -> None:
    config = make_config("padamfed", clients_per_round=2, num_rounds=13)
    config["output"] = {"directory": tmp_path / "run", "checkpoint_every": 3, "keep": 3}
    with ServerThread(config) as server:
        hosted_clients(server, [0, 1, 2], tmp_path / "state")
        server.result()
    found = []
    for _ in range(3):
        checkpoint = RunDirectory(tmp_path / "run").read_checkpoint()
        states = DiskStates(tmp_path / "state" / f"run-{checkpoint.server.run}")
        versions = checkpoint.server.versions
        own = [states.load(i, version)["control_variate"] for i, version in versions.items()]
        c = checkpoint.server.vectors["control_variate"]
        np.testing.assert_allclose(sum(own).numpy() / 3, c.numpy(), atol=1e-6)
        found.append((checkpoint.server.round, tuple(sorted(versions.items()))))
        checkpoint_file(tmp_path / "run").unlink()
    assert [number for number, _ in found] == [12, 9, 6]
    assert len({versions for _, versions in found}) == 3
    files = [len(list(folder.iterdir())) for folder in (tmp_path / "state").glob("run-*/*")]
    assert max(files) <= 5  # of three checkpoints, what counts now and what was sent last


@pytest.mark.slow
def test_a_server_goes_on_from_the_checkpoint_before_the_damaged_ones(
    processes: Processes,
) -> None:
    folder, port = processes.folder, free_port()
    config = write_config(folder, "padamfed")
    server = start_server(processes, config, port)
    clients = [start_client(processes, config, port, i) for i in range(3)]
    server.wait_for("round 7/12")
    server.kill()
    newest = checkpoint_file(folder / "run")
    kept = sorted((folder / "run").glob("checkpoint-*"))
    assert len(kept) == 3
    for file in kept[1:]:
        file.write_bytes(file.read_bytes()[:-9])
    again = start_server(processes, config, port, "--resume", folder / "run")
    assert again.ended() == 0, again.log
    shown = " ".join(again.log.split())
    assert f"'{newest}' is broken" in shown
    assert f"continues from '{kept[0]}', the newest whole one" in shown
    assert "failed" not in again.log
    assert [client.ended() for client in clients] == [0, 0, 0]
    require_c_is_the_mean(folder)
    alone = processes.start("alone", "simulate", config, "--set", "output.directory=alone")
    assert alone.ended() == 0, alone.log
    same = [(folder / name / "model.safetensors").read_bytes() for name in ("run", "alone")]
    assert same[0] == same[1]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["fedavg", "padamfed"])
def test_a_server_that_was_killed_in_round_1_goes_on(processes: Processes, rule: str) -> None:
    folder, port = processes.folder, free_port()
    more = {"federation": {"num_rounds": 3}, "output": {"checkpoint_every": 100}}
    config = write_config(folder, rule, **more)
    server = start_server(processes, config, port)
    clients = [start_client(processes, config, port, i) for i in range(3)]
    file = folder / "run" / "checkpoint-000000.safetensors"
    server.wait_for("3 of 3 clients connected")
    while not file.exists():
        assert server.process.poll() is None, server.log
    server.kill()
    again = start_server(processes, config, port, "--resume", folder / "run")
    assert again.ended() == 0, again.log
    assert "failed" not in again.log
    assert [client.ended() for client in clients] == [0, 0, 0]

"""output.diagnostics over gRPC, with client processes: the records of a simulation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from processes import (
    Processes,
    fedopt,
    free_port,
    records,
    start_client,
    start_server,
    write_config,
)

MEASURED = (
    *("global_train_loss", "gradient_norm", "drift", "control_norm", "gradient_cosine"),
    *("each_client", "on_clients", "uplink_bytes", "downlink_bytes"),
)
SECTIONS: dict[str, Any] = {
    "federation": {"num_rounds": 3, "clients_per_round": 2},
    "data": {"holdout": 0.2},
    "evaluation": {"on_clients": True},
    "output": {"diagnostics": True},
}


def measured(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: record[name] for name in MEASURED} for record in found]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["fedavg", "scaffold"])
def test_processes_measure_what_a_simulation_does(rule: str, tmp_path: Path) -> None:
    config = write_config(tmp_path, rule, **SECTIONS)
    processes, port = Processes(tmp_path), free_port()
    try:
        server = start_server(processes, config, port)
        members = [start_client(processes, config, port, i) for i in range(3)]
        assert server.ended() == 0, server.log
        assert [member.ended() for member in members] == [0, 0, 0]
    finally:
        processes.end()
    apart = records(tmp_path)
    alone = fedopt("simulate", config, "--set", "output.directory=alone", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    lines = (tmp_path / "alone" / "rounds.jsonl").read_text().splitlines()
    assert measured(apart) == measured([json.loads(line) for line in lines])
    assert all(record["gradient_norm"] > 0 for record in apart)
    assert apart[-1]["drift"] > 0
    assert (apart[-1]["control_norm"] is None) == (rule == "fedavg")
    model = "model.safetensors"
    assert (tmp_path / "alone" / model).read_bytes() == (tmp_path / "run" / model).read_bytes()


@pytest.mark.slow
def test_a_process_may_refuse_to_be_diagnosed(tmp_path: Path) -> None:
    config = write_config(tmp_path, "scaffold_m", **SECTIONS)
    processes, port = Processes(tmp_path), free_port()
    try:
        server = start_server(processes, config, port)
        members = [start_client(processes, config, port, i) for i in range(2)]
        where = ("--server", f"127.0.0.1:{port}", "--state-dir", tmp_path / "state", "--insecure")
        members.append(
            processes.start("quiet", "client", config, *where, "--client-id", 2, "--no-evaluation")
        )
        assert server.ended() == 0, server.log
        assert [member.ended() for member in members] == [0, 0, 0]
    finally:
        processes.end()
    for record in records(tmp_path):
        assert record["gradient_norm"] is None
        assert record["failures"] == 0
        assert [(e["client"], e["phase"]) for e in record["errors"]] == [(2, "diagnose")]
    assert "client 2 did not tell its loss and gradient: client 2: refuses" in server.log

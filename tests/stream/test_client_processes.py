"""Client processes that refuse to evaluate, and whose data is read by processes of their own."""

from __future__ import annotations

import json
from pathlib import Path

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


@pytest.mark.slow
def test_a_client_process_may_refuse_to_evaluate(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        "scaffold_m",
        federation={"num_rounds": 2},
        data={"holdout": 0.2},
        evaluation={"on_clients": True, "metrics": ["f1"]},
    )
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
    last = records(tmp_path)[-1]
    assert last["clients"] == [0, 1, 2]
    found = last["on_clients"]
    assert (found["asked"], found["refused"]) == (3, 1)
    assert [entry["client"] for entry in found["clients"]] == [0, 1]
    assert set(found["spread"]) == {"loss", "accuracy", "f1"}
    assert "2 of 3 clients, 1 refused" in server.log


ROWS = """
import numpy as np
import torch
from torch.utils.data import Dataset

class Rows(Dataset):
    def __init__(self, seed):
        self.seed = seed

    def __len__(self):
        return 40

    def __getitem__(self, i):
        row = np.random.default_rng([self.seed, i])
        return {"x": torch.from_numpy(row.normal(size=row.integers(2, 6)).astype("float32"))}

def load(num_clients, seed):
    return [Rows(i) for i in range(num_clients)], Rows(99)

def collate(rows):
    means = torch.stack([row["x"].mean() for row in rows])
    return means.unsqueeze(1), (means > 0).long()
"""


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["fedavg", "scaffold_m", "padamfed"])
def test_data_that_processes_read_gives_the_same_bytes_in_a_launch(
    rule: str, tmp_path: Path
) -> None:
    (tmp_path / "ownlaunch.py").write_text(ROWS)
    (tmp_path / "own.toml").write_text(f"""
algorithm = {{ name = "{rule}" }}
federation = {{ num_clients = 4, clients_per_round = 2, num_rounds = 3 }}
training = {{ local_steps = 3, batch_size = 8, device = "cpu" }}
data = {{ name = "ownlaunch:load", collate = "ownlaunch:collate", loader_workers = 2 }}
model = {{ name = "logistic" }}
""")
    models, losses = [], []
    for verb, more in (("simulate", []), ("launch", ["--processes", "2"])):
        folder = ["--set", f"output.directory={verb}"]
        result = fedopt(verb, "own.toml", *more, *folder, cwd=tmp_path)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "Traceback" not in result.stderr
        models.append((tmp_path / verb / "model.safetensors").read_bytes())
        lines = (tmp_path / verb / "rounds.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["test_loss"] for line in lines])
    assert models[0] == models[1]
    assert losses[0] == losses[1]

"""Open federations over gRPC: clients come late, leave for good, come back changed."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import (
    Process,
    Processes,
    free_port,
    start_client,
    start_server,
    wait_until,
    write_config,
)
from streams import ClientThread, ServerThread, make_config
from torch.nn import functional

from fedopt_flwr import RunConfig
from fedopt_flwr.algorithms import ALGORITHMS
from fedopt_flwr.data import load_federated_data
from fedopt_flwr.errors import FedoptWarning
from fedopt_flwr.flower import DiskStates
from fedopt_flwr.rounds.participation import make_plan
from fedopt_flwr.rounds.record import RoundRecord
from fedopt_flwr.run.checkpoints import read_checkpoint
from fedopt_flwr.run.hosts import ClientHost
from fedopt_flwr.run.resuming import read_run

QUICK = ("fedavg", "scaffold_m", "padamfed")  # the others are slow together
_LONG = (pytest.mark.slow, pytest.mark.long)
OPEN: dict[str, Any] = {"num_clients": "open", "forget_after": 3}
CLIENT = """
[federation]
num_clients = 10  # of the digits each client takes its part

[model]
name = "slow_model:make"

[training]
device = "cpu"
"""


def records_of(run: Path) -> list[dict[str, Any]]:
    rounds = run / "rounds.jsonl"
    lines = rounds.read_text().splitlines() if rounds.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def await_round(run: Path, number: int, server: Process) -> None:
    def is_over() -> bool:
        assert server.process.poll() is None, server.log
        return any(record["round"] >= number for record in records_of(run))

    wait_until(is_over, lambda: f"round {number}; {server.log}")


def require_means_throughout(folder: Path, rounds: range) -> None:
    """At every checkpoint c is the mean of the c_i on the clients' own disks."""
    for number in reversed(rounds):  # the newest is the one that is read
        checkpoint = read_checkpoint(folder / "run")
        assert checkpoint.server.round == number
        states = DiskStates(folder / "state" / f"run-{checkpoint.server.run}")
        known, versions = dict(checkpoint.origin.num_examples), checkpoint.server.versions
        assert versions.keys() == known.keys()
        own = [states.load(i, versions[i])["control_variate"].double().numpy() for i in known]
        c = checkpoint.server.vectors["control_variate"].numpy()
        np.testing.assert_allclose(np.mean(own, axis=0), c, atol=1e-6)
        assert np.abs(c).max() > 1e-4
        (folder / "run" / f"checkpoint-{number:06d}.safetensors").unlink()


@pytest.mark.parametrize(
    "rule",
    [*QUICK, *(pytest.param(r, marks=_LONG) for r in ALGORITHMS if r not in QUICK)],
)
def test_a_client_that_joins_over_grpc_has_its_part_from_then_on(tmp_path: Path, rule: str) -> None:
    own = RunConfig(federation={"num_clients": 5}, model={"name": "logistic"})
    config = make_config(rule, **OPEN, min_clients=3, clients_per_round=4, num_rounds=9)
    config["output"] = {"directory": tmp_path / "run", "checkpoint_every": 1, "keep": 20}
    late: list[ClientThread] = []

    def on_round(record: RoundRecord) -> None:
        if record.round == 4:
            late.append(client(4))
            server.said.wait_for("client 4: joined with")

    def client(i: int) -> ClientThread:
        return ClientThread(server, i, tmp_path / "state", host=ClientHost(own, [i]))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedoptWarning)
        server = ServerThread(config, on_round=on_round)
        with server:
            first = [client(i) for i in range(3)]
            server.result()
    for thread in [*first, *late]:
        thread.join()
    assert [r.members for r in server.records if r.members] == [{"joined": [4]}]
    assert [r.round for r in server.records if r.members] == [5]
    assert {i for r in server.records for i in r.clients} == {0, 1, 2, 4}
    assert len(read_checkpoint(tmp_path / "run").origin.num_examples) == 4
    kind = ALGORITHMS[rule]
    if "control_variate" in kind.client_state:  # none is known before round 1 without a start pass
        require_means_throughout(tmp_path, range(0 if kind().start_names else 1, 10))


@pytest.mark.filterwarnings("ignore:.*its theory has")
def test_diagnostics_are_of_those_who_are_members(tmp_path: Path) -> None:
    own = RunConfig(federation={"num_clients": 5}, model={"name": "logistic"})
    config = make_config("scaffold_m", **OPEN, min_clients=2, clients_per_round=2, num_rounds=4)
    config["output"] = {"diagnostics": True}
    late: list[ClientThread] = []

    def on_round(record: RoundRecord) -> None:
        if record.round == 2:
            late.append(client(3))
            server.said.wait_for("client 3: joined with")

    def client(i: int) -> ClientThread:
        return ClientThread(server, i, tmp_path / "state", host=ClientHost(own, [i]))

    server = ServerThread(config, on_round=on_round)
    with server:
        first = [client(i) for i in range(2)]
        result = server.result()
    for thread in [*first, *late]:
        thread.join()
    assert [list(r.each_client) for r in result.rounds] == 3 * [["0", "1"]] + 2 * [["0", "1", "3"]]
    assert all("control_norm" in e for r in result.rounds for e in r.each_client.values())
    clients = load_federated_data(own).clients
    losses = []
    for i in (0, 1, 3):
        rows = torch.arange(clients[i].num_examples)
        inputs, labels = next(clients[i].batches([rows], torch.device("cpu")))
        losses.append(functional.cross_entropy(result.model(inputs), labels))
    mean = torch.stack(losses).mean()
    slopes = torch.autograd.grad(mean, list(result.model.parameters()))
    slope = torch.cat([part.flatten() for part in slopes])
    last = result.rounds[-1]
    assert last.global_train_loss == pytest.approx(float(mean.detach()), rel=1e-5)
    assert last.gradient_norm == pytest.approx(float(slope.norm()), rel=1e-4)


def test_a_client_that_divides_data_must_know_into_how_many_parts(tmp_path: Path) -> None:
    config = make_config("fedavg", **OPEN, clients_per_round=1, num_rounds=1)
    with ServerThread(config) as server:
        lost = ClientThread(server, 0, tmp_path / "state")
        assert lost.has_ended(30)
        assert "give their number (to a client of an open federation its own)" in str(lost.error)
        whole = RunConfig(federation={"num_clients": 5}, model={"name": "logistic"})
        ClientThread(server, 1, tmp_path / "state", host=ClientHost(whole, [1]))
        server.result()
    assert server.records[-1].clients == [1]


class Stop(Exception):
    """Ends a server in the middle of its run."""


@pytest.mark.filterwarnings(
    "ignore:--resume", "ignore:.*its theory has", "ignore:algorithm.momentum"
)
def test_a_resumed_run_keeps_its_step_sizes_and_nothing_of_those_it_does_not_know(
    tmp_path: Path,
) -> None:
    def hosted(server: ServerThread, i: int, parts: int) -> ClientThread:
        own = RunConfig(federation={"num_clients": parts}, model={"name": "logistic"})
        return ClientThread(server, i, tmp_path / "state", host=ClientHost(own, [i]))

    config = make_config("padamfed", **OPEN, min_clients=2, clients_per_round=3, num_rounds=8)
    config["training"] = {"local_epochs": 1, "device": "cpu"}
    config["output"] = {"directory": str(tmp_path / "run"), "checkpoint_every": 1}

    def on_round(record: RoundRecord) -> None:
        if record.round == 2:
            clients.append(hosted(first, 1, 5))
            first.said.wait_for("client 1: joined with")
        if record.round == 5:
            raise Stop

    first = ServerThread(config, on_round=on_round)
    clients: list[ClientThread] = []
    with first:
        clients += [hosted(first, i, 40) for i in (0, 2)]
        with pytest.raises(Stop):
            first.result()
    for client in clients:
        client.stop()
    found, checkpoint = read_run(tmp_path / "run")
    assert len(set(dict(checkpoint.origin.num_examples).values())) > 1
    terms = tmp_path / "run" / "client-terms"
    (terms / "client-9").mkdir()
    (terms / "client-9" / "round-4.safetensors").write_bytes(b"of one that joined and left")
    rules: list[dict[str, Any]] = []
    second = ServerThread(found.to_dict(), checkpoint=checkpoint)
    with second:
        for i, parts in ((0, 40), (1, 5), (2, 40)):
            hosted(second, i, parts)
        result = second.result()
    rules.append(result.summary["hyperparameters"])
    plan = make_plan(found.make_rule(), found, checkpoint.server.first)
    assert list(plan.num_examples) == [0, 2]
    assert rules == [found.make_rule().resolve(plan).model_dump()]
    assert not (terms / "client-9").exists()
    assert sorted(path.name for path in terms.iterdir()) == [f"client-{i}" for i in range(3)]
    require_means_throughout(tmp_path, range(6, 9))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["scaffold_m", "padamfed"])
def test_clients_join_late_and_leave_for_good(processes: Processes, rule: str) -> None:
    folder, run, port = processes.folder, processes.folder / "run", free_port()
    federation = OPEN | {"min_clients": 5, "clients_per_round": 4, "num_rounds": 60}
    output = {"keep": 100}  # so that clients keep what each of the checkpoints counts on
    config = write_config(folder, rule, federation=federation, output=output)
    own = folder / "client.toml"
    own.write_text(CLIENT)
    server = start_server(processes, config, port)
    clients = {i: start_client(processes, own, port, i) for i in range(5)}
    await_round(run, 9, server)
    clients[5] = start_client(processes, own, port, 5)
    clients[6] = start_client(processes, own, port, 6)
    server.wait_for("client 5: joined with")
    server.wait_for("client 6: joined with")
    await_round(run, 19, server)
    clients[7] = start_client(processes, own, port, 7)
    server.wait_for("joined: 7")
    server.kill()
    done = read_checkpoint(run).server.round
    server = start_server(processes, config, port, "--resume", run)
    await_round(run, max(30, done + 2), server)
    for i in (1, 5):
        clients.pop(i).kill()
    assert server.ended() == 0, server.log
    assert [client.ended() for client in clients.values()] == [0] * 6
    changes = {r["round"]: r["members"] for r in records_of(run) if r["members"]}
    joined = {i: n for n, change in changes.items() for i in change.get("joined", ())}
    forgotten = {i: n for n, change in changes.items() for i in change.get("forgotten", ())}
    assert joined.keys() == {5, 6, 7}
    assert min(joined[5], joined[6]) >= 10
    assert joined[7] >= 20
    assert forgotten.keys() == {1, 5}
    assert min(forgotten.values()) >= 30 + 3
    assert "forgotten: " in server.log
    kept = {path.name for path in (run / "client-terms").iterdir() if any(path.iterdir())}
    assert {f"client-{i}" for i in clients} <= kept
    assert oct((run / "client-terms").stat().st_mode)[-3:] == "700"
    require_means_throughout(folder, range(61))


@pytest.mark.slow
def test_clients_come_back_with_other_data_and_without_their_state(processes: Processes) -> None:
    folder, run, port = processes.folder, processes.folder / "run", free_port()
    federation: dict[str, Any] = {"num_clients": "open", "weighting": "examples"}
    federation |= {"clients_per_round": 3, "num_rounds": 50}
    config = write_config(folder, "scaffold", federation=federation)
    own = folder / "client.toml"
    own.write_text(CLIENT)
    server = start_server(processes, config, port)
    clients = {i: start_client(processes, own, port, i) for i in range(3)}
    await_round(run, 5, server)
    clients[1].kill()
    clients[1] = start_client(processes, own, port, 1, "--set", "federation.num_clients=30")
    clients[1].wait_for("counts with its")
    clients[2].kill()
    (states,) = (folder / "state").glob("run-*")
    shutil.rmtree(states / "client-2")
    clients[2] = start_client(processes, own, port, 2, "--state-lost", "restart")
    assert server.ended() == 0, server.log
    assert [client.ended() for client in clients.values()] == [0] * 3
    changes = [r["members"] for r in records_of(run) if r["members"]]
    assert changes == [{"resized": [1]}, {"restarted": [2]}]
    words = " ".join(server.log.split())
    assert "its new weight counts from round" in words
    assert "client 1: counts with its" in clients[1].log
    assert "round 50: " in clients[2].log
    errors = [e["error"] for r in records_of(run) for e in r["errors"] if e["client"] == 2]
    assert sum("it begins anew" in error for error in errors) == 1
    checkpoint = read_checkpoint(run)
    states = DiskStates(states)
    counts, versions = dict(checkpoint.origin.num_examples), checkpoint.server.versions
    c_i = {i: states.load(i, versions[i])["control_variate"].double().numpy() for i in counts}
    mean = sum(n * c_i[i] for i, n in counts.items()) / sum(counts.values())
    np.testing.assert_allclose(
        checkpoint.server.vectors["control_variate"].numpy(), mean, atol=1e-6
    )
    assert len(set(counts.values())) > 1

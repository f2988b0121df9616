"""Federations that lose a client for good, or hear numbers that nobody can compute with."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import (
    Processes,
    free_port,
    records,
    require_c_is_the_mean,
    start_client,
    start_server,
    wait_until,
    write_config,
)
from streams import ClientThread, ServerThread, make_config

from fedopt_flwr.flower.messages import ROUND
from fedopt_flwr.rounds.record import RoundRecord
from fedopt_flwr.run.directory import RunDirectory
from fedopt_flwr.run.resuming import read_run


class Huge:
    """A client whose replies of some rounds are 3e38 throughout, which is finite."""

    def __init__(self, inner: Any, rounds: set[int]) -> None:
        self._inner, self._rounds = inner, rounds
        self.get_properties = inner.get_properties

    def fit(self, parameters: Any, config: Any) -> Any:
        arrays, count, report = self._inner.fit(parameters, config)
        if config[ROUND] in self._rounds:
            arrays = [np.full_like(array, 3e38) for array in arrays]
        return arrays, count, report


@pytest.mark.parametrize("rule", ["fedavg", "fedadam", "scaffold_m", "padamfed"])
def test_one_huge_reply_costs_its_round_and_neither_run_nor_checkpoint(
    tmp_path: Path, rule: str
) -> None:
    config = make_config(rule, num_rounds=6)
    config["output"] = {"directory": str(tmp_path / "run"), "checkpoint_every": 1}

    with ServerThread(config) as server:
        for i in range(3):
            ClientThread(
                server,
                i,
                tmp_path / "state",
                wrap=(lambda c: Huge(c, {3})) if i == 1 else (lambda c: c),
            )
    result = server.result()
    assert [r.round for r in result.rounds if r.taken_back] == [3]
    rounds = [r for r in result.rounds if r.round]
    assert [(r.failures, r.test_loss is None) for r in rounds] == [
        (3, True) if r.round == 3 else (0, False) for r in rounds
    ]
    assert result.summary["diverged_at"] is None
    assert result.summary["final_test_loss"] < rounds[0].test_loss * 2
    assert math.isfinite(result.summary["final_test_loss"])
    told = {client: text for number, client, text in server.errors if number == 3}
    assert told[1].startswith("its reply, with a norm of ")
    assert "the largest reply is that of client 1, with a norm of " in told[0]
    server_state = RunDirectory(tmp_path / "run").read_checkpoint().server
    assert all(bool(v.isfinite().all()) for v in server_state.vectors.values())
    assert server_state.round == 6
    if "control_variate" in server_state.vectors:
        require_c_is_the_mean(tmp_path)


class Stop(Exception):
    pass


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:--resume")  # that it is said, other tests see
def test_a_resumed_server_goes_on_with_those_who_are_there_and_checks_who_comes_later(
    tmp_path: Path,
) -> None:
    config = make_config("scaffold_m", num_rounds=20)
    config["output"] = {"directory": str(tmp_path / "run"), "checkpoint_every": 1}
    state = tmp_path / "state"

    def stop(record: RoundRecord) -> None:
        if record.round == 3:
            raise Stop

    with ServerThread(config, on_round=stop) as first:
        clients = [ClientThread(first, i, state) for i in range(3)]
    with pytest.raises(Stop):
        first.result()
    for client in clients:
        client.stop()
    found, checkpoint = read_run(tmp_path / "run", settings=["federation.start_timeout=15"])
    latecomers: list[ClientThread] = []

    def later(record: RoundRecord) -> None:
        if record.round == 10:
            other = ClientThread(second, 1, tmp_path / "other", wrap=Fewer)
            second.said.wait_for("client 1: refused: client 1 holds 7 examples and held")
            other.said.wait_for("client 1 holds 7 examples and held")
            other.stop()
            latecomers.append(ClientThread(second, 1, state))
            second.said.wait_for("client 1: joined")
        if record.round == 12:
            assert record.clients == [0, 1, 2]

    with ServerThread(found.to_dict(), on_round=later, checkpoint=checkpoint) as second:
        for i in (0, 2):
            ClientThread(second, i, state)
    result = second.result()
    assert [r.round for r in result.rounds] == list(range(21))
    assert result.rounds[4].clients == [0, 2]
    assert result.rounds[-1].clients == [0, 1, 2]
    assert all(r.failures == 0 for r in result.rounds)
    require_c_is_the_mean(tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:--resume")
def test_a_server_lost_before_its_results_needs_no_client_for_them_and_sends_home_who_asks(
    tmp_path: Path,
) -> None:
    config = make_config("scaffold_m", num_rounds=3)
    config["output"] = {"directory": str(tmp_path / "run"), "checkpoint_every": 1}
    with ServerThread(config) as first:
        for i in range(3):
            ClientThread(first, i, tmp_path / "state")
    model = (tmp_path / "run" / "model.safetensors").read_bytes()
    for name in ("model.safetensors", "summary.json"):
        (tmp_path / "run" / name).unlink()

    found, checkpoint = read_run(tmp_path / "run")
    with ServerThread(found.to_dict(), checkpoint=checkpoint) as second:
        client = ClientThread(second, 1, tmp_path / "state")
        client.said.wait_for("the run is over")
    assert second.result().rounds[-1].test_loss == first.result().rounds[-1].test_loss
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == model


class Fewer:
    """A client that says that it has seven examples."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.fit = inner, inner.fit

    def get_properties(self, config: Any) -> Any:
        return {**self._inner.get_properties(config), "num_examples": 7}


@pytest.mark.slow
def test_a_killed_server_goes_on_without_a_client_that_is_gone_for_good(
    processes: Processes,
) -> None:
    folder, port = processes.folder, free_port()
    config = write_config(folder, "scaffold_m", federation={"num_rounds": 60})
    server = start_server(processes, config, port)
    clients = [start_client(processes, config, port, i) for i in range(3)]
    clients[1].wait_for("client 1: round 3:")
    clients[1].kill()
    number = len(records(folder))
    wait_until(lambda: len(records(folder)) > number + 3, lambda: f"rounds: {server.log}")
    server.kill()
    resumed = ("--resume", folder / "run", "--set", "federation.start_timeout=30")
    server = start_server(processes, config, port, *resumed)
    server.wait_for("the run continues with 2 of the run's 3 clients, without 1")
    assert "its bits may differ from those of an undisturbed run" in server.log
    again = start_client(processes, config, port, 1)
    assert server.ended() == 0, server.log
    assert [client.ended() for client in (clients[0], clients[2], again)] == [0, 0, 0]
    done = records(folder)
    assert [r["round"] for r in done] == list(range(61))
    assert done[-1]["clients"] == [0, 1, 2]
    require_c_is_the_mean(folder)

"""Several processes with one client id: which of them serves, and when the others leave."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from flwr.common import FitIns, FitRes
from processes import (
    Processes,
    free_port,
    records,
    require_c_is_the_mean,
    start_client,
    start_server,
    write_config,
)
from streams import ClientThread, ServerThread, make_config

from fedopt_flwr.engines.stream.proxy import StreamProxy
from fedopt_flwr.flower.messages import PHASE

pytestmark = pytest.mark.filterwarnings(
    "ignore:no client's reply", "ignore:client .*failed in .* rounds in which"
)


class Stage:
    """A server of two clients, of which number 0 is played by several processes, in this order."""

    def __init__(self, tmp_path: Path, rounds: int, *, diagnostics: bool = False) -> None:
        self.tmp_path, self.reached = tmp_path, threading.Event()
        self._hold, self._held_round = threading.Event(), 3
        config = make_config(num_clients=2, clients_per_round=2, num_rounds=rounds)
        config["output"] = {"diagnostics": diagnostics}
        self.server = ServerThread(config, on_round=self._on_round)

    def _on_round(self, record: Any) -> None:
        if record.round == self._held_round:
            self.reached.set()
            self._hold.wait(60)
        time.sleep(0.1)  # a round, so that a client that asks again finds the run at work

    def client(self, name: str) -> ClientThread:
        return ClientThread(self.server, 0, self.tmp_path / name)

    def swap(self, first: ClientThread, name: str) -> ClientThread:
        """Put a client of another folder into the place of the first, between two rounds."""
        self.reached.wait(60)
        first.stop()
        self.server.said.wait_for("client 0: left")
        second = self.client(name)
        while self.server.roster.clients()[0].state != "ready":
            time.sleep(0.05)
        return second

    def go_on(self) -> None:
        self._hold.set()


@pytest.mark.slow
def test_the_process_that_has_the_state_takes_its_place_back(tmp_path: Path) -> None:
    stage = Stage(tmp_path, rounds=60)
    with stage.server as server:
        other = ClientThread(server, 1, tmp_path / "other")
        thief = stage.swap(stage.client("own"), "elsewhere")
        owner = stage.client("own")  # as the first one, awake again
        owner.said.wait_for("already exists")
        stage.go_on()
        owner.said.wait_for("connected to")
        reason = thief.said.wait_for("aborted: it lost its state, and another connection")
        assert "stop one of the two" in reason
        result = server.result()
        for client in (other, owner, thief):
            client.join()
    assert result.rounds[-1].clients == [0, 1]
    failed = [number for number, client, text in server.errors if "lost its state" in text]
    assert failed
    assert failed[-1] < 59
    assert "client 0: left: it lost its state" in str(server.said)
    assert str(owner.said).count("connected to") == 1
    assert "the run is over" in str(thief.said)


def test_a_client_without_its_state_that_is_diagnosed_is_known_to_lack_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[tuple[str, bool]] = []
    fit = StreamProxy.fit

    def watched(
        proxy: StreamProxy, ins: FitIns, timeout: float | None, group_id: int | None
    ) -> FitRes:
        result = fit(proxy, ins, timeout, group_id)
        if proxy.seat.client_id == 0:
            answers.append((str(ins.config[PHASE]), proxy.seat.has_lost_state))
        return result

    monkeypatch.setattr(StreamProxy, "fit", watched)
    stage = Stage(tmp_path, rounds=5, diagnostics=True)
    with stage.server as server:
        clients = [ClientThread(server, 1, tmp_path / "other")]
        clients.append(stage.swap(stage.client("own"), "elsewhere"))
        stage.go_on()
        server.result()
        for client in clients:
            client.join()
    begun = [("start", False), ("diagnose", False), *3 * [("train", False), ("diagnose", False)]]
    assert answers == [*begun, *2 * [("train", True), ("diagnose", True)]]


@pytest.mark.slow
def test_processes_without_the_state_do_not_take_turns_for_ever(tmp_path: Path) -> None:
    stage = Stage(tmp_path, rounds=80)
    with stage.server as server:
        other = ClientThread(server, 1, tmp_path / "other")
        one = stage.swap(stage.client("own"), "elsewhere")
        two = stage.client("nowhere")
        two.said.wait_for("already exists")
        stage.go_on()
        server.result()
        for client in (other, one, two):
            client.join()
    assert str(one.said).count("connected to") == 1
    assert str(two.said).count("connected to") == 1
    assert len({number for number, _, _ in server.errors}) >= 70
    assert "the run is over" in str(one.said)
    assert "the run is over" in str(two.said)


def test_a_healthy_client_keeps_its_place_and_the_other_leaves_with_the_run(tmp_path: Path) -> None:
    stage = Stage(tmp_path, rounds=5)
    with stage.server as server:
        first, other = stage.client("own"), ClientThread(server, 1, tmp_path / "other")
        server.said.wait_for("client 0: joined")
        second = stage.client("elsewhere")
        second.said.wait_for("already exists")
        stage.go_on()
        assert server.result().rounds[-1].failures == 0
        for client in (first, other, second):
            client.join()
    assert "connected to" not in str(second.said)
    assert "the run is over" in str(second.said)


def test_a_server_that_refused_nobody_ends_at_once(tmp_path: Path) -> None:
    stage = Stage(tmp_path, rounds=2)
    with stage.server as server:
        clients = [ClientThread(server, i, tmp_path) for i in (0, 1)]
        for client in clients:
            client.join()
        ended = time.monotonic()
        server.result()
    assert time.monotonic() - ended < 5


@pytest.mark.slow
def test_a_process_that_was_paused_takes_its_place_back_from_one_without_its_state(
    processes: Processes,
) -> None:
    folder, port = processes.folder, free_port()
    config = write_config(folder, "padamfed", federation={"num_rounds": 80})
    server = start_server(processes, config, port)
    clients = [start_client(processes, config, port, i) for i in range(3)]
    clients[0].wait_for("client 0: round 2:")
    clients[0].process.send_signal(signal.SIGSTOP)
    server.wait_for("client 0: left")  # keep-alive
    where = ("--server", f"127.0.0.1:{port}", "--state-dir", folder / "elsewhere")
    thief = processes.start("thief", "client", config, *where, "--client-id", 0, "--insecure")
    server.wait_for("lost its state")
    clients[0].process.send_signal(signal.SIGCONT)
    assert server.ended() == 0, server.log
    assert [client.ended() for client in [*clients, thief]] == [0, 0, 0, 0]
    assert "aborted: it lost its state, and another connection" in thief.log
    assert records(folder)[-1]["clients"] == [0, 1, 2]
    require_c_is_the_mean(folder)

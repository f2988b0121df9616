"""Who is waited for, for how long, and what happens to a client that never answers."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from streams import ClientThread, ServerThread, hosted_clients, make_config

from fedopt_flwr.engines.stream import Roster, patience
from fedopt_flwr.flower.messages import ROUND


class Silent:
    """A client that does not answer in one round until `release` is set."""

    def __init__(self, client: Any, in_round: int, release: threading.Event) -> None:
        self._client, self._in_round, self._release = client, in_round, release

    def get_properties(self, config: dict[str, Any]) -> Any:
        return self._client.get_properties(config)

    def fit(self, parameters: Any, config: dict[str, Any]) -> Any:
        if config[ROUND] == self._in_round:
            self._release.wait(60)
        return self._client.fit(parameters, config)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes become parts of a second."""
    monkeypatch.setattr(patience, "_TICK_SECONDS", 0.05)
    monkeypatch.setattr(patience, "_SAY_SECONDS", 0.3)
    monkeypatch.setattr(patience, "_LEAST_SECONDS", 3.0)
    monkeypatch.setattr(patience, "_FACTOR", 1)


@pytest.mark.usefixtures("hasty")
def test_a_client_that_never_answers_is_named_given_up_and_let_back(tmp_path: Path) -> None:
    release = threading.Event()
    with ServerThread(make_config("scaffold_m")) as server:
        hosted_clients(server, [0, 2], tmp_path)
        wrap = lambda client: Silent(client, 2, release)  # noqa: E731
        client = ClientThread(server, 1, tmp_path, wrap=wrap)
        server.said.wait_for("round 2: waiting for client 1 for ")
        server.said.wait_for("client 1: left: no answer within 3 s")
        release.set()
        client.said.wait_for("the server hung up, as it does where an answer takes too long")
        server.result()
        client.join()
    assert [(number, who) for number, who, _ in server.errors] == [(2, 1)], server.errors
    error = server.errors[0][2]
    assert "no answer within 3 s (federation.round_timeout = auto: 1 times the slowest" in error
    assert server.records[1].clients == [0, 1, 2]


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("timeout", ["none", 50.0])
def test_only_auto_gives_up_by_itself_and_all_say_who_is_waited_for(
    tmp_path: Path, timeout: Any
) -> None:
    release = threading.Event()
    with ServerThread(make_config("fedavg", round_timeout=timeout, num_rounds=2)) as server:
        hosted_clients(server, [0, 2], tmp_path)
        ClientThread(server, 1, tmp_path, wrap=lambda client: Silent(client, 2, release))
        server.said.wait_for("round 2: waiting for client 1 for ")
        time.sleep(1.5)
        release.set()
        assert server.result().rounds[-1].clients == [0, 1, 2]


@pytest.mark.usefixtures("hasty")
def test_nobody_is_given_up_before_a_first_reply_says_what_is_long(tmp_path: Path) -> None:
    release = threading.Event()
    config = make_config("fedavg", num_clients=1, clients_per_round=1, num_rounds=1)
    with ServerThread(config) as server:
        ClientThread(server, 0, tmp_path, wrap=lambda client: Silent(client, 1, release))
        server.said.wait_for("round 1: waiting for client 0 for ")
        time.sleep(1.5)
        release.set()
        assert server.result().rounds[-1].clients == [0]


def test_a_start_pass_does_not_say_how_long_a_round_takes() -> None:
    """A start pass may be one minibatch where a round has many epochs."""
    federation = ServerThread(make_config()).config.federation
    patient = patience.Patience(federation, lambda *waiting: None)
    patient.heard("start", 1.0)
    assert patient._limit("start") == 600
    assert patient._limit("train") == float("inf")
    patient.heard("train", 100.0)
    patient.heard("train", 50.0)
    assert patient._limit("train") == 2000
    assert patient._limit("start") == 600
    again = patience.Patience(federation, lambda *waiting: None)
    again.heard("train", 100.0)
    assert again._limit("start") == 2000  # which is no longer than training


def test_a_timeout_in_seconds_also_ends_what_is_not_taken_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Flower counts from when a question has arrived, which a client can put off for ever."""
    monkeypatch.setattr(patience, "_TICK_SECONDS", 0.02)
    monkeypatch.setattr(patience, "_GRACE_SECONDS", 0.1)
    federation = ServerThread(make_config(round_timeout=0.2)).config.federation
    patient = patience.Patience(federation, lambda *waiting: None)
    said = threading.Event()
    texts: list[str] = []

    def give_up(why: str) -> None:
        texts.append(why)
        said.set()

    begun = time.monotonic()
    with patient.watching(), patient.waiting(1, 1, "train", give_up):
        assert said.wait(10)
    assert time.monotonic() - begun >= 0.3
    assert "round_timeout = 0.2, and it takes nothing in" in texts[0]


def test_who_left_before_it_was_asked_stays_away() -> None:
    roster = Roster()
    roster.asked(1, 3)
    roster.answered(1, 0.1, "connection lost")
    assert not roster.clients()[1].is_here


def test_a_line_names_ten_clients_at_most() -> None:
    lines: list[str] = []
    roster = Roster(lines.append)
    roster.waiting(4, [1], 60)
    roster.waiting(4, ["a", "b"], 120)
    roster.waiting(4, range(12), 60)
    assert lines == [
        "round 4: waiting for client 1 for 60 s",
        "round 4: waiting for clients a, b for 120 s",
        "round 4: waiting for clients 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more for 60 s",
    ]

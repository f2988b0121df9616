"""Who gets a place: what strangers claim, what they are told, and what that leaves behind."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import grpc
import pytest
from flwr.proto.transport_pb2 import ClientMessage, Scalar
from processes import (
    PATIENCE,
    Processes,
    free_port,
    launch,
    records,
    start_server,
    wait_until,
    write_config,
)
from streams import ClientThread, Lines, RawPeer, ServerThread, hosted_clients, make_config

from fedopt_flwr import RunConfig
from fedopt_flwr.cli.show_federation import FederationDisplay
from fedopt_flwr.engines.stream import Roster, roster
from fedopt_flwr.engines.stream.protocol import PROTOCOL, read_claim
from fedopt_flwr.run.hosts import ClientHost

REFUSED = grpc.StatusCode.INVALID_ARGUMENT


def introduction(client_id: Any, num_examples: Any = 5, status: int = 0) -> bytes:
    """What a client says when it joins, also with types and codes that no honest one sends."""
    message = ClientMessage()
    answer = message.get_properties_res
    answer.status.code = status
    for name, value in {"client_id": client_id, "num_examples": num_examples}.items():
        kinds = {bool: "bool", int: "sint64", float: "double", str: "string"}
        answer.properties[name].CopyFrom(Scalar(**{kinds[type(value)]: value}))
    return bytes(message.SerializeToString())


def test_a_name_among_numbers_keeps_nobody_out_and_may_come_back(tmp_path: Path) -> None:
    with ServerThread(make_config()) as server:
        named = ClientThread(server, "ward-3", tmp_path)
        reason = named.said.wait_for("next attempt")
        assert "ids are numbers in this federation (federation.client_ids)" in reason
        hosted_clients(server, [0, 1, 2], tmp_path)
        assert server.result().rounds[-1].clients == [0, 1, 2]
        named.join()
        assert "the run is over" in str(named.said)


def test_a_federation_of_names_makes_numbers_wait(tmp_path: Path) -> None:
    config = make_config("fedavg", client_ids="names", num_clients=2, clients_per_round=2)
    config["data"] = {"partition": {"kind": "whole"}}
    with ServerThread(config) as server:
        number = ClientThread(server, 0, tmp_path)
        reason = number.said.wait_for("next attempt")
        assert "not found: client 0: ids are names in this federation" in reason
        for name in ("ward-3", "ward 4é"):
            ClientThread(server, name, tmp_path, host=ClientHost(server.config, [name]))
        assert server.result().rounds[-1].clients == ["ward 4é", "ward-3"]


@pytest.mark.parametrize(
    "answer",
    [
        introduction(1.0),
        introduction(True),
        introduction("1"),
        introduction(1, status=77),
        introduction(1, num_examples=-1),
        introduction("\x1b[31m" + "x" * 5000),
    ],
    ids=["a fraction", "true", "a text", "an unknown status", "below zero", "a long name"],
)
def test_an_introduction_that_is_not_quite_right_gives_the_place_back(
    tmp_path: Path, answer: bytes
) -> None:
    with ServerThread(make_config()) as server:
        peer = RawPeer(server.port, {"client_id": 1}, answer)
        line = server.said.wait_for("client 1: refused")
        assert line.isprintable()
        assert len(line) < 600
        peer.refused()
        server.said.wait_for("client 1: left")
        assert server.roster.clients() == {}
        hosted_clients(server, [0, 1, 2], tmp_path)
        assert server.result().rounds[-1].clients == [0, 1, 2]


BAD_CLAIMS = {
    "nothing": (b"", "no client id came"),
    "no JSON": (b"\xff\xfe", "unreadable"),
    "5,000 brackets": (b"[" * 4000, "unreadable"),
    "a deep field": (b'{"client_id": ' + b"[" * 4000, "unreadable"),
    "no object": (b"[1]", "unreadable"),
    "a long one": (json.dumps({"client_id": "x" * 5000}).encode(), "5017 bytes came"),
    "a lone surrogate": (b'{"client_id": "\\ud800"}', "unreadable"),
    "a line break": (b'{"client_id": "a\\nclient 0: joined"}', "client_id: got 'a\\nclient 0"),
    "an escape": (b'{"client_id": "\\u001b[31m"}', "client_id: got '\\x1b[31m'"),
    "no letters": (b'{"client_id": ""}', "client_id: got ''"),
    "a long name": (json.dumps({"client_id": "x" * 65}).encode(), "1 to 64 printable"),
    "a number as text": (b'{"client_id": "0"}', "client_id: got '0'"),
    "several": (b'{"client_id": "0-2"}', "client_id: got '0-2'"),
    "true": (b'{"client_id": true}', "client_id: got True"),
    "a fraction": (b'{"client_id": 1.0}', "client_id: got 1.0"),
    "below zero": (b'{"client_id": -1}', "client_id: got -1"),
    "a huge number": (b'{"client_id": ' + b"9" * 4000 + b"}", "client_id: got 999"),
    "no id": (b'{"instance": "x"}', "client_id: got None"),
    "a long token": (json.dumps({"client_id": 1, "token": "x" * 99}).encode(), "token: got"),
    "no size": (b'{"client_id": 1, "takes": 0}', "takes: got 0"),
    "another kind of token": (b'{"client_id": 1, "token": 7}', "token: got 7"),
    "the future": (
        b'{"protocol": 99, "package": "9.1\\n", "who": 1}',
        f"speaks protocol 99 (fedopt-flwr 9.1\\n) and the server protocol {PROTOCOL} (fedopt-flwr ",
    ),
    "a version of another kind": (b'{"protocol": true, "client_id": 1}', "protocol True"),
}


def test_a_claim_far_beyond_any_is_refused_before_it_is_held() -> None:
    """The server takes no more metadata than gRPC's own limit, though clients take more."""
    with ServerThread(make_config(start_timeout=5)) as server:
        code, _ = RawPeer(server.port, b"x" * 60_000).refused()
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("name", BAD_CLAIMS)
def test_what_a_claim_must_be_is_said_to_who_sends_another(name: str) -> None:
    contents, text = BAD_CLAIMS[name]
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        read_claim(contents)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


def test_no_claim_leaves_the_caller_without_a_reason_or_the_log_with_a_forged_line(
    tmp_path: Path,
) -> None:
    with ServerThread(make_config()) as server:
        for contents, text in BAD_CLAIMS.values():
            code, details = RawPeer(server.port, contents).refused()
            assert code is REFUSED, details
            assert text in details
        lines = str(server.said).splitlines()
        assert len(lines) == 10  # of the 22: strangers do not fill a disk
        assert all("refused:" in line and line.isprintable() for line in lines)
        hosted_clients(server, [0, 1, 2], tmp_path)
        server.result()


def test_what_comes_and_goes_before_the_start_leaves_nothing_behind(tmp_path: Path) -> None:
    config = make_config("fedavg", client_ids="names", num_clients=2, clients_per_round=2)
    config["data"] = {"partition": {"kind": "whole"}}
    with ServerThread(config) as server:
        for number in range(60):
            RawPeer(server.port, {"client_id": f"{number}-{'x' * 60}"[:64]}).close()
        wait_until(lambda: not server.roster.clients(), lambda: str(server.roster.clients()))
        assert len(str(server.said).splitlines()) <= 10
        for name in ("a", "b"):
            ClientThread(server, name, tmp_path, host=ClientHost(server.config, [name]))
        server.result()


def test_refusals_are_counted_once_there_were_many(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = 1000.0, Lines()
    monkeypatch.setattr(roster.time, "monotonic", lambda: now)
    shown = Roster(said)
    for number in range(1244):
        shown.refused(f"ipv4:127.0.0.1:{number}", "no")
    assert len(str(said).splitlines()) == 10
    now += 61
    shown.asked(0, 1)  # whatever happens next
    assert str(said).splitlines()[10:] == ["… 1,234 more refused in the last minute"]
    shown.refused("x", "no")
    assert str(said).endswith("x: refused: no")


def test_printing_decides_nothing(tmp_path: Path) -> None:
    def full(line: str) -> None:
        raise OSError(28, "No space left on device")

    with ServerThread(make_config(), say=full) as server:
        RawPeer(server.port, b"").refused()
        hosted_clients(server, [0, 1, 2], tmp_path)
        assert server.result().rounds[-1].clients == [0, 1, 2]


def test_presence_counts_who_is_here_now() -> None:
    display = FederationDisplay(RunConfig(**make_config()))
    for i in range(3):
        display.roster.joining(i, "", None)
        display.roster.ready(i, 5)
    assert display._presence() == "3 of 3 clients connected"
    display.roster.away(2, forget=True)
    display.roster.away(1)
    assert display._presence() == "1 of 3 clients connected, missing 1, 2"
    display.roster.joining("[/b]", "", None)
    display.roster.answered("[/b]", 1.0, "[/b] a client's words")
    display._console.print(display._table())  # whose words are no markup


def test_only_who_knows_the_token_joins(tmp_path: Path) -> None:
    with ServerThread(make_config(), token="right") as server:
        for claim in ({"client_id": 0}, {"client_id": 0, "token": "wrong"}):
            code, reason = RawPeer(server.port, claim).refused()
            assert code is grpc.StatusCode.PERMISSION_DENIED
            assert "only the clients that its own `fedopt launch` started" in reason
        for i in range(3):
            ClientThread(server, i, tmp_path, token="right")
        assert server.result().rounds[-1].clients == [0, 1, 2]
    assert "right" not in str(server.said)


@pytest.mark.slow
def test_another_process_of_this_machine_cannot_join_a_launch(processes: Processes) -> None:
    run = launch(processes, "run", "fedavg", 1, "--set", "federation.num_rounds=5000")
    log = processes.folder / "run" / "logs" / "clients-0-4.log"
    wait_until(lambda: log.exists() and "connected to" in log.read_text(), lambda: run.log)
    port = int(re.findall(r"connected to 127\.0\.0\.1:(\d+)", log.read_text())[0])
    code, _ = RawPeer(port, {"client_id": 0}).refused()
    assert code is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.slow
def test_a_server_and_clients_whose_logs_are_full_run_to_the_end(processes: Processes) -> None:
    folder, port = processes.folder, free_port()
    config = write_config(folder, "fedavg", federation={"num_rounds": 2})
    for name in ("server", "clients"):
        (folder / f"{name}.log").symlink_to("/dev/full")
    server = start_server(processes, config, port)
    who = ("--client-ids", "0-2", "--server", f"127.0.0.1:{port}", "--state-dir", folder / "state")
    clients = processes.start("clients", "client", config, *who, "--insecure")
    assert server.process.wait(PATIENCE) == 0
    assert clients.process.wait(PATIENCE) == 0
    assert records(folder)[-1]["clients"] == [0, 1, 2]


@pytest.mark.slow
def test_a_launch_whose_output_is_full_runs_to_the_end(processes: Processes) -> None:
    (processes.folder / "run.log").symlink_to("/dev/full")
    assert launch(processes, "run", "fedavg", 1).process.wait(PATIENCE) == 0
    assert (processes.folder / "run" / "summary.json").exists()

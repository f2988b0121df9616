"""What a hostile peer says over a real socket ends nothing, and is that peer's failure alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.common import Code, GetPropertiesRes, Status
from flwr.common.serde import get_properties_res_to_proto
from flwr.proto.transport_pb2 import ClientMessage, ServerMessage
from hostile import FACTS, HostileServer, Stage, start_liar
from streams import ServerThread, hosted_clients, make_config


def in_round_2(change: Callable[[Any], None]) -> Callable[..., None]:
    def changed(answer: ClientMessage, asked: ServerMessage) -> None:
        if asked.fit_ins.config["fedopt.round"].sint64 == 2:
            change(answer.fit_res)

    return changed


def says(reply: Any, key: str, text: str) -> None:
    reply.metrics[key].string = text


LIES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "in memory": (
        lambda r: (
            setattr(r.parameters, "tensor_type", "memory"),
            r.parameters.tensors.append(b""),
        ),
        "sent bytes that are no arrays",
    ),
    "a few arrays too many": (
        lambda r: r.parameters.tensors.extend([b""] * 11),
        "sent 13 arrays; expected ['delta', 'control_variate_change']",
    ),
    "many arrays": (lambda r: r.parameters.tensors.extend([b""] * 99), "message of 101 arrays"),
    "very many arrays": (
        lambda r: r.parameters.tensors.extend([b""] * 9999),
        "it has more than 4096 parts",
    ),
    "many values": (
        lambda r: [says(r, f"key {i}", "") for i in range(299)],
        "2 arrays and 306 values; must be at most 64 and 256",
    ),
    "a long name": (lambda r: says(r, "arrays", "," * 20_000), "holds a text of 20000 characters"),
    "names": (lambda r: says(r, "arrays", "x," * 2000), "expected ['delta', 'control_variate_"),
    "an error": (lambda r: says(r, "error", "\x1b[2J\n" + "x" * 20_000), r"\x1b[2J\nxxx"),
    "a status": (
        lambda r: (setattr(r.status, "code", 2), setattr(r.status, "message", "y\n" * 10_000)),
        r"y\ny\n",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_message_that_lies_is_one_failure_of_its_client(tmp_path: Path, lie: str) -> None:
    change, text = LIES[lie]
    with ServerThread(make_config()) as server:
        hosted_clients(server, [0, 2], tmp_path)
        start_liar(server, tmp_path, in_round_2(change))
        server.result()
    assert [(r.round, r.failures) for r in server.records] == [(0, 0), (1, 0), (2, 1), (3, 0)]
    ((_, client, error),) = server.errors
    assert client == 1
    assert text in error
    assert len(error) <= 500
    assert server.records[2].uplink_vectors <= 6
    note = server.roster.clients()[1].note
    assert len(note) <= 500
    assert note.isprintable()


@pytest.mark.parametrize(
    ("properties", "text"),
    [
        ({"client_id": 1.0, "num_examples": 5}, "answered client_id 1.0; must be a number"),
        ({"client_id": True, "num_examples": 5}, "answered client_id True; must be a number"),
        ({"client_id": -1, "num_examples": 5}, "answered client_id -1; must be a number"),
        ({"client_id": "1", "num_examples": 5}, "answered client_id '1'; must be a number"),
        ({"client_id": "w\x1b3", "num_examples": 5}, r"answered client_id 'w\x1b3'; must be"),
        ({"client_id": 1, "num_examples": True}, "answered num_examples True; must be between 1"),
        ({"client_id": 1, "num_examples": 1.5}, "answered num_examples 1.5; must be between 1"),
        ({"client_id": 1, "num_examples": 0}, "answered num_examples 0; must be between 1"),
        ({"client_id": 1, "num_examples": 2**62}, "limits.examples (10000000); look at its data"),
        ({f"key {i}": 1 for i in range(999)}, "answered client_id None; must be a number"),
    ],
)
def test_an_introduction_that_lies_costs_its_connection_alone(
    tmp_path: Path, properties: dict[str, Any], text: str
) -> None:
    facts = GetPropertiesRes(Status(Code.OK, ""), properties)

    def change(answer: ClientMessage, asked: ServerMessage) -> None:
        if asked.WhichOneof("msg") == "get_properties_ins":
            answer.get_properties_res.CopyFrom(get_properties_res_to_proto(facts))

    with ServerThread(make_config("fedavg", num_rounds=1)) as server:
        liar = start_liar(server, tmp_path, change)
        assert text in server.said.wait_for("client 1: refused")
        liar.stop()
        hosted_clients(server, [0, 1, 2], tmp_path)
        assert server.result().rounds[-1].clients == [0, 1, 2]


def test_a_hostile_server_touches_no_file_but_those_of_its_run(tmp_path: Path) -> None:
    with HostileServer() as server:
        stage = Stage(server, tmp_path)
        stage.instruct()
        assert stage.ask() == ""
        before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
        (file,) = before
        mode = [oct(p.stat().st_mode & 0o777) for p in (file, *file.parents[:3])]
        assert mode == ["0o600", "0o700", "0o700", "0o700"]
        run = file.parts[-3].removeprefix("run-")
        for field, value in (
            ("run", "a/../../../outside"),
            ("run", f"b/../run-{run}"),
            ("run", ""),
            ("run", f"{run}\n"),
            ("round", "x/../../../planted"),
            ("round", -7),
            ("round", 1.5),
            ("round", 2**62),
            ("state_version", "x/../../../private"),
            ("state_version", -2),
            ("oldest_version", True),
        ):
            assert f"instruction: {field}: got {value!r}; " in stage.ask(**{field: value})
        assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
        stage.client.stream.stop()


def test_states_of_replies_that_never_count_do_not_pile_up(tmp_path: Path) -> None:
    with HostileServer() as server:
        stage = Stage(server, tmp_path)
        stage.instruct()
        for number in range(1, 6):
            assert stage.ask(round=number) == ""
        (file,) = stage.state.rglob("*.safetensors")
        assert file.name == "round-5.safetensors"
        assert "state of round 3 is asked for; has [5]" in stage.ask(round=6, state_version=3)
        stage.client.stream.stop()


def test_a_client_does_no_more_work_than_it_lets_a_server_ask(tmp_path: Path) -> None:
    limits = {"threads": 2, "local_steps": 50, "parameters": 20_000}
    with HostileServer() as server:
        stage = Stage(server, tmp_path, limits=limits)
        stage.instruct()
        assert stage.ask(threads=2, local_steps=50) == ""
        error = stage.ask(threads=3)
        assert "asks for threads = 3; this client allows 2; raise limits.threads" in error
        assert "local_steps = 51; this client allows 50" in stage.ask(local_steps=51)
        assert "local_steps = " in stage.ask(local_steps=0, local_epochs=10**9)
        options = {"run": "f" * 32, "model_options": '{"hidden": [400000, 400000]}'}
        assert "parameters = 160" in stage.ask(**options)
        assert "allows 20000; raise limits.parameters" in stage.ask(**options)
        assert "threads: got 3000; should be less" in stage.ask(threads=3000)
        stage.client.stream.stop()


def test_a_client_trains_on_no_more_examples_than_it_allows(tmp_path: Path) -> None:
    """A server that says there is one client gives it all of a data set that is divided."""
    with HostileServer() as server:
        stage = Stage(server, tmp_path, limits={"examples": 700})
        assert server.ask_facts(FACTS).status.code == Code.OK
        error = server.ask_facts({**FACTS, "num_clients": 1}).status.message
        assert "asks for examples = 1442; this client allows 700; raise limits.examples" in error
        stage.client.stream.stop()


def test_half_of_the_memory_is_the_limit_of_parameters_unless_it_is_set(tmp_path: Path) -> None:
    with HostileServer() as server:
        stage = Stage(server, tmp_path)
        stage.instruct()
        error = stage.ask(model_options='{"hidden": [2000000, 2000000]}')  # 16 TB
        assert "parameters = 4000152000010" in error
        stage.client.stream.stop()


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({}, r"got \[\]; must be \['num_clients', 'seed'\]"),
        ({"num_clients": 3}, r"got \['num_clients'\]; must be"),
        ({**FACTS, "start_timeout": 1e300}, "'start_timeout'.; must be"),
        ({**FACTS, "seed": -1}, "seed: got -1"),
        ({**FACTS, "num_clients": 3.0}, "num_clients: got 3.0"),
        ({**FACTS, "num_clients": 10**7}, "num_clients = 10000000; this client allows 100000"),
    ],
)
def test_a_client_believes_two_facts_of_the_federation_within_their_ranges(
    tmp_path: Path, facts: dict[str, Any], text: str
) -> None:
    with HostileServer() as server:
        stage = Stage(server, tmp_path, data={"name": "synthetic"})
        answer = server.ask_facts(facts)
        assert answer.status.code != Code.OK
        with pytest.raises(AssertionError, match=text):
            raise AssertionError(answer.status.message)
        stage.client.stream.stop()

"""Mutated messages, in the decoder and on live ports: hypothesis chooses what a peer does next."""

from __future__ import annotations

import contextlib
import random
import socket
import tempfile
import threading
from pathlib import Path
from queue import SimpleQueue
from unittest import mock

import numpy as np
import pytest
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.common.serde import fit_ins_from_proto, fit_res_from_proto, fit_res_to_proto
from flwr.proto.transport_pb2 import ClientMessage, ServerMessage
from fuzz import (
    FuzzedPeer,
    arrays_of,
    instruction,
    introduction_request,
    is_instruction,
    mutated,
    require_sound,
)
from hostile import FACTS, HostileServer, Stage, honest_instruction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from processes import wait_until
from streams import RawPeer, ServerThread, hosted_clients, make_config

from fedopt_flwr import RunConfig
from fedopt_flwr.engines.stream import client as stream_client
from fedopt_flwr.engines.stream.parts import parse
from fedopt_flwr.engines.stream.protocol import CLAIM, Claim
from fedopt_flwr.errors import FedoptError, MessageError
from fedopt_flwr.flower import Instruction
from fedopt_flwr.flower.replies import accept
from fedopt_flwr.rounds.record import RoundRecord
from fedopt_flwr.training.flat_model import Layout

pytestmark = pytest.mark.filterwarnings(
    "ignore:algorithm.momentum. the theorem's:fedopt_flwr.errors.FedoptWarning"
)
SEEDS = st.integers(0, 2**32 - 1)
ASKED = {"run": "0" * 32, "round": 3, "phase": "train"}
SAID = {"arrays": "delta,control_variate_change", "loss": 0.5, "num_steps": 2}
EXPECTED = dict.fromkeys(("delta", "control_variate_change"), Layout(650, "float32"))


def honest_reply() -> bytes:
    parameters = ndarrays_to_parameters([np.full(650, 0.5, np.float32)] * 2)
    report = {**ASKED, **SAID, "client_seconds": 0.1}
    result = fit_res_to_proto(FitRes(Status(Code.OK, ""), parameters, 10, report))
    return bytes(ClientMessage(fit_res=result).SerializeToString())


REPLY = honest_reply()


@given(SEEDS)
@settings(max_examples=500, deadline=None)
def test_a_mutated_reply_is_counted_as_what_was_asked_for_or_is_one_error(seed: int) -> None:
    data = mutated(REPLY, ClientMessage, random.Random(seed))
    answer: FitRes | Exception
    try:
        answer = fit_res_from_proto(parse(data, ClientMessage).fit_res)
    except Exception as error:  # `StreamProxy.fit` hands it on as this client's failure
        answer = error
    record = RoundRecord(3)
    uploads = accept([1], {1: answer}, {1: EXPECTED}, record, ASKED, {1: 2})
    assert len(uploads) + len(record.errors) == 1
    assert all(error["error"].isprintable() for error in record.errors)
    assert all(len(error["error"]) <= 500 for error in record.errors)
    for upload in uploads.values():
        assert [(n, a.shape) for n, a in sorted(upload.arrays.items())] == [
            ("control_variate_change", (650,)),
            ("delta", (650,)),
        ]
        assert all(bool(a.isfinite().all()) for a in upload.arrays.values())


INSTRUCTION = honest_instruction(RunConfig(**make_config()))


@given(SEEDS)
@settings(max_examples=500, deadline=None)
def test_a_mutated_instruction_is_read_as_it_stands_or_refused(seed: int) -> None:
    data = mutated(instruction(INSTRUCTION), ServerMessage, random.Random(seed))
    with contextlib.suppress(MessageError):  # from `parse`
        message = parse(data, ServerMessage)
        try:
            told = fit_ins_from_proto(message.fit_ins).config
        except Exception:  # `StreamClient` answers with it
            return
        read = Instruction.from_config(told).to_config()
        own = {key: value for key, value in told.items() if key.startswith("fedopt.")}
        for key, value in own.items():
            if type(read.get(key)) is float and type(value) is int:  # which a float field takes
                own[key] = float(value)
        assert read == own


class LivePort(RuleBasedStateMachine):
    """A server and two honest clients; a third client and strangers do what is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self._closing = contextlib.ExitStack()
        self._folder = Path(self._closing.enter_context(tempfile.TemporaryDirectory()))
        output = {"directory": str(self._folder / "run"), "checkpoint_every": 10}
        federation = {"num_rounds": 150, "start_timeout": 60}
        config = make_config("padamfed", **federation) | {"output": output}
        self._server = ServerThread(config)
        self._server.__enter__()
        hosted_clients(self._server, [0, 2], self._folder / "state")
        self._moves: SimpleQueue[tuple[str, random.Random]] = SimpleQueue()
        where = (self._server.port, self._folder / "state", self._moves.get)
        self._peer = FuzzedPeer(self._server.config, *where)
        threading.Thread(target=self._keep_coming, daemon=True).start()

    def _keep_coming(self) -> None:
        while not self._is_over():
            with contextlib.suppress(FedoptError):  # it may not come back with such an introduction
                self._peer.run()

    def _is_over(self) -> bool:
        return len(self._server.records) > 150

    @rule(move=st.sampled_from(FuzzedPeer.MOVES), seed=SEEDS)
    def answer(self, move: str, seed: int) -> None:
        before = sum(self._peer.counts.values())
        self._moves.put((move, random.Random(seed)))
        wait_until(
            lambda: sum(self._peer.counts.values()) > before or self._is_over(),
            lambda: f"an answer to:\n{self._server.said}",
        )

    @rule(seed=SEEDS)
    def claim(self, seed: int) -> None:
        """A stranger's claim to an id that is never free."""
        rng = random.Random(seed)
        contents = bytearray(CLAIM.dump_json(Claim(7)))
        for _ in range(rng.choice((0, 1, 5))):
            contents[rng.randrange(len(contents))] ^= 1 << rng.randrange(8)
        RawPeer(self._server.port, bytes(contents[: rng.choice((None, 20))])).refused()

    @rule(seed=SEEDS)
    def noise(self, seed: int) -> None:
        rng = random.Random(seed)
        preface = rng.choice((b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
        with socket.create_connection(("127.0.0.1", self._server.port)) as stranger:
            stranger.sendall(preface + rng.randbytes(rng.choice((0, 9, 1000))))

    @invariant()
    def the_run_continues(self) -> None:
        assert self._server.is_well, self._server.said

    def teardown(self) -> None:
        with self._closing:
            for _ in range(200):
                self._moves.put(("honest", random.Random(0)))
            self._server.result()
            self._peer.stop()
            require_sound(self._folder, self._peer)


class HostilePort(RuleBasedStateMachine):
    """A client whose server says what is drawn; an honest instruction is followed all the same."""

    def __init__(self) -> None:
        super().__init__()
        self._closing = contextlib.ExitStack()
        self._folder = Path(self._closing.enter_context(tempfile.TemporaryDirectory()))
        self._server = self._closing.enter_context(HostileServer())
        limits = {"threads": 2, "local_steps": 50, "parameters": 20_000}
        self._stage = Stage(self._server, self._folder, limits=limits)
        self._stage.instruct()
        self._honest = instruction(self._stage.honest)
        self._expected = arrays_of(self._server.say(self._honest))

    @rule(seed=SEEDS)
    def instruct(self, seed: int) -> None:
        data = mutated(self._honest, ServerMessage, random.Random(seed))
        if is_instruction(data):
            self._server.say(data)

    @rule(seed=SEEDS)
    def ask_who_it_is(self, seed: int) -> None:
        data = mutated(introduction_request(), ServerMessage, random.Random(seed))
        with contextlib.suppress(Exception):
            if ServerMessage.FromString(data).WhichOneof("msg") == "reconnect_ins":
                return  # a goodbye
        self._server.say(data)
        self._server.hang_up()
        if self._stage.client.has_ended(within=0.3):  # it cannot be what it is to be
            assert isinstance(self._stage.client.error, FedoptError)
            self._stage.start()
        assert self._server.ask_facts(dict(FACTS)).status.code == Code.OK

    @rule()
    def hang_up(self) -> None:
        self._server.hang_up()

    @invariant()
    def an_honest_instruction_is_followed(self) -> None:
        assert self._expected
        assert arrays_of(self._server.say(self._honest)) == self._expected

    @invariant()
    def files_are_states_in_their_folder(self) -> None:
        for path in self._folder.rglob("*"):
            if path.is_file():
                assert path.relative_to(self._folder).match("state/run-*/*/round-*.safetensors")

    def teardown(self) -> None:
        with self._closing:
            self._stage.client.stop()


@pytest.mark.slow
@pytest.mark.parametrize(("machine", "examples"), [(LivePort, 6), (HostilePort, 6)])
def test_whatever_a_peer_does_costs_itself_alone(
    machine: type[RuleBasedStateMachine], examples: int
) -> None:
    """The same in full, on processes of their own: python tests/fuzz.py."""
    with mock.patch.object(stream_client, "_FIRST_PAUSE_SECONDS", 0.01):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )

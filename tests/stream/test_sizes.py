"""Messages that are too large, too many parts, of another round or of no known status."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from flwr.common import Code, FitIns, GetPropertiesRes, Status, ndarrays_to_parameters
from flwr.common.serde import fit_ins_to_proto, get_properties_res_to_proto
from flwr.proto.transport_pb2 import ClientMessage, ServerMessage
from streams import ClientThread, Lines, ServerThread, hosted_clients, make_config

from fedopt_flwr import ConfigError, MessageError, RunConfig, RunError
from fedopt_flwr.data import load_test_data
from fedopt_flwr.engines.stream import ServerAddress, StreamClient
from fedopt_flwr.engines.stream.parts import MOST_PARTS, parse
from fedopt_flwr.engines.stream.protocol import (
    CLAIM,
    CLAIM_KEY,
    MODEL_KEY,
    SERVICE,
    Claim,
)
from fedopt_flwr.flower.messages import ROUND, encode
from fedopt_flwr.rounds.record import RoundRecord
from fedopt_flwr.run.experiment import Experiment
from fedopt_flwr.run.hosts import ClientHost, HostedClient, states_in

Answer = Callable[[ServerMessage], list[bytes]]


class RawPeer:
    """Claims to be client 1 and answers each message with the bytes that `answer` makes of it."""

    def __init__(self, server: ServerThread, answer: Answer) -> None:
        self.error: grpc.RpcError | None = None
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        options = [("grpc.max_send_message_length", -1)]
        self._channel = grpc.insecure_channel(f"127.0.0.1:{server.port}", options)
        metadata = ((CLAIM_KEY, CLAIM.dump_json(Claim(1))),)
        join = self._channel.stream_stream(f"/{SERVICE}/Join")
        self._call = join(iter(self._queue.get, None), metadata=metadata)
        self._answer = answer
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for data in self._call:
                for answer in self._answer(ServerMessage.FromString(data)):
                    self._queue.put(answer)
        except grpc.RpcError as error:
            self.error = error

    def ended(self) -> grpc.RpcError:
        self._thread.join(30)
        self.close()
        assert self.error is not None
        return self.error

    def close(self) -> None:
        self._queue.put(None)
        self._channel.close()


def honest(server: ServerThread, state: Path) -> Callable[[ServerMessage], ClientMessage]:
    client = HostedClient(1, ClientHost(server.config, [1]), states_in(state))
    return StreamClient(1, client, ServerAddress("", None, 5), Lines())._answer


def changed(
    server: ServerThread, state: Path, change: Callable[[ClientMessage], list[bytes]], number: int
) -> RawPeer:
    """A client whose reply to one round is changed."""
    answer_of = honest(server, state)

    def answer(message: ServerMessage) -> list[bytes]:
        reply = answer_of(message)
        if message.fit_ins.config[ROUND].sint64 == number:
            return change(reply)
        return [reply.SerializeToString()]

    return RawPeer(server, answer)


def run_with_changed_reply(
    state: Path,
    change: Callable[[ClientMessage], list[bytes]],
    ends_in: int | None = None,
    **federation: Any,
) -> tuple[ServerThread, grpc.RpcError | None]:
    """Three clients; the reply of number 1 to round 2 is changed. Return the server, and the error
    that ended the stream of number 1 where it has to end in a certain round."""

    def on_round(record: RoundRecord) -> None:
        if record.round == ends_in:
            peer.ended()
            again = changed(server, state, change, 0)  # or the server waits for it at its end
            closing.callback(again.close)

    with contextlib.ExitStack() as closing:
        config = make_config("scaffold_m", **federation)
        server = closing.enter_context(ServerThread(config, on_round=on_round))
        peer = changed(server, state, change, 2)
        closing.callback(peer.close)
        hosted_clients(server, [0, 2], state)
        server.result()
    assert all({0, 2} <= set(record.clients) for record in server.records)
    return server, peer.error


def test_a_reply_to_another_round_fails_and_ends_the_stream(tmp_path: Path) -> None:
    """An honest reply that arrives twice: the copy would answer round 3, and so on."""

    def change(reply: ClientMessage) -> list[bytes]:
        return [reply.SerializeToString()] * 2

    server, ended = run_with_changed_reply(tmp_path, change, ends_in=3)
    ((number, client, error),) = server.errors
    assert (number, client) == (3, 1)
    assert "its report is for round 2, asked was 3" in error
    assert 1 in server.records[2].clients
    assert ended is not None
    assert ended.code() == grpc.StatusCode.ABORTED
    assert "its report is for round 2" in ended.details()
    assert "client 1: left: its report is for round 2" in str(server.said)


def _status_99(reply: ClientMessage) -> list[bytes]:
    reply.fit_res.status.code = 99
    return [reply.SerializeToString()]


def _another_kind(reply: ClientMessage) -> list[bytes]:
    reply.evaluate_res.loss = 1.0
    return [reply.SerializeToString()]


def _many_metrics(reply: ClientMessage) -> list[bytes]:
    for index in range(MOST_PARTS):
        reply.fit_res.metrics[f"{index:x}"].bool = True
    return [reply.SerializeToString()]


def _empty_metric(reply: ClientMessage) -> list[bytes]:
    reply.fit_res.metrics["empty"].ClearField("bool")
    return [reply.SerializeToString()]


def _terminal_codes(reply: ClientMessage) -> list[bytes]:
    reply.fit_res.metrics["error"].string = "\x1b[2J\nclient 0: joined" + "E" * 10_000
    return [reply.SerializeToString()]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_status_99, "its status is 99, which is none"),
        (_another_kind, "it is evaluate_res; asked was fit_res"),
        (_many_metrics, f"more than {MOST_PARTS} parts"),
        (_empty_metric, "cannot be read"),
        (_terminal_codes, r"\x1b[2J\nclient 0: joinedEEE"),
        (lambda reply: [b"\xff\xfe\xfd"], "cannot be read: DecodeError"),
    ],
)
def test_what_cannot_be_read_is_that_clients_failure_in_that_round(
    tmp_path: Path, change: Callable[[ClientMessage], list[bytes]], text: str
) -> None:
    server, _ = run_with_changed_reply(tmp_path, change)
    ((number, client, error),) = server.errors
    assert (number, client) == (2, 1)
    assert text in error
    assert len(error) <= 600
    assert error.isprintable()
    assert server.records[3].clients == [0, 1, 2]


def test_a_reply_over_the_limit_is_refused_unread_and_called_too_large(tmp_path: Path) -> None:
    """The limit follows from this run's model, not from transport.max_message_mb."""

    def change(reply: ClientMessage) -> list[bytes]:
        reply.fit_res.metrics["error"].string = "E" * 200_000
        return [reply.SerializeToString()]

    server, ended = run_with_changed_reply(tmp_path, change, ends_in=2)
    ((number, client, error),) = server.errors
    assert (number, client) == (2, 1)
    assert "its reply was too large: the server takes 7" in error
    assert "connection lost" not in error
    assert ended is not None
    assert ended.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "Received message larger than max (2" in ended.details()


@pytest.mark.filterwarnings("ignore:client 1. failed in 2 of the 2 rounds")
def test_a_client_whose_reply_is_too_large_says_so_on_both_sides(tmp_path: Path) -> None:
    class Verbose(HostedClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            arrays, count, report = super().fit(parameters, config)
            return arrays, count, {**report, "diary": "x" * 100_000}

    with ServerThread(make_config("fedavg", num_rounds=2)) as server:
        hosted_clients(server, [0, 2], tmp_path)
        verbose = lambda client: Verbose(1, client._host, client._states_of)  # noqa: E731
        client = ClientThread(server, 1, tmp_path, wrap=verbose)
        server.result()
        client.join()
    assert [(r, c) for r, c, _ in server.errors] == [(1, 1), (2, 1)]
    for text in (server.errors[0][2], str(client.said)):
        assert "its reply is too large: 10" in text
        assert "bytes; the server takes 7" in text
    assert "client 1: left" not in str(server.said).split("round 2")[0]


def test_a_large_introduction_is_refused_unread(tmp_path: Path) -> None:
    facts = GetPropertiesRes(
        Status(Code.OK, ""), {"client_id": 1, "num_examples": 5, "more": "x" * (64 << 10)}
    )
    introduction = ClientMessage(get_properties_res=get_properties_res_to_proto(facts))
    with ServerThread(make_config()) as server:
        peer = RawPeer(server, lambda message: [introduction.SerializeToString()])
        said = server.said.wait_for("client 1: refused")
        assert "it has 65,597 bytes" in said
        assert "must have at most 65,536" in said
        peer.close()
        hosted_clients(server, [0, 1, 2], tmp_path)
        assert server.result().rounds[-1].clients == [0, 1, 2]


@pytest.mark.parametrize("kind", [ClientMessage, ServerMessage])
def test_many_tiny_arrays_are_counted_before_they_are_parsed(kind: Any) -> None:
    message = kind()
    part = message.fit_res if kind is ClientMessage else message.fit_ins
    part.parameters.tensors.extend([b"ab"] * (MOST_PARTS - 2))
    assert parse(message.SerializeToString(), kind) == message
    part.parameters.tensors.append(b"ab")
    with pytest.raises(MessageError, match=f"it has more than {MOST_PARTS} parts"):
        parse(message.SerializeToString(), kind)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x0b\x0c", "it has a group"),
        (b"\x80" * 11, "a number of more than 64 bits"),
        (b"\xff" * 9 + b"\x01", "a field of number"),
        (b"\x0a\xff\xff\xff\xff\x07", "DecodeError"),
        (b"\x0a", "DecodeError"),
    ],
)
def test_bytes_that_are_no_message_are_refused(data: bytes, text: str) -> None:
    with pytest.raises(MessageError, match=text):
        parse(data, ClientMessage)


@contextlib.contextmanager
def hostile_server(*messages: bytes) -> Iterator[str]:
    """Sends these to whoever joins, each after the answer to the one before."""

    def join(answers: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in messages:
            yield message
            next(answers)

    handler = grpc.stream_stream_rpc_method_handler(join)
    server = grpc.server(
        futures.ThreadPoolExecutor(2),
        handlers=(grpc.method_handlers_generic_handler(SERVICE, {"Join": handler}),),
        options=[("grpc.max_send_message_length", -1)],
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def instruction(name: str = "fedavg", more_bytes: int = 0) -> bytes:
    config = RunConfig(**make_config(name))
    experiment = Experiment(config, data=load_test_data(config))
    names, parameters = encode({"model": experiment.model.vector})
    own = experiment.template().to_config()
    own |= {"fedopt.algorithm": name, "fedopt.arrays": names, "fedopt.round": 1}
    parameters.tensors += ndarrays_to_parameters([np.zeros(more_bytes, np.uint8)]).tensors
    ins = fit_ins_to_proto(FitIns(parameters, own))
    return bytes(ServerMessage(fit_ins=ins).SerializeToString())


def many_arrays() -> bytes:
    message = ServerMessage()
    message.fit_ins.parameters.tensors.extend([b""] * (MOST_PARTS + 1))
    return bytes(message.SerializeToString())


def empty_fact() -> bytes:
    message = ServerMessage()
    message.get_properties_ins.config["seed"].ClearField("bool")
    return bytes(message.SerializeToString())


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([instruction(), instruction(more_bytes=80_000)], "with this run's model has at most 7"),
        ([instruction(more_bytes=1 << 20)], "client said that it takes 1,048,576"),
        ([many_arrays()], f"it has more than {MOST_PARTS} parts"),
        ([empty_fact()], "what cannot be read: "),
        ([b"\xff\xfe\xfd"], "what cannot be read: DecodeError"),
    ],
)
def test_a_client_takes_no_more_of_a_server_than_its_model_needs_and_tries_again(
    tmp_path: Path, messages: list[bytes], text: str
) -> None:
    config, said = RunConfig(**make_config()), Lines()
    client = HostedClient(0, ClientHost(config, [0]), states_in(tmp_path))
    with hostile_server(*messages) as address:
        where = ServerAddress(address, None, 5, max_message_mb=1)
        stream = StreamClient(0, client, where, said)
        thread = threading.Thread(target=stream.run, daemon=True)
        client.get_properties({"num_clients": 3, "seed": 0})
        thread.start()
        assert "next attempt in" in said.wait_for(text)
        stream.stop()
        thread.join(10)
        assert not thread.is_alive()


WIDE = {"model": {"name": "mlp", "options": {"hidden": [9000]}}}  # 5.4 MB down with padamfed
WIDE_BYTES = 2 * 4 * (64 * 9000 + 9000 + 9000 * 10 + 10)


def test_a_client_takes_large_messages_once_it_has_built_their_model(tmp_path: Path) -> None:
    config = make_config(num_rounds=2) | WIDE
    with ServerThread(config) as server:
        clients = hosted_clients(server, [0, 1, 2], tmp_path)
        result = server.result()
    for client in clients:
        client.join()
        assert WIDE_BYTES < client.stream._claim.takes < WIDE_BYTES + (80 << 10)
        assert str(client.said).count("connected to") == 1
        assert "next attempt" not in str(client.said)
    assert [(record.round, record.clients) for record in result.rounds][-1] == (2, [0, 1, 2])
    assert "refused" not in str(server.said)
    assert "left" not in str(server.said).split("round 1")[0]


def test_a_client_that_may_not_take_so_much_is_told_what_to_set(tmp_path: Path) -> None:
    with ServerThread(make_config(start_timeout=2) | WIDE) as server:
        own = RunConfig(**make_config())
        said = Lines()
        address = ServerAddress(f"localhost:{server.port}", None, 5, max_message_mb=5)
        client = HostedClient(1, ClientHost(own, [1]), states_in(tmp_path))
        with pytest.raises(
            ConfigError, match=r"takes 5,242,880; set transport\.max_message_mb to 6"
        ):
            StreamClient(1, client, address, said).run()
        assert "client 1: messages of this run have up to" in server.said.wait_for("refused")
        with pytest.raises(RunError, match="missing 0, 1, 2"):
            server.result()


@contextlib.contextmanager
def refusing_server(model: bytes) -> Iterator[ServerAddress]:
    """Says that its messages are larger than any client takes, and which model they have."""

    def join(answers: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        context.set_trailing_metadata(((MODEL_KEY, model),))
        context.abort(grpc.StatusCode.OUT_OF_RANGE, "too small")
        yield b""

    handler = grpc.stream_stream_rpc_method_handler(join)
    server = grpc.server(
        futures.ThreadPoolExecutor(2),
        handlers=(grpc.method_handlers_generic_handler(SERVICE, {"Join": handler}),),
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield ServerAddress(f"127.0.0.1:{port}", None, 5)
    server.stop(None).wait()


def announced(**changes: Any) -> bytes:
    config = RunConfig(**make_config())
    own = Experiment(config, data=load_test_data(config)).template().to_config()
    own |= {"fedopt.algorithm": "fedavg"} | {f"fedopt.{k}": v for k, v in changes.items()}
    return json.dumps(own).encode()


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (announced(), "refuses it: too small"),  # whatever the server says of sizes
        (announced(model_options='{"hidden": [40000, 40000]}', model="mlp"), "limits: the server"),
        (announced(model="evil:make"), "this client is configured with 'logistic'"),
        (announced(algorithm="evil:make"), "instruction.algorithm: unknown 'evil:make'"),
        (announced(threads="2"), "instruction: threads: got '2'"),
        (b"{}", "instruction: lacks"),
        (b"[" * 50_000, "this run cannot be joined: RecursionError"),
        (b"\xff", "this run cannot be joined: UnicodeDecodeError"),
        (b"7", "this run cannot be joined"),
    ],
)
def test_a_client_believes_its_own_model_alone_about_sizes(
    tmp_path: Path, model: bytes, text: str
) -> None:
    config = RunConfig(**make_config() | {"limits": {"parameters": 100_000}})
    client = HostedClient(0, ClientHost(config, [0]), states_in(tmp_path))
    with refusing_server(model) as address, pytest.raises(ConfigError) as caught:
        StreamClient(0, client, address, Lines()).run()
    assert text in str(caught.value)

"""gRPC health checks: of the server's own port, of the plain one, of clients."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from streams import PATIENCE, ClientThread, ServerThread, hosted_clients, make_config

from fedopt_flwr import ConfigError
from fedopt_flwr.deployment.certificates import create_authority, create_client
from fedopt_flwr.engines.stream import ClientTls, Connections, ServerTls, answering_health

STREAM = "flwr.proto.FlowerService"
WAITS = {"num_rounds": 1, "start_timeout": 30}


@contextlib.contextmanager
def probe(channel: grpc.Channel) -> Iterator[Callable[[str], str]]:
    """Yields what returns a service's status, or the code of the refusal."""

    def ask(service: str) -> str:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=PATIENCE)
        except grpc.RpcError as error:
            return str(error.code().name)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    with channel:
        yield ask


def plain(port: int) -> grpc.Channel:
    return grpc.insecure_channel(f"127.0.0.1:{port}")


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_the_main_port_answers_checks_beside_streams_and_no_watch(tmp_path: Path) -> None:
    with ServerThread(make_config(**WAITS)) as server:
        with probe(plain(server.port)) as ask:
            assert [ask(""), ask(STREAM)] == ["SERVING", "SERVING"]
        with plain(server.port) as channel, pytest.raises(grpc.RpcError) as refused:
            next(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()))
        assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
        hosted_clients(server, [0, 1, 2], tmp_path)
        assert len(server.result().rounds) == 2


def test_checks_whose_request_never_comes_keep_no_client_out(tmp_path: Path) -> None:
    with ServerThread(make_config(**WAITS)) as server, plain(server.port) as channel:
        check = channel.stream_stream("/grpc.health.v1.Health/Check")
        never = threading.Event()
        answers = set()
        for _ in range(10):  # of ten at once, as there are 35 places, and answering takes a while
            calls = [check(iter(never.wait, True)) for _ in range(10)]
            answers |= {b"".join(call) for call in calls}
        assert answers == {health_pb2.HealthCheckResponse(status=1).SerializeToString()}
        hosted_clients(server, [0, 1, 2], tmp_path)
        assert len(server.result().rounds) == 2
        never.set()


def test_mutual_tls_holds_for_health_checks_too(tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    create_authority(certs, ["localhost"], days=60)
    for name in ("probe", "0-2"):
        create_client(certs, name, days=60)
    ca, key, own = ((certs / n).read_bytes() for n in ("ca.pem", "probe.key", "probe.pem"))
    tls = ServerTls(certs / "server.pem", certs / "server.key", certs / "ca.pem")
    with ServerThread(make_config(**WAITS), tls=tls) as server:
        where = f"localhost:{server.port}"
        known = grpc.ssl_channel_credentials(ca, key, own)
        with probe(grpc.secure_channel(where, known)) as ask:
            assert ask(STREAM) == "SERVING"
        for stranger in (grpc.ssl_channel_credentials(ca), None):
            channel = grpc.secure_channel(where, stranger) if stranger else plain(server.port)
            with probe(channel) as ask:
                assert ask(STREAM) == "UNAVAILABLE"
        clients = ClientTls(certs / "ca.pem", certs / "0-2.pem", certs / "0-2.key")
        for i in range(3):
            ClientThread(server, i, tmp_path, tls=clients)
        assert len(server.result().rounds) == 2


def test_the_plain_port_answers_checks_and_nothing_else() -> None:
    ready = False
    with answering_health("127.0.0.1:0", lambda: ready) as port:
        with probe(plain(port)) as ask:
            assert (ask(""), ask(STREAM), ask("x")) == ("SERVING", "NOT_SERVING", "NOT_FOUND")
            ready = True
            assert ask(STREAM) == "SERVING"
        with plain(port) as channel, pytest.raises(grpc.RpcError) as refused:
            next(channel.stream_stream(f"/{STREAM}/Join")(iter([b""])))
        assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
        taken = answering_health(f"127.0.0.1:{port}", lambda: True)
        with pytest.raises(ConfigError, match=f"--health: cannot listen at '127.0.0.1:{port}'"):
            taken.__enter__()
    with probe(plain(port)) as ask:
        assert ask("") == "UNAVAILABLE"


def test_clients_are_ready_while_all_of_them_are_connected(tmp_path: Path) -> None:
    connections = Connections([0, 1])
    trained: list[float] = []
    connections.on_training = trained.append
    assert not connections.are_open()
    with ServerThread(make_config(num_rounds=2, start_timeout=60)) as server:
        first, *_ = hosted_clients(server, [0, 1], tmp_path, connections)
        with (
            answering_health("127.0.0.1:0", connections.are_open) as port,
            probe(plain(port)) as ask,
        ):
            assert until(lambda: ask(STREAM) == "SERVING")
            assert until(lambda: all(c.num_examples for c in connections.clients().values()))
            first.stop()
            assert (ask(STREAM), ask("")) == ("NOT_SERVING", "SERVING")
        hosted_clients(server, [0, 2], tmp_path)
        server.result()
    assert until(lambda: not connections.clients()[1].is_open)
    assert len(trained) == 3  # round 0 and two rounds of client 1
    assert all(0 < seconds < PATIENCE for seconds in trained)

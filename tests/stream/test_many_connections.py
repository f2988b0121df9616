"""Connections that say nothing, as many as a stranger likes."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import checkpointed
from streams import ClientThread, ServerThread, hosted_clients, make_config

from fedopt_flwr import simulate
from fedopt_flwr.deployment.certificates import create_authority
from fedopt_flwr.engines.stream.system import allow_many_files, is_established
from fedopt_flwr.engines.stream.tls import ClientTls, explain
from fedopt_flwr.run.directory import RunDirectory

resource = pytest.importorskip("resource")


@contextlib.contextmanager
def idle_connections(port: int, count: int, first: bytes = b"") -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        sockets = []
        for _ in range(count):
            connection = socket.create_connection(("127.0.0.1", port))
            stack.enter_context(connection)
            with contextlib.suppress(ConnectionError):
                connection.sendall(first)
            sockets.append(connection)
        yield sockets


def still_open(sockets: list[socket.socket]) -> int:
    """Count connections that the server has not closed."""
    count = 0
    for connection in sockets:
        connection.setblocking(False)
        try:
            while connection.recv(4096):
                pass
        except BlockingIOError:
            count += 1
        except ConnectionError:
            pass
    return count


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"]
)
def test_a_client_gets_in_although_idle_connections_fill_the_port(
    tmp_path: Path, first: bytes
) -> None:
    """Those of clients, which are silent for as long while they wait, stay."""
    with ServerThread(make_config("fedavg", num_rounds=2)) as server:
        clients = hosted_clients(server, [0, 2], tmp_path)
        server.said.wait_for("client 0: joined")
        server.said.wait_for("client 2: joined")
        with idle_connections(server.port, 200, first) as strangers:
            time.sleep(1)
            assert still_open(strangers) <= 3 + 32  # num_clients and a reserve
            started = time.monotonic()
            clients.append(ClientThread(server, 1, tmp_path))
            server.said.wait_for("client 1: joined")
            assert time.monotonic() - started < 30
            assert server.result().rounds[-1].clients == [0, 1, 2]
        for client in clients:
            client.join()
            assert client.error is None
    assert "left" not in str(server.said)


def test_a_server_that_hangs_up_at_once_is_full_and_not_of_another_protocol(
    tmp_path: Path,
) -> None:
    create_authority(tmp_path, ["localhost"], days=60)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    listener.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        assert explain(address, None) is None
        assert explain(address, ClientTls(tmp_path / "ca.pem")) is None


@contextlib.contextmanager
def no_files_left() -> Iterator[list[int]]:
    """All files that this process may open are open; those in the list can be closed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    handles = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (handles[0] + 20, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                handles.append(os.open(os.devnull, os.O_RDONLY))
        yield handles
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for handle in handles:
            os.close(handle)


def test_a_checkpoint_waits_until_a_file_can_be_opened(tmp_path: Path) -> None:
    simulate(checkpointed(tmp_path / "first"))
    checkpoint = RunDirectory(tmp_path / "first").read_checkpoint()
    directory = RunDirectory(tmp_path / "second")
    directory.open({})
    with no_files_left() as handles:

        def close_some() -> None:
            for _ in range(10):
                os.close(handles.pop())

        threading.Timer(1.0, close_some).start()
        directory.write_checkpoint(checkpoint, 3)
    directory.close()
    found = RunDirectory(tmp_path / "second").read_checkpoint()
    assert found.server.round == checkpoint.server.round


def test_a_server_may_open_as_many_files_as_the_system_allows_it() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        allow_many_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="only Linux tells")
def test_the_system_knows_whether_a_connection_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        peer = f"ipv4:127.0.0.1:{client.getsockname()[1]}"
        here, _ = listener.accept()
        assert is_established(peer)
        client.close()
        assert not is_established(peer)
        here.close()
    assert not is_established("unix:")

"""What stands between a client and its server: web proxies, and proxies that speak HTTP/2."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any, Self

import grpc
import numpy as np
import pytest
from streams import ClientThread, ServerThread, make_config

from fedopt_flwr import ConfigError, RunConfig
from fedopt_flwr.engines.stream.address import proxy_for
from fedopt_flwr.engines.stream.protocol import channel_options

VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
ALONE: dict[str, Any] = {"num_clients": 1, "clients_per_round": 1, "num_rounds": 2}


class WebProxy:
    """A web proxy that leads every tunnel to one port of this machine, and notes the targets."""

    def __init__(self, port: int, *, refuses: bool = False) -> None:
        self._port, self._refuses = port, refuses
        self.targets: list[str] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._socket.accept()
                threading.Thread(target=self._tunnel, args=(client,), daemon=True).start()

    def _tunnel(self, client: socket.socket) -> None:
        request = b""
        while b"\r\n\r\n" not in request:
            request += client.recv(1)
        self.targets.append(request.split()[1].decode())
        if self._refuses:
            client.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")
            client.close()
            return
        server = socket.create_connection(("127.0.0.1", self._port))
        client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        for source, target in ((client, server), (server, client)):
            threading.Thread(target=self._copy, args=(source, target), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError), source:  # whichever side closes first
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("variable", VARIABLES)
def test_proxy_variables_do_not_lead_a_client_away_from_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "http://127.0.0.1:9")  # where nothing answers
    with ServerThread(make_config("fedavg", **ALONE)) as server:
        client = ClientThread(server, 0, tmp_path, address=f"127.0.0.1:{server.port}")
        client.said.wait_for("connected to 127.0.0.1")
        server.result()
        client.join()
    assert "next attempt" not in str(client.said)


def test_a_proxy_is_used_and_named_for_another_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with ServerThread(make_config("fedavg", **ALONE)) as server, WebProxy(server.port) as proxy:
        far = "server.invalid:443"  # a name that only the proxy knows
        client = ClientThread(server, 0, tmp_path, address=far, proxy=proxy.url)
        client.said.wait_for(f"connected to {far} through the proxy {proxy.url}")
        server.result()
        client.join()
        assert set(proxy.targets) == {far}
    with ServerThread(make_config("fedavg", **ALONE)) as server, WebProxy(server.port) as proxy:
        near = ClientThread(server, 0, tmp_path, proxy=proxy.url)
        server.result()
        near.join()
        assert proxy.targets == []


def test_a_proxy_that_lets_nothing_through_is_named_in_every_attempt(tmp_path: Path) -> None:
    with ServerThread(make_config("fedavg", **ALONE)) as server:
        with WebProxy(server.port, refuses=True) as proxy:
            far = ClientThread(server, 0, tmp_path, address="server.invalid:1", proxy=proxy.url)
            assert "403" in far.said.wait_for(f"(through the proxy {proxy.url}); next attempt")
            far.stop()
        ClientThread(server, 0, tmp_path)
        server.result()


@pytest.mark.parametrize(
    ("address", "uses"),
    [
        ("fl.example.org:443", True),
        ("10.0.0.7:443", True),
        ("[2001:db8::1]:443", True),
        ("localhost.example.org:443", True),
        ("localhost:443", False),
        ("LOCALHOST.:443", False),
        ("a.localhost:443", False),
        ("127.3.4.5:443", False),
        ("[::1]:443", False),
        ("[::ffff:127.0.0.1]:443", False),
        ("0.0.0.0:443", False),
        ("fl.inside.example:443", False),  # in no_proxy
    ],
)
def test_a_proxy_is_for_other_machines(
    monkeypatch: pytest.MonkeyPatch, address: str, uses: bool
) -> None:
    monkeypatch.setenv("no_proxy", "elsewhere, .inside.example")
    assert (proxy_for(address, "http://p:3128") is not None) is uses
    assert proxy_for(address, None) is None


@pytest.mark.parametrize(
    "proxy",
    [
        "p:3128",
        "https://p:3128",
        "http://p",
        "http://u:s@p:3128",
        "socks5://p:1080",
        "http://p:3128/",
        "",
    ],
)
def test_a_proxy_that_grpc_cannot_use_is_refused(proxy: str) -> None:
    with pytest.raises(ConfigError, match=r"transport.proxy: got .* pattern '\^http://"):
        RunConfig(transport={"proxy": proxy})
    assert RunConfig(transport={"proxy": "http://p:3128"}).transport.proxy == "http://p:3128"


class Hop:
    """Passes streams on as a gRPC proxy does, with gRPC's default policy: a client that sends three
    pings within five minutes, and gets no data meanwhile, is cut off."""

    def __init__(self, port: int) -> None:
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        handler = grpc.stream_stream_rpc_method_handler(self._pass_on)
        service = grpc.method_handlers_generic_handler(
            "flwr.proto.FlowerService", {"Join": handler}
        )
        self._server.add_generic_rpc_handlers((service,))
        self.port = self._server.add_insecure_port("127.0.0.1:0")

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(1).wait()
        self._channel.close()

    def _pass_on(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        own = [(k, v) for k, v in context.invocation_metadata() if k.startswith("fedopt")]
        call = self._channel.stream_stream("/flwr.proto.FlowerService/Join")(messages, metadata=own)
        context.add_callback(call.cancel)
        try:
            yield from call
        except grpc.RpcError as error:
            context.abort(error.code(), error.details())


class Slow:
    """A client whose every training takes a few seconds."""

    def __init__(self, client: Any, seconds: float) -> None:
        self._client, self._seconds = client, seconds

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self._client.get_properties(config)
        return answer

    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        time.sleep(self._seconds)
        return self._client.fit(parameters, config)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no client's reply")
def test_a_client_sends_fewer_pings_once_a_hop_has_cut_it_off_for_them(tmp_path: Path) -> None:
    config = make_config("fedavg", **(ALONE | {"num_rounds": 4}))
    config["transport"] = {"keep_alive_seconds": 2}

    def wait_for_the_client(record: Any) -> None:
        while record.failures and server.roster.clients()[0].state != "ready":
            time.sleep(0.05)

    with (
        ServerThread(config, on_round=wait_for_the_client) as server,
        Hop(server.port) as hop,
    ):
        wrap = lambda client: Slow(client, 5)  # noqa: E731
        client = ClientThread(server, 0, tmp_path, port=hop.port, wrap=wrap)
        rounds = server.result().rounds
        client.join()
    assert [len(record.clients) for record in rounds[-3:]] == [1, 1, 1]
    assert str(client.said).count("transport.keep_alive_seconds = 2 makes") == 1
    assert str(client.said).count("too many pings") <= 1
    assert "from now on one in 330 s (set transport.keep_alive_seconds = 660" in str(client.said)


def test_pings_follow_the_keep_alive_unless_fewer_are_asked_for() -> None:
    own, fewer = dict(channel_options(30, 1)), dict(channel_options(30, 1, 330))
    assert (own["grpc.keepalive_time_ms"], own["grpc.keepalive_timeout_ms"]) == (15_000, 15_000)
    assert (fewer["grpc.keepalive_time_ms"], fewer["grpc.keepalive_timeout_ms"]) == (
        330_000,
        15_000,
    )

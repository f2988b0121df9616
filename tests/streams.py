"""A server on a real socket in a thread of the test, and clients that speak to it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import grpc

from fedopt_flwr import RunConfig
from fedopt_flwr.engines.stream import (
    ClientTls,
    Connections,
    Roster,
    ServerAddress,
    ServerTls,
    StreamClient,
)
from fedopt_flwr.engines.stream.protocol import CLAIM_KEY
from fedopt_flwr.errors import FedoptError
from fedopt_flwr.rounds.record import RoundRecord
from fedopt_flwr.run.checkpoints import Checkpoint
from fedopt_flwr.run.hosts import ClientHost, HostedClient, states_in
from fedopt_flwr.run.result import Result
from fedopt_flwr.run.run import Silent
from fedopt_flwr.run.serve import serve

PATIENCE = 60.0  # seconds; only a broken test waits so long


class Lines:
    """What was said, by several threads, and a way to wait for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lines: list[str] = []

    def __call__(self, text: str) -> None:
        with self._changed:
            self._lines.append(text)
            self._changed.notify_all()

    def __str__(self) -> str:
        return "\n".join(self._lines)

    def wait_for(self, part: str) -> str:
        def find() -> str | None:
            return next((line for line in self._lines if part in line), None)

        with self._changed:
            assert self._changed.wait_for(lambda: find() is not None, PATIENCE), (
                f"{part!r} was never said; but:\n{self}"
            )
            return find() or ""


class ServerThread:
    """`serve` in a thread; `result` waits for its end and raises what it raised."""

    def __init__(
        self,
        config: dict[str, Any],
        *,
        tls: ServerTls | None = None,
        token: str = "",
        say: Callable[[str], None] | None = None,
        on_round: Callable[[RoundRecord], None] = lambda record: None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self.config, self.said, self._tls = RunConfig(**config), Lines(), tls
        self._token = token
        self.records: list[RoundRecord] = []
        self.roster = Roster(say or self.said)
        self.port = 0
        self._on_round, self._listening = on_round, threading.Event()
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._listening.wait(PATIENCE)
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            return  # the thread ends with the tests; the failure is what counts
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), f"the server still runs; it said:\n{self.said}"

    def _run(self) -> None:
        listener = Silent()
        listener.on_round = self._take  # type: ignore[method-assign]
        try:
            self._result = serve(
                self.config,
                "127.0.0.1:0",
                tls=self._tls,
                token=self._token,
                listener=listener,
                roster=self.roster,
                checkpoint=self._checkpoint,
                on_listening=self._hear_port,
            )
        except BaseException as error:
            self._error = error
        finally:
            self._listening.set()

    def _hear_port(self, port: int) -> None:
        self.port = port
        self._listening.set()

    def _take(self, record: RoundRecord) -> None:
        self.records.append(record)
        self._on_round(record)

    def result(self) -> Result:
        self._thread.join(PATIENCE)
        if self._error is not None:
            raise self._error
        assert self._result is not None, f"no result; the server said:\n{self.said}"
        return self._result

    @property
    def is_well(self) -> bool:
        return self._error is None

    @property
    def errors(self) -> list[tuple[int, Any, str]]:
        """(round, client, text) of all that was not counted."""
        return [(r.round, e["client"], e["error"]) for r in self.records for e in r.errors]


class ClientThread:
    """One `StreamClient` in a thread, with what it said and the error that ended it."""

    def __init__(
        self,
        server: ServerThread,
        client_id: int | str,
        state: Path,
        *,
        wrap: Callable[[Any], Any] = lambda client: client,
        host: ClientHost | None = None,
        tls: ClientTls | None = None,
        port: int | None = None,
        address: str | None = None,
        proxy: str | None = None,
        token: str = "",
        connections: Connections | None = None,
    ) -> None:
        host = host or ClientHost(server.config, [client_id])
        address = address or f"localhost:{port or server.port}"
        keep_alive = server.config.transport.keep_alive_seconds
        self.said, self.error = Lines(), None
        self.stream = StreamClient(
            client_id,
            wrap(HostedClient(client_id, host, states_in(state))),
            ServerAddress(address, tls, keep_alive, proxy, token=token),
            self.said,
            connections,
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.stream.run()
        except FedoptError as error:
            self.error = error
            self.said(f"ended: {error}")

    def stop(self) -> None:
        self.stream.stop()
        self.join()

    def has_ended(self, within: float) -> bool:
        self._thread.join(within)
        return not self._thread.is_alive()

    def join(self) -> None:
        assert self.has_ended(PATIENCE), f"the client still runs; it said:\n{self.said}"


class RawPeer:
    """Something that speaks bytes on a stream: who it says it is, and what it answers.

    It goes on until the server ends the stream, or `close`; `refused` is then code and details.
    """

    def __init__(
        self,
        port: int,
        claim: bytes | dict[str, Any],
        *answers: bytes,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        contents = claim if isinstance(claim, bytes) else json.dumps(claim).encode()
        address = f"localhost:{port}"
        self._channel = (
            grpc.secure_channel(address, credentials)
            if credentials
            else grpc.insecure_channel(address)
        )
        self._closed = threading.Event()
        self._answers = answers
        self.heard: list[bytes] = []
        join = self._channel.stream_stream("/flwr.proto.FlowerService/Join")
        self._call = join(self._messages(), metadata=((CLAIM_KEY, contents),))

    def _messages(self) -> Iterator[bytes]:
        yield from self._answers
        self._closed.wait(PATIENCE)

    def refused(self) -> tuple[grpc.StatusCode, str]:
        try:
            self.heard += list(self._call)
        except grpc.RpcError as error:
            return error.code(), error.details() or ""
        finally:
            self.close()
        return grpc.StatusCode.OK, ""

    def close(self) -> None:
        self._closed.set()
        self._call.cancel()
        self._channel.close()


def hosted_clients(
    server: ServerThread,
    ids: Sequence[int],
    state: Path,
    connections: Connections | None = None,
    wrap: Callable[[Any], Any] = lambda client: client,
) -> list[ClientThread]:
    """Clients that share one host, as `--client-ids` makes them."""
    own: dict[str, Any] = {"host": ClientHost(server.config, ids), "connections": connections}
    return [ClientThread(server, i, state, wrap=wrap, **own) for i in ids]


def served(config: dict[str, Any], state: Path) -> Result:
    """Run a federation over streams, all clients in one host, to its end."""
    with ServerThread(config) as server:
        clients = hosted_clients(server, range(config["federation"]["num_clients"]), state)
        result = server.result()
    for client in clients:
        client.join()
    return result


def make_config(rule: str = "padamfed", **federation: Any) -> dict[str, Any]:
    return {
        "algorithm": {"name": rule},
        "federation": {"num_clients": 3, "clients_per_round": 3, "num_rounds": 3, **federation},
        "training": {"local_steps": 2, "device": "cpu"},
        "model": {"name": "logistic"},
        "transport": {"keep_alive_seconds": 5},
    }

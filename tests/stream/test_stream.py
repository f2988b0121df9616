"""The gRPC stream on real sockets: who gets in, what travels, and what faults do."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from flwr.common import Code, GetPropertiesRes, Status
from flwr.common.serde import get_properties_res_to_proto
from flwr.proto.transport_pb2 import ClientMessage
from flwr.proto.transport_pb2_grpc import FlowerServiceStub
from streams import ClientThread, ServerThread, hosted_clients, make_config

from fedopt_flwr import ConfigError, MessageError, RunConfig, RunError, simulate
from fedopt_flwr.config.client_ids import certificate_covers, parse_ids
from fedopt_flwr.data import load_test_data
from fedopt_flwr.engines.stream import Roster
from fedopt_flwr.engines.stream.protocol import CLAIM, CLAIM_KEY, Claim
from fedopt_flwr.flower import DiskStates
from fedopt_flwr.flower.messages import ROUND
from fedopt_flwr.flower.sizes import require_messages_fit
from fedopt_flwr.run.directory import RunDirectory
from fedopt_flwr.run.experiment import Experiment
from fedopt_flwr.run.hosts import ClientHost, HostedClient
from fedopt_flwr.run.run import Silent
from fedopt_flwr.run.serve import serve


class Faulty:
    """A client whose training goes wrong in one round, in the way that `fault` does it."""

    def __init__(self, client: HostedClient, fault: Callable[..., Any], in_round: int) -> None:
        self._client, self._fault, self._in_round = client, fault, in_round

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        return self._client.get_properties(config)

    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        answer = self._client.fit(parameters, config)
        if config[ROUND] != self._in_round:
            return answer
        return self._fault(*answer)


def run_with_fault(tmp_path: Path, fault: Callable[..., Any], **federation: Any) -> ServerThread:
    """Three clients, of which number 1 does something wrong in round 2."""
    with ServerThread(make_config(**federation)) as server:
        clients = [ClientThread(server, i, tmp_path) for i in (0, 2)]
        wrap = lambda client: Faulty(client, fault, in_round=2)  # noqa: E731
        clients.append(ClientThread(server, 1, tmp_path, wrap=wrap))
        server.result()
        for client in clients:
            client.join()
    return server


def mean_control_variate(server: ServerThread, state: Path, folder: Path) -> np.ndarray:
    """The mean of the clients' c_i, read from their state directory as the checkpoint counts it."""

    checkpoint = RunDirectory(folder).read_checkpoint()
    states = DiskStates(state / f"run-{checkpoint.server.run}")
    versions = checkpoint.server.versions
    own = [states.load(i, versions[i])["control_variate"].double() for i in sorted(versions)]
    return (sum(own) / server.config.federation.num_clients).numpy()


@pytest.mark.parametrize("rule", ["fedavg", "scaffold_m", "padamfed"])
def test_streams_give_the_same_bits_as_a_simulation(tmp_path: Path, rule: str) -> None:
    config = make_config(rule, clients_per_round=2, num_rounds=4)
    with ServerThread(config) as server:
        hosted_clients(server, [0, 2], tmp_path)
        ClientThread(server, 1, tmp_path)
        parameters = server.result().parameters
    assert parameters.tobytes() == simulate(config).parameters.tobytes()


def test_buffers_travel_or_stay_as_in_a_simulation(tmp_path: Path) -> None:
    for buffers in ("average", "local"):
        config = make_config("fedavg", buffers=buffers, num_rounds=2)
        config["model"] = {"name": f"{__name__}:norm_model"}
        config["training"]["batch_size"] = 8
        with ServerThread(config) as server:
            hosted_clients(server, [0, 1, 2], tmp_path)
            state = server.result().model.state_dict()
        expected = simulate(config).model.state_dict()
        assert all(torch.equal(state[name], expected[name]) for name in expected)


def norm_model() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 10)
    )


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (lambda a, n, r: ([a[0] * np.nan, *a[1:]], n, r), "'delta' is not finite: 650 NaN"),
        (lambda a, n, r: ([x[:-1] for x in a], n, r), r"'delta' has shape (649,)"),
        (lambda a, n, r: ([x.astype(np.float64) for x in a], n, r), "dtype float64"),
        (lambda a, n, r: ([*a, a[0]], n, r), "sent 3 arrays named"),
        (lambda a, n, r: (a, n, {**r, "arrays": "delta,other"}), "'other'"),
        (lambda a, n, r: (a, n, {"arrays": r["arrays"]}), "report is for run None"),
        (lambda a, n, r: (a, n, {**r, "loss": "none"}), "report: loss: got 'none'; should be"),
        (lambda a, n, r: (a, n, {**r, "loss": float("nan")}), "reported loss nan"),
        (lambda a, n, r: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)
def test_a_wrong_reply_is_that_clients_failure_and_named(
    tmp_path: Path, fault: Callable[..., Any], text: str
) -> None:
    server = run_with_fault(tmp_path, fault)
    assert [(r.round, r.failures) for r in server.records] == [(0, 0), (1, 0), (2, 1), (3, 0)]
    ((round_number, client, error),) = server.errors
    assert (round_number, client) == (2, 1)
    assert text in error


def test_a_client_slower_than_the_timeout_comes_back_and_c_stays_the_mean(tmp_path: Path) -> None:
    def sleep(*answer: Any) -> Any:
        time.sleep(2.5)  # the state of this round is saved by now, but its reply never counts
        return answer

    state, folder = tmp_path / "state", tmp_path / "run"
    config = make_config(round_timeout=1.0, num_rounds=6)
    config["output"] = {"directory": folder, "checkpoint_every": 1}
    away = threading.Event()

    def pause(record: Any) -> None:
        if record.round == 2:
            away.set()
        if record.round == 4:
            client.said.wait_for("next attempt")
            server.said.wait_for("client 1: left")
            while server.roster.clients()[1].state != "ready":
                time.sleep(0.05)

    with ServerThread(config, on_round=pause) as server:
        hosted_clients(server, [0, 2], state)
        wrap = lambda inner: Faulty(inner, sleep, in_round=2)  # noqa: E731
        client = ClientThread(server, 1, state, wrap=wrap)
        result = server.result()
    assert [(r, c) for r, c, _ in server.errors] == [(2, 1)]
    assert "no answer within 1 s (federation.round_timeout)" in server.errors[0][2]
    assert [r.clients for r in result.rounds[-2:]] == [[0, 1, 2], [0, 1, 2]]

    c = RunDirectory(folder).read_checkpoint().server.vectors["control_variate"].numpy()
    np.testing.assert_allclose(mean_control_variate(server, state, folder), c, atol=1e-6)


def test_random_bytes_and_a_web_browser_do_not_disturb_the_run(tmp_path: Path) -> None:
    with ServerThread(make_config()) as server:
        for noise in (os.urandom(4096), b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b""):
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.sendall(noise)
                connection.settimeout(1)
                with contextlib.suppress(TimeoutError, ConnectionError):
                    connection.recv(100)
        hosted_clients(server, [0, 1, 2], tmp_path)
        assert server.result().rounds[-1].failures == 0


def test_a_second_client_of_the_same_id_waits_until_the_first_is_gone(tmp_path: Path) -> None:
    with ServerThread(make_config(num_clients=2, clients_per_round=2)) as server:
        first = ClientThread(server, 0, tmp_path)
        server.said.wait_for("client 0: joined")
        second = ClientThread(server, 0, tmp_path)
        reason = second.said.wait_for("already exists")
        assert "must wait until the first is gone or was silent for 5 s" in reason
        first.stop()
        second.said.wait_for("connected to")
        ClientThread(server, 1, tmp_path)
        assert server.result().rounds[-1].clients == [0, 1]
    assert "127.0.0.1:" not in reason.partition("already exists")[2]  # which is another's address
    assert "(the first is at ipv4:127.0.0.1:" in str(server.said)


def test_ids_that_have_no_place_are_refused_for_good(tmp_path: Path) -> None:
    with ServerThread(make_config()) as server:
        outside = ClientThread(server, 3, tmp_path)
        outside.join()
        assert "client 3: must be between 0 and 2" in str(outside.error)
        for i in range(3):
            ClientThread(server, i, tmp_path)
        server.result()


def test_a_peer_that_is_no_fedopt_client_hears_what_is_missing(tmp_path: Path) -> None:
    with ServerThread(make_config()) as server:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            call = FlowerServiceStub(channel).Join(iter(()))
            with pytest.raises(grpc.RpcError) as caught:
                next(call)
            assert "this server speaks to `fedopt client`" in caught.value.details()
        hosted_clients(server, [0, 1, 2], tmp_path)
        server.result()


def test_an_introduction_that_cannot_be_read_gives_the_place_back(tmp_path: Path) -> None:
    name = "/flwr.proto.FlowerService/Join"
    sent, metadata = threading.Event(), ((CLAIM_KEY, CLAIM.dump_json(Claim(1))),)

    def messages() -> Iterator[bytes]:
        yield b"\xff\xfe\xfd"
        sent.wait(20)

    with ServerThread(make_config()) as server:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            call = channel.stream_stream(name)(messages(), metadata=metadata)
            said = server.said.wait_for("client 1: refused")
            assert "its introduction cannot be read: DecodeError" in said
            with pytest.raises(grpc.RpcError, match="its introduction cannot be read"):
                list(call)
            sent.set()
        hosted_clients(server, [0, 1, 2], tmp_path)
        assert server.result().rounds[-1].clients == [0, 1, 2]


def test_messages_that_nobody_asked_for_stay_outside_the_servers_memory(tmp_path: Path) -> None:
    """A client that floods the server is asked once; the rest waits in the network's buffers."""
    facts = GetPropertiesRes(Status(Code.OK, ""), {"client_id": 0, "num_examples": 5})
    introduction = ClientMessage(get_properties_res=get_properties_res_to_proto(facts))
    large = ClientMessage()
    large.fit_res.parameters.tensors.append(bytes(1 << 20))
    sent = 0

    def messages() -> Iterator[ClientMessage]:
        nonlocal sent
        for message in [introduction, *[large] * 200]:
            sent += 1
            yield message

    metadata = ((CLAIM_KEY, CLAIM.dump_json(Claim(0))),)
    with ServerThread(make_config()) as server:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            call = FlowerServiceStub(channel).Join(messages(), metadata=metadata)
            server.said.wait_for("client 0: joined")
            time.sleep(1)
            assert 1 < sent < 100
            call.cancel()
        server.said.wait_for("client 0: left")
        hosted_clients(server, [0, 1, 2], tmp_path)
        server.result()


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"num_clients": 4, "seed": 0, "num_rounds": 3}, "num_rounds: unknown 'num_rounds'"),
        ({"num_clients": 0}, "num_clients: got 0"),
    ],
)
def test_a_client_takes_no_other_facts_of_the_federation_than_it_needs(
    facts: dict[str, int], text: str
) -> None:
    host = ClientHost(RunConfig(), [2])
    of_three, of_twenty = (host.data(2, own).train for own in ({"num_clients": 3}, {}))
    assert of_three.num_examples > of_twenty.num_examples
    with pytest.raises(MessageError, match=text):
        host.data(2, facts)


def test_broken_data_of_a_client_is_said_on_both_sides(tmp_path: Path) -> None:
    with ServerThread(make_config(start_timeout=4.0)) as server:
        config = RunConfig(data={"name": "npz", "path": tmp_path})
        client = ClientThread(server, 0, tmp_path, host=ClientHost(config, [0]))
        client.join()
        assert "holds neither train.npz nor test.npz" in str(client.error)
        assert "holds neither" in server.said.wait_for("client 0: refused")
        ClientThread(server, 1, tmp_path)
        with pytest.raises(RunError, match=r"only 1 of 3 clients .* missing 0, 2"):
            server.result()


@pytest.mark.filterwarnings("ignore:no client's reply")
def test_a_client_imports_only_the_code_that_it_names_itself(tmp_path: Path) -> None:
    config = make_config("fedavg", num_clients=1, clients_per_round=1, num_rounds=1)
    config["model"] = {"name": f"{__name__}:norm_model"}
    with ServerThread(config) as server:
        host = ClientHost(RunConfig(), [0])
        ClientThread(server, 0, tmp_path, host=host)
        server.result()
    ((_, client, error),) = server.errors
    assert client == 0
    assert "model.name: the server asks for" in error
    assert "no other code is imported" in error


def test_message_sizes_are_known_before_the_first_one_travels() -> None:
    config = RunConfig(**make_config(), output={})
    experiment = Experiment(config, data=load_test_data(config))
    down, up = require_messages_fit(experiment.rule, experiment.model, config)
    records = simulate(config).rounds
    assert records[-1].downlink_bytes / 3 <= down < 2 * 650 * 4 + 16384
    assert records[-1].uplink_bytes / 3 <= up < 2 * 650 * 4 + 16384
    wide = make_config() | {
        "model": {"name": "mlp", "options": {"hidden": [3000]}},
        "transport": {"max_message_mb": 1},
    }
    config = RunConfig(**wide)
    experiment = Experiment(config, data=load_test_data(config))
    with pytest.raises(ConfigError, match=r"max_message_mb: got 1; padamfed .*; set it to 2 or"):
        require_messages_fit(experiment.rule, experiment.model, config)


def test_an_address_in_use_is_a_clear_error() -> None:

    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"--address: cannot listen at '{address}'"):
            serve(RunConfig(), address, tls=None, listener=Silent(), roster=Roster())


@pytest.mark.parametrize(
    ("text", "ids"),
    [("7", [7]), ("0-3", [0, 1, 2, 3]), ("1,4-5", [1, 4, 5]), ("ward-3", ["ward-3"])],
)
def test_ids_are_read_as_people_write_them(text: str, ids: list[int | str]) -> None:
    assert parse_ids(text) == ids
    assert all(certificate_covers(text, i) for i in ids)
    assert not certificate_covers(text, 99)


@pytest.mark.parametrize("text", ["", "5-3", "1,1", "x" * 65, "a\nb"])
def test_ids_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="got"):
        parse_ids(text)
    assert not certificate_covers(text, 1)


def test_states_on_disk_survive_by_version(tmp_path: Path) -> None:
    states = DiskStates(tmp_path)
    for version in (0, 3, 5):
        states.save("ward/3", version, {"control_variate": torch.full((4,), float(version))})
    again = DiskStates(tmp_path)
    assert again.load("ward/3", 3)["control_variate"].tolist() == [3.0] * 4
    again.prune("ward/3", {0, 5})
    with pytest.raises(MessageError, match=r"ward/3: state of round 3 is asked for; has \[0, 5\]"):
        again.load("ward/3", 3)
    (path,) = tmp_path.rglob("round-5.safetensors")
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(MessageError, match="is broken"):
        again.load("ward/3", 5)


def test_a_full_disk_leaves_the_earlier_state_and_no_rest(tmp_path: Path) -> None:
    states = DiskStates(tmp_path)
    states.save(1, 0, {"control_variate": torch.ones(4)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            states.save(1, 1, {"control_variate": torch.ones(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert states.load(1, 0)["control_variate"].tolist() == [1.0] * 4
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["round-0.safetensors"]

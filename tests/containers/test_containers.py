"""The images at work: the bits of a simulation, lost containers, health, metrics, hardening."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from engine import ROOT, Engine
from federation import ContainerFederation
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fedopt_flwr import RunConfig, simulate

pytestmark = pytest.mark.containers
DASHBOARD = json.loads((ROOT / "deploy" / "monitoring" / "dashboard.json").read_text())
STREAM = "flwr.proto.FlowerService"
Make = Callable[..., ContainerFederation]


@pytest.fixture
def make(engine: Engine, tmp_path: Path) -> Iterator[Make]:
    made = []

    def federation(name: str, **settings: Any) -> ContainerFederation:
        made.append(ContainerFederation(engine, tmp_path / name, name, **settings))
        return made[-1]

    yield federation
    for one in made:
        one.close()


def start_all(federation: ContainerFederation) -> None:
    federation.start_server("federation.toml")
    for i in range(3):
        federation.start_client(i)


def test_a_killed_server_that_resumes_ends_with_the_bits_of_a_simulation(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = make("server-killed", num_rounds=40)
    start_all(federation)
    federation.wait_for_round(10)
    federation.remove("server")
    assert len(federation.records()) < 40
    federation.start_server("--resume", "/runs/run")
    federation.wait_for_end()
    assert [r["failures"] for r in federation.records()] == [0] * 41
    monkeypatch.setenv("FEDOPT_DATA", str(federation.folder / "data"))
    settings = [f"output.directory={tmp_path / 'simulated'}"]
    simulate(RunConfig.from_file(federation.config, settings))
    ours, theirs = (d / "model.safetensors" for d in (federation.run, tmp_path / "simulated"))
    assert ours.read_bytes() == theirs.read_bytes()
    federation.require_c_is_the_mean()


def test_a_killed_client_comes_back_with_its_state_and_the_run_completes(make: Make) -> None:
    # 20 s on two idle cores: long enough for a client to come back on busy ones
    federation = make("client-killed", num_rounds=600, min_replies=1)
    start_all(federation)
    federation.wait_for_round(10)
    federation.remove("client-1")
    federation.wait_for_round(len(federation.records()) + 3)
    federation.start_client(1)
    federation.wait_for_end()
    records = federation.records()
    assert [r["round"] for r in records] == list(range(601))
    errors = [error for record in records for error in record["errors"]]
    assert errors
    assert {error["client"] for error in errors} == {1}
    assert not any("state" in error["error"] for error in errors)
    assert records[-1]["clients"] == [0, 1, 2]
    federation.require_c_is_the_mean()


def check(channel: grpc.Channel, service: str = STREAM) -> str:
    with channel:
        request = health_pb2.HealthCheckRequest(service=service)
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=20)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def test_health_metrics_and_hardening_of_a_federation_at_work(
    make: Make, engine: Engine, tmp_path: Path
) -> None:
    federation = make("watched", num_rounds=100_000)
    start_all(federation)
    federation.wait_for_round(3)
    names = ["server", "client-0", "client-1", "client-2"]
    addresses = {name: federation.address(name) for name in names}
    for address in addresses.values():
        assert check(grpc.insecure_channel(f"{address}:8081")) == "SERVING"
    certs = federation.folder / "certs"
    files = [(certs / n).read_bytes() for n in ("ca.pem", "probe.key", "probe.pem")]
    named = [("grpc.ssl_target_name_override", "server")]
    where, known = f"{addresses['server']}:8080", grpc.ssl_channel_credentials(*files)
    assert check(grpc.secure_channel(where, known, named)) == "SERVING"
    stranger = grpc.ssl_channel_credentials(files[0])
    with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
        check(grpc.secure_channel(where, stranger, named))
    with prometheus(tmp_path / "prometheus", list(addresses.values())) as ask:
        assert until(lambda: ask("fedopt_clients{state='connected'}") == [3.0])
        assert until(lambda: ask("sum(fedopt_client_connected)") == [3.0])
        assert until(lambda: ask("max(fedopt_round) > 3") != [])
        days = "min((fedopt_certificate_end_timestamp_seconds{certificate='own'} - time()) / 86400)"
        (left,) = ask(days)
        assert 88 < left < 90
        queries = [t["expr"] for panel in DASHBOARD["panels"] for t in panel["targets"]]
        assert until(lambda: all(ask(query) for query in queries)), [
            q for q in queries if not ask(q)
        ]
    for address in addresses.values():
        with urllib.request.urlopen(f"http://{address}:9100/metrics", timeout=20) as answer:
            told = answer.read()
        checked = subprocess.run(["promtool", "check", "metrics"], input=told, capture_output=True)
        assert (checked.returncode, checked.stderr) == (0, b""), checked.stderr.decode()
    for name in names:
        container = f"watched-{name}"
        status = engine("exec", container, "cat", "/proc/1/status")
        facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert facts["Uid"].split() == ["10001"] * 4
        assert (facts["CapEff"], facts["NoNewPrivs"]) == ("0" * 16, "1")
        with pytest.raises(AssertionError, match="Read-only file system"):
            engine("exec", container, "touch", "/opt/fedopt/x")
        with pytest.raises(AssertionError, match="Read-only file system"):
            engine("exec", container, "touch", "/etc/x")
        log = federation.logs(name)
        assert "Traceback" not in log
        assert "atplotlib" not in log  # which complains where it may write nothing
    for name in reversed(names):
        started = time.monotonic()
        engine("stop", "--time=30", f"watched-{name}")
        assert time.monotonic() - started < 10
        code = engine("inspect", "--format={{.State.ExitCode}}", f"watched-{name}")
        assert code == ("143" if name == "server" else "0"), federation.logs(name)


@pytest.mark.parametrize("image", ["client", "server"])
def test_a_container_that_is_stopped_while_it_starts_ends_at_once(
    engine: Engine, image: str
) -> None:
    name = f"starting-{image}"
    engine("run", "--detach", f"--name={name}", *ID[image], f"fedopt-{image}", "--insecure")
    started = time.monotonic()
    engine("stop", "--time=30", name)
    assert time.monotonic() - started < 10
    engine("rm", name)


ID = {"client": ["--env=FEDOPT_CLIENT_ID=0"], "server": []}


def test_what_an_image_holds(engine: Engine) -> None:
    python = ["run", "--rm", "--entrypoint=python"]
    names = ("ray", "flwr_datasets", "sklearn", "matplotlib", "pip", "pytest", "mypy")
    program = (
        f"import importlib.util as u; print(*[n for n in {names} if u.find_spec(n) is not None])"
    )
    assert engine(*python, "fedopt-client", "-c", program) == ""
    assert engine(*python, "fedopt-server", "-c", program).split() == [
        "flwr_datasets",
        "sklearn",
        "matplotlib",
    ]
    for image in ("fedopt-client", "fedopt-server"):
        (found,) = json.loads(engine("image", "inspect", image))
        assert found["Config"]["User"] == "10001:10001"
        labels = found["Config"]["Labels"]
        assert labels["org.opencontainers.image.version"] == "0.1.0"
        history = engine("history", "--no-trunc", "--format={{.CreatedBy}}", image)
        assert "pip install" not in history  # built elsewhere: no cache can be in a layer
        find = ["run", "--rm", "--user=0", "--entrypoint=find", image, "/", "-xdev"]
        assert engine(*find, "-name", "*.key", "-o", "-path", "/root/.cache/*") == ""
    refused = ["run", "--rm", "fedopt-client", "--client-id=0", "--ca=/certs/none.pem"]
    with pytest.raises(AssertionError, match=r"--ca: '/certs/none\.pem' holds no certificate"):
        engine(*refused)


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.5)
    return condition()


class prometheus:
    """A real Prometheus that scrapes addresses; yields what evaluates an expression."""

    def __init__(self, folder: Path, addresses: list[str]) -> None:
        folder.mkdir()
        targets = [f"{address}:9100" for address in addresses]
        scrape = {"job_name": "fedopt", "scrape_interval": "1s", "scrape_timeout": "1s"}
        config = {"scrape_configs": [scrape | {"static_configs": [{"targets": targets}]}]}
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._command = [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
        ]
        self._log = folder / "log"

    def __enter__(self) -> Callable[[str], list[float]]:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        return self.ask

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(20)

    def ask(self, expression: str) -> list[float]:
        query = urllib.parse.urlencode({"query": expression})
        url = f"http://127.0.0.1:{self._port}/api/v1/query?{query}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                found = json.load(answer)
        except OSError:
            assert self._process.poll() is None, self._log.read_text()
            return []
        assert found["status"] == "success", found
        return [float(result["value"][1]) for result in found["data"]["result"]]

"""What a server and clients tell Prometheus, against the records of the run."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from streams import ServerThread, hosted_clients, make_config

from fedopt_flwr import ConfigError
from fedopt_flwr.deployment.metrics import ClientMetrics, ServerMetrics, serving_metrics
from fedopt_flwr.engines.stream import Connections, Roster
from fedopt_flwr.rounds.record import RoundRecord

Samples = dict[tuple[str, str], float]
DOCS = Path(__file__).parents[2] / "docs" / "operations.md"


def scraped(registry: CollectorRegistry) -> Samples:
    """Values by name and labels."""
    text = generate_latest(registry).decode()
    return {
        (s.name, " ".join(s.labels.values())): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if not s.name.endswith("_created")
    }


class Broken:
    """A client whose training fails in one round."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.client_id = client.client_id

    def get_properties(self, config: Any) -> Any:
        return self._client.get_properties(config)

    def fit(self, parameters: Any, config: Any) -> Any:
        if self.client_id == 1 and config["fedopt.round"] == 2:
            raise ValueError("the sensor is blind")
        return self._client.fit(parameters, config)


def test_a_servers_metrics_are_those_of_its_records(tmp_path: Path) -> None:
    config = make_config(num_rounds=4)
    config["output"] = {"directory": str(tmp_path / "run"), "checkpoint_every": 1}
    seen: list[Samples] = []
    kept: list[ServerMetrics] = []

    def on_round(record: RoundRecord) -> None:
        kept[0].on_round(record)
        seen.append(scraped(kept[0].registry))

    with ServerThread(config, on_round=on_round) as server:
        kept.append(ServerMetrics(server.config, server.roster))
        before = scraped(kept[0].registry)
        hosted_clients(server, [0, 1, 2], tmp_path / "state", wrap=Broken)
        records = server.result().rounds
    assert before["fedopt_clients", "connected"] == 0
    assert before["fedopt_clients", "missing"] == 3
    assert before["fedopt_replies_refused_total", "other"] == 0
    assert not {n for n, _ in before} & {"fedopt_checkpoint_age_seconds", "fedopt_test_loss"}
    assert [s["fedopt_round", ""] for s in seen] == [0, 1, 2, 3, 4]
    last = seen[-1]
    assert last["fedopt_rounds", ""] == 4
    assert last["fedopt_clients", "connected"] == 3
    assert 0 <= last["fedopt_checkpoint_age_seconds", ""] < 60
    assert last["fedopt_info", "padamfed 0.1.0"] == 1
    accepted = [s["fedopt_replies_accepted_total", ""] for s in seen]
    assert accepted == [3, 6, 8, 11, 14]
    assert [s["fedopt_replies_refused_total", "other"] for s in seen] == [0, 0, 1, 1, 1]
    assert last["fedopt_transfer_bytes_total", "up"] == sum(r.uplink_bytes for r in records)
    assert last["fedopt_transfer_bytes_total", "down"] == sum(r.downlink_bytes for r in records)
    for name in ("train_loss", "test_loss", "test_metric"):
        assert last[f"fedopt_{name}", ""] == getattr(records[-1], name)
    assert last["fedopt_round_seconds_count", ""] == 5
    total = sum(r.seconds for r in records)
    assert last["fedopt_round_seconds_sum", ""] == pytest.approx(total)
    parts = {p: last["fedopt_round_part_seconds_sum", p] for p in ("clients", "server", "after")}
    assert parts["clients"] + parts["server"] == pytest.approx(total)
    assert all(seconds > 0 for seconds in parts.values())


def test_clients_metrics_name_each_and_count_their_work(tmp_path: Path) -> None:
    connections = Connections([0, 1, 2])
    metrics = ClientMetrics(connections)
    assert scraped(metrics.registry)["fedopt_client_connected", "2"] == 0
    during: list[Samples] = []
    with ServerThread(
        make_config(num_rounds=2), on_round=lambda r: during.append(scraped(metrics.registry))
    ) as server:
        hosted_clients(server, [0, 1, 2], tmp_path, connections)
        examples = server.result().rounds and server.roster.clients()
    for i in range(3):
        assert during[-1]["fedopt_client_connected", str(i)] == 1
        assert during[-1]["fedopt_client_examples", str(i)] == examples[i].num_examples
    assert during[-1]["fedopt_client_training_seconds_count", ""] == 9
    assert 0 < during[-1]["fedopt_client_training_seconds_sum", ""] < 60


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("no answer within 3 s (federation.round_timeout); connection closed", "timeout"),
        ("connection lost 1.2 s after it was asked", "connection"),
        ("it hung up 1.2 s after it was asked, or its reply was too large: …", "hung_up"),
        ("no answer", "absent"),
        ("not counted: 1 replies, federation.min_replies is 2", "not_counted"),
        ("client 0, round 3: array 'delta' is not finite", "not_finite"),
        ("KeyError: 'x'", "other"),
    ],
)
def test_a_refused_reply_has_one_of_few_reasons(error: str, reason: str) -> None:
    metrics = ServerMetrics(ServerThread(make_config()).config, Roster())
    entry = {"client": 0, "phase": "train", "error": error}
    metrics.on_round(RoundRecord(3, failures=1, errors=[entry]))
    found = scraped(metrics.registry)
    refused = {r: n for (name, r), n in found.items() if name == "fedopt_replies_refused_total"}
    assert {r for r, n in refused.items() if n} == {reason}


def test_a_resumed_server_begins_at_the_round_that_was_done() -> None:
    metrics = ServerMetrics(ServerThread(make_config()).config, Roster(), rounds_done=57)
    assert scraped(metrics.registry)["fedopt_round", ""] == 57


def test_names_and_units_are_as_prometheus_wants_and_as_the_docs_say() -> None:
    server = ServerMetrics(ServerThread(make_config()).config, Roster())
    client = ClientMetrics(Connections([0]))
    kinds = {f.name: f.type for m in (server, client) for f in m.registry.collect()}
    documented = set(re.findall(r"^\| `(fedopt_\w+)", DOCS.read_text(), re.M))
    told = {f"{name}_total" if kind == "counter" else name for name, kind in kinds.items()}
    told = {"fedopt_info" if name == "fedopt" else name for name in told}
    later = {"checkpoint_age_seconds", "train_loss", "test_loss", "test_metric"}  # once known
    assert documented == told | {f"fedopt_{name}" for name in later}
    assert not [n for n in told if re.search("days|_ms|_mb|minutes", n)]


def test_metrics_are_served_over_http_and_an_address_that_is_taken_is_named() -> None:
    metrics = ClientMetrics(Connections([0]))
    with serving_metrics("127.0.0.1:0", metrics.registry) as port:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            told = answer.read()
        assert b'fedopt_client_connected{client="0"} 0.0' in told
        assert b"_created" not in told
        for address in (f"127.0.0.1:{port}", "no.such.host.invalid:1"):
            message = re.escape(f"--metrics: cannot listen at {address!r}")
            with pytest.raises(ConfigError, match=message):
                serving_metrics(address, metrics.registry).__enter__()

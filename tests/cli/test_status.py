"""`fedopt status`: what people read of a server's and a client's metrics, and what is refused."""

from __future__ import annotations

import http.server
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from processes import InProcess, free_port, refused

from fedopt_flwr import RunConfig
from fedopt_flwr.deployment.metrics import ClientMetrics, ServerMetrics, serving_metrics
from fedopt_flwr.engines.stream import Connections, Roster
from fedopt_flwr.rounds.record import RoundRecord


def rows(text: str) -> dict[str, str]:
    return dict(line.split("  ", 1) for line in text.splitlines())


def test_a_server_is_told_in_words(in_process: InProcess) -> None:
    roster = Roster()
    ends = {"own": datetime.now(UTC) + timedelta(days=20, hours=1)}
    metrics = ServerMetrics(RunConfig(), roster, lambda: ends)
    roster.joining(3, "peer", datetime.now(UTC) + timedelta(days=400, hours=1))
    roster.ready(3, 55)
    lost = {"client": 1, "phase": "train", "error": "connection lost 2 s after it was asked"}
    metrics.on_round(RoundRecord(1, [3], 1, test_loss=0.25, uplink_bytes=3_000_000, errors=[lost]))
    with serving_metrics("127.0.0.1:0", metrics.registry) as port:
        ended = in_process("status", f"127.0.0.1:{port}")
    assert ended.returncode == 0
    found = {title: " ".join(text.split()) for title, text in rows(ended.stdout).items()}
    assert found["info"] == "algorithm autofed, version 0.1.0"
    assert (found["round"], found["rounds"]) == ("1", "50")
    assert found["clients"] == "connected 1, training 0, missing 19"
    assert (found["replies accepted"], found["replies refused"]) == ("1", "connection 1")
    assert found["transfer bytes"] == "up 3.0 MB"
    assert found["test loss"] == "0.25"
    certificates = found["certificate end timestamp seconds"]
    assert "(20 days left), client 3" in certificates
    assert "(400 days left)" in certificates


def test_clients_are_told_before_they_have_done_anything(in_process: InProcess) -> None:
    metrics = ClientMetrics(Connections([0, "site"]))
    with serving_metrics("127.0.0.1:0", metrics.registry) as port:
        ended = in_process("status", f"localhost:{port}")
    assert rows(ended.stdout)["client connected"].strip() == "0 0, site 0"
    assert rows(ended.stdout)["client training seconds"].strip() == "none yet"


class Other(http.server.BaseHTTPRequestHandler):
    """Answers as something else than fedopt."""

    body = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None: ...


@pytest.mark.parametrize("body", [b"", b"up 1\n", b"<html>\xff", b"fedopt_round{ 1 2 3 4"])
def test_something_else_at_that_port_is_said(
    in_process: InProcess, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Other, "body", body)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        ended = in_process("status", f"127.0.0.1:{server.server_port}")
        server.shutdown()
    assert ended.returncode == 1
    assert f"no metrics at '127.0.0.1:{server.server_port}'" in ended.stderr
    assert "--metrics" in ended.stderr


def test_nothing_there_and_no_address_are_said(in_process: InProcess, tmp_path: Path) -> None:
    port = free_port()
    ended = in_process("status", f"127.0.0.1:{port}")
    assert (ended.returncode, "Connection refused" in ended.stderr) == (1, True)
    refused(in_process("status", "here"), "HOST:PORT: got 'here'; must be HOST:PORT")

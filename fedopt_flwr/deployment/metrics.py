"""What a server and its clients tell Prometheus. Everything is named and explained here."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    disable_created_metrics,
    start_http_server,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..algorithm import Algorithm, Plan
from ..config.run_config import RunConfig
from ..engines.stream import PACKAGE, Connections, Roster
from ..errors import ConfigError
from ..flower import STATE_LOST
from ..rounds.record import NOT_COUNTED, NOT_FINITE, RoundRecord
from ..run.checkpoints import newest_checkpoint
from ..run.experiment import Experiment

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000, 10_000)
_REASONS = {  # of a reply that was not counted -> how its error is known
    "not_counted": NOT_COUNTED,
    "not_finite": NOT_FINITE,
    "state_lost": STATE_LOST,
    "timeout": "no answer within",
    "connection": "connection lost",
    "hung_up": "it hung up",
    "absent": "no answer",
}
_VALUES = {  # of a record, where it has them
    "train_loss": "Mean minibatch loss of the last round with replies",
    "test_loss": "Loss on the server's test data, as last evaluated",
    "test_metric": "What model.metric measures there",
}
_OTHER = "other"  # such as an error of the client's own code
Ends = Callable[[], Mapping[str, datetime]]


@contextlib.contextmanager
def serving_metrics(address: str, registry: CollectorRegistry) -> Iterator[int]:
    """Answer GET /metrics at HOST:PORT meanwhile; yields the port.

    ConfigError if the address cannot be used.
    """
    host, _, port = address.rpartition(":")
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a time for each counter, which nobody asks for
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry)
    except OSError as error:
        raise ConfigError(
            f"--metrics: cannot listen at {address!r}: {error.strerror or error}; must be "
            "HOST:PORT of this machine, with a port that no other program uses"
        ) from None
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class ServerMetrics(Collector):
    """A `Listener` of a server's run that keeps its metrics."""

    def __init__(
        self, config: RunConfig, roster: Roster, ends: Ends = dict, rounds_done: int = 0
    ) -> None:
        self._config, self._roster, self._ends = config, roster, ends
        self.registry = registry = CollectorRegistry()
        registry.register(self)
        Info("fedopt", "Package and rule", registry=registry).info(
            {"version": PACKAGE, "algorithm": config.algorithm.name}
        )
        self._round = Gauge("fedopt_round", "Last round that is over", registry=registry)
        self._round.set(rounds_done)
        total = Gauge("fedopt_rounds", "Rounds of the run", registry=registry)
        total.set(config.federation.num_rounds)
        self._accepted = Counter(
            "fedopt_replies_accepted", "Replies that counted", registry=registry
        )
        self._refused = Counter(
            "fedopt_replies_refused", "Replies that did not", ["reason"], registry=registry
        )
        for reason in (*_REASONS, _OTHER):  # from 0 on, so that a rate sees the first one
            self._refused.labels(reason)
        self._bytes = Counter(
            "fedopt_transfer_bytes", "Encoded arrays of rounds", ["direction"], registry=registry
        )
        self._seconds = self._histogram("fedopt_round_seconds", "A round, without its evaluation")
        self._parts = self._histogram(
            "fedopt_round_part_seconds",
            "Parts of a round: clients (their slowest answer), server (the rest of "
            "fedopt_round_seconds, waiting for absent clients too), after (evaluation and files)",
            ["part"],
        )
        self._values: dict[str, float] = {}  # those that are known
        self._lock = threading.Lock()
        self._slowest = 0.0  # answer since the last round
        self._ended = time.monotonic()
        roster.on_answer = self._hear

    def _histogram(self, name: str, text: str, labels: Iterable[str] = ()) -> Histogram:
        return Histogram(name, text, list(labels), registry=self.registry, buckets=_SECONDS)

    def _hear(self, seconds: float) -> None:
        with self._lock:  # clients answer in threads of their own
            self._slowest = max(self._slowest, seconds)

    def on_start(self, rule: Algorithm, plan: Plan, experiment: Experiment) -> None:
        self._ended = time.monotonic()

    def on_round(self, record: RoundRecord) -> None:
        self._round.set(record.round)
        self._accepted.inc(len(record.clients))
        for error in record.errors:
            self._refused.labels(_reason(str(error["error"]))).inc()
        self._bytes.labels("up").inc(record.uplink_bytes)
        self._bytes.labels("down").inc(record.downlink_bytes)
        known = {name: getattr(record, name) for name in _VALUES}
        self._values |= {name: value for name, value in known.items() if value is not None}
        now = time.monotonic()
        with self._lock:
            clients, self._slowest = min(self._slowest, record.seconds), 0.0
        self._seconds.observe(record.seconds)
        self._parts.labels("clients").observe(clients)
        self._parts.labels("server").observe(record.seconds - clients)
        self._parts.labels("after").observe(max(0.0, now - self._ended - record.seconds))
        self._ended = now

    def collect(self) -> Iterator[Metric]:
        """Yield what is read when it is asked for."""
        clients = self._roster.clients()
        states = GaugeMetricFamily(
            "fedopt_clients", "Clients: connected, training (of those), missing", labels=["state"]
        )
        connected = sum(client.is_here for client in clients.values())
        training = sum(client.state == "training" for client in clients.values())
        states.add_metric(["connected"], connected)
        states.add_metric(["training"], training)
        missing = self._config.federation.clients_to_start - connected
        states.add_metric(["missing"], max(0, missing))
        yield states
        for name, value in self._values.copy().items():
            yield GaugeMetricFamily(f"fedopt_{name}", _VALUES[name], value)
        directory = self._config.output.directory
        newest = None if directory is None else newest_checkpoint(directory)
        if newest is not None:
            age = GaugeMetricFamily("fedopt_checkpoint_age_seconds", "Since the last checkpoint")
            age.add_metric([], max(0.0, time.time() - newest))
            yield age
        theirs = {str(i): c.certificate_ends for i, c in clients.items() if c.is_here}
        yield _certificates(self._ends(), {i: end for i, end in theirs.items() if end})


class ClientMetrics(Collector):
    """The metrics of the clients of one process."""

    def __init__(self, connections: Connections, ends: Ends = dict) -> None:
        self._connections, self._ends = connections, ends
        self.registry = registry = CollectorRegistry()
        registry.register(self)
        Info("fedopt", "Package", registry=registry).info({"version": PACKAGE})
        seconds = Histogram(
            "fedopt_client_training_seconds",
            "Local work of one round, of any client of this process",
            registry=registry,
            buckets=_SECONDS,
        )
        connections.on_training = seconds.observe

    def collect(self) -> Iterator[Metric]:
        """Yield what is read when it is asked for."""
        connected = GaugeMetricFamily(
            "fedopt_client_connected", "1 while its stream to the server is open", labels=["client"]
        )
        examples = GaugeMetricFamily(
            "fedopt_client_examples", "Examples that it trains on", labels=["client"]
        )
        for client_id, client in self._connections.clients().items():
            connected.add_metric([str(client_id)], client.is_open)
            if client.num_examples is not None:
                examples.add_metric([str(client_id)], client.num_examples)
        yield connected
        yield examples
        yield _certificates(self._ends(), {})


def _certificates(own: Mapping[str, datetime], clients: Mapping[str, datetime]) -> Metric:
    ends = GaugeMetricFamily(
        "fedopt_certificate_end_timestamp_seconds",
        "When a certificate ends: own, ca, or a connected client's",
        labels=["certificate", "client"],
    )
    for name, end in own.items():
        ends.add_metric([name, ""], end.timestamp())
    for client_id, end in clients.items():
        ends.add_metric(["client", client_id], end.timestamp())
    return ends


def _reason(error: str) -> str:
    """Return one of few words for an error: its text may hold a client's own, of any length."""
    return next((reason for reason, mark in _REASONS.items() if mark in error), _OTHER)

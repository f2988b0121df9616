"""Seconds of a round over gRPC: ours, Flower's own server and client, in process, the wire alone.

    python benchmarks/transport.py [--pairs 3] [--rounds 12] [--memory]

Work: digits, 8 client processes on this machine, all of them every round, a model of 1.0M
parameters, one local step of 8 examples. Flower's `start_server` and `start_client` carry the same
strategy and the same clients, so the same arrays travel and the same steps are taken; its server
may ask all 8 at the same time. Ours and Flower's run in turn, each first in every second pair; a
figure is the median over rounds, then over pairs. --memory runs 100 clients in 4 processes, 10 a
round, 50 rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

from flwr.client import NumPyClient

from fedopt_flwr import RunConfig
from fedopt_flwr.data import load_test_data
from fedopt_flwr.deployment.launcher import launch
from fedopt_flwr.engines.stream import Roster
from fedopt_flwr.rounds.record import RoundRecord
from fedopt_flwr.run.experiment import Experiment
from fedopt_flwr.run.hosts import ClientHost, HostedClient, states_in
from fedopt_flwr.run.run import Run, Silent
from fedopt_flwr.run.simulate import run_experiment

CLIENTS = 8
RULES = ("fedavg", "padamfed")


def settings_of(algorithm: str, clients: int, sampled: int, rounds: int) -> list[str]:
    """Return the configuration as `--set` takes it."""
    return [
        f"algorithm.name={algorithm}",
        f"federation.num_clients={clients}",
        f"federation.clients_per_round={sampled}",
        f"federation.num_rounds={rounds}",
        "training.local_steps=1",
        "training.batch_size=8",
        "training.device=cpu",
        "model.options.hidden=[1000, 926]",
        f"output.evaluate_every={rounds}",
        "data.partition.kind=iid",
    ]


def median_round(records: list[RoundRecord]) -> float:
    """Return the median seconds of a training round, without the first, which warms up."""
    return statistics.median(r.seconds for r in records if r.round > 1)


def run_ours(settings: list[str], processes: int, listener: Silent | None = None) -> float:
    """Return the seconds of a round through `launch`."""
    config = RunConfig.from_file(None, settings)
    arguments = [part for setting in settings for part in ("--set", setting)]
    with tempfile.TemporaryDirectory() as folder:
        result = launch(
            config,
            arguments,
            num_processes=processes,
            folder=Path(folder),
            listener=listener or Silent(),
            roster=Roster(),
        )
    return median_round(result.rounds)


def run_flower(settings: list[str]) -> float:
    """Return the seconds of a round through Flower's own server and clients."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, __file__, "--flower", address, *settings]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    processes = [server]
    try:
        wait_for_listener(address)  # Flower's client does not try twice
        for i in range(CLIENTS):
            processes.append(subprocess.Popen([*command, f"client={i}"], stderr=subprocess.DEVNULL))
        return float(server.communicate(timeout=120)[0])
    finally:
        for process in processes:
            process.kill()
            process.wait()


def wait_for_listener(address: str) -> None:
    """Wait until something listens there."""
    host, port = address.split(":")
    for _ in range(600):
        with contextlib.suppress(OSError), socket.create_connection((host, int(port))):
            return
        time.sleep(0.1)
    raise TimeoutError(f"nothing listens at {address}")


class FlowerClient(NumPyClient):
    """Our client under Flower's own `start_client`, told beforehand what our server would say."""

    def __init__(self, client: HostedClient, facts: dict[str, int]) -> None:
        self._client, self._facts = client, facts

    def get_properties(self, config):
        return self._client.get_properties(self._facts)

    def fit(self, parameters, config):
        return self._client.fit(parameters, config)


def flower_side(address: str, settings: list[str]) -> None:
    """Be Flower's server, or its client where the last setting says which."""
    from flwr.client import start_client
    from flwr.server import Server, ServerConfig, SimpleClientManager, start_server

    logging.getLogger("flwr").setLevel(logging.ERROR)
    if settings[-1].startswith("client="):
        number, config = int(settings[-1][7:]), RunConfig.from_file(None, settings[:-1])
        with tempfile.TemporaryDirectory() as state:
            host = ClientHost(config, [number])
            facts = {"num_clients": CLIENTS, "seed": config.federation.seed}
            client = FlowerClient(HostedClient(number, host, states_in(Path(state))), facts)
            start_client(server_address=address, client=client.to_client())
        return
    config = RunConfig.from_file(None, settings)
    run = Run(Experiment(config, data=load_test_data(config)), Silent(), None)
    server = Server(client_manager=SimpleClientManager(), strategy=run.strategy)
    server.set_max_workers(CLIENTS)
    rounds = ServerConfig(num_rounds=config.federation.num_rounds)
    with contextlib.redirect_stdout(io.StringIO()):
        start_server(server_address=address, server=server, config=rounds)
    print(median_round(run.finish().rounds))


def loopback_bytes_per_second() -> float:
    """Return what a plain socket moves over 127.0.0.1."""
    total, block = 1 << 30, bytes(1 << 20)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def send() -> None:
            with socket.create_connection(listener.getsockname()) as connection:
                for _ in range(total // len(block)):
                    connection.sendall(block)

        sender = threading.Thread(target=send)
        sender.start()
        connection, _ = listener.accept()
        started, received, buffer = time.perf_counter(), 0, bytearray(1 << 20)
        with connection:
            while received < total:
                received += connection.recv_into(buffer)
        sender.join()
    return total / (time.perf_counter() - started)


def compare(algorithm: str, pairs: int, rounds: int) -> None:
    """Print one line for a rule."""
    settings = settings_of(algorithm, CLIENTS, CLIENTS, rounds)
    local = run_experiment(Experiment(RunConfig.from_file(None, settings)))
    last = local.rounds[-1]
    wire = (last.uplink_bytes + last.downlink_bytes) / loopback_bytes_per_second()
    times: dict[str, list[float]] = {"ours": [], "flower": []}
    for pair in range(pairs):
        for side in ("ours", "flower") if pair % 2 == 0 else ("flower", "ours"):
            seconds = run_ours(settings, CLIENTS) if side == "ours" else run_flower(settings)
            times[side].append(seconds)
    ratio = statistics.median(a / b for a, b in zip(times["ours"], times["flower"], strict=True))
    ours, flower = (statistics.median(times[side]) for side in ("ours", "flower"))
    print(
        f"{algorithm:9} {(last.uplink_bytes + last.downlink_bytes) / 1e6:.0f} MB a round: "
        f"{ours:.3f} s; Flower's own {flower:.3f} s (ratio {ratio:.2f}); in process "
        f"{median_round(local.rounds):.3f} s; the bytes alone {wire:.3f} s",
        flush=True,
    )


class MemoryWatch(Silent):
    """Notes the server's resident memory after every round."""

    def __init__(self) -> None:
        self.megabytes: dict[int, float] = {}

    def on_round(self, record: RoundRecord) -> None:
        fields = Path("/proc/self/status").read_text().splitlines()
        rss = next(int(line.split()[1]) for line in fields if line.startswith("VmRSS"))
        self.megabytes[record.round] = rss / 1024


def watch_memory() -> None:
    """Print the server's memory over 50 rounds with 100 clients in 4 processes."""
    watch = MemoryWatch()
    seconds = run_ours(settings_of("padamfed", 100, 10, 50), 4, watch)
    shown = ", ".join(f"round {r}: {watch.megabytes[r]:.0f}" for r in (1, 5, 10, 20, 30, 40, 50))
    print(f"padamfed, 100 clients in 4 processes, 10 a round, {seconds:.3f} s a round; MB {shown}")


def main() -> None:
    """Print every figure."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--memory", action="store_true", help="only the memory of the server")
    parser.add_argument("--flower", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.flower:
        flower_side(arguments.flower[0], arguments.flower[1:])
        return
    if not arguments.memory:
        for algorithm in RULES:
            compare(algorithm, arguments.pairs, arguments.rounds)
    watch_memory()


if __name__ == "__main__":
    main()

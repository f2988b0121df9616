"""Time and memory of a round beside a bare PyTorch loop that takes the same gradient steps.

    python benchmarks/engine.py [--pairs 5] [--rounds 8] [--memory | --ray] [--device cuda]

Work 1: MNIST, an 80k-parameter CNN, N = 500, S = 25, 5 local steps, batches of 10.
Work 2: MNIST, a linear model 784-10, N = 500, S = 50, 5 local steps, batches of 10.
The loop draws the same batches, steps with torch.optim.SGD from the same server model and averages
the results; it has no clients, no messages, no state. A pair is one run of each, the loop first or
second in turn; a figure is the median over pairs of the ratio within a pair. One intra-op thread.
At the end fedavg runs in process, on Ray, and on Ray with Flower's own FedAvg and a plain
NumPyClient. With --device cuda only engine and loop run, both there, with one worker.
MNIST comes from $FEDOPT_DATA.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn import functional

from fedopt_flwr import RunConfig
from fedopt_flwr.data import FederatedData, load_federated_data
from fedopt_flwr.randomness import derive
from fedopt_flwr.rounds.record import RoundRecord
from fedopt_flwr.rounds.sampling import sample_uniform
from fedopt_flwr.run.experiment import Experiment
from fedopt_flwr.run.flower_apps import simulate_on_ray
from fedopt_flwr.run.result import Result
from fedopt_flwr.run.run import Silent
from fedopt_flwr.run.simulate import run_experiment
from fedopt_flwr.training.objective import batch_positions

WORKS = {"cnn": 25, "logistic": 50}  # model, clients a round


def make_config(model: str, algorithm: str, rounds: int, device: str = "cpu") -> RunConfig:
    """Return the benchmark's configuration; the server never evaluates before the last round."""
    return RunConfig(
        algorithm={"name": algorithm},
        federation={"num_clients": 500, "clients_per_round": WORKS[model], "num_rounds": rounds},
        training={"local_steps": 5, "batch_size": 10, "device": device},
        data={"name": "mnist", "partition": {"kind": "iid"}},
        model={"name": model},
    )


def run_loop(experiment: Experiment, rounds: int) -> list[float]:
    """Return the seconds of each round of the bare loop."""
    config = experiment.config
    federation, training = config.federation, config.training
    model, device = experiment.make_model().module, experiment.device
    server = [p.detach().clone() for p in model.parameters()]
    seconds = []
    for round_number in range(1, rounds + 1):
        started = time.perf_counter()
        order = sample_uniform(range(federation.num_clients), federation.seed, round_number)
        chosen = sorted(order[: federation.clients_per_round])
        total = [torch.zeros_like(p) for p in server]
        for client in chosen:
            data = experiment.data.clients[client]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), server, strict=True):
                    parameter.copy_(value)
            seed = derive(federation.seed, "batches", client, round_number)
            steps, size = training.local_steps, training.batch_size
            positions = batch_positions(data.num_examples, size, steps, None, seed)
            for inputs, targets in data.batches(positions, device):
                optimizer.zero_grad()
                functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
            for part, parameter in zip(total, model.parameters(), strict=True):
                part.add_(parameter.detach())
        server = [part / len(chosen) for part in total]
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return seconds


def run_engine(experiment: Experiment, workers: int) -> list[float]:
    """Return the seconds of each training round of the engine."""
    result = run_experiment(experiment, workers=workers)
    return [record.seconds for record in result.rounds if record.round > 0]


def median_round(seconds: list[float]) -> float:
    """Return the median over rounds, without the first, which warms up."""
    return statistics.median(seconds[1:])


def compare(
    data: FederatedData,
    model: str,
    algorithm: str,
    workers: int,
    pairs: int,
    rounds: int,
    device: str,
) -> None:
    """Print the ratio of the engine's round to the loop's."""
    experiment = Experiment(make_config(model, algorithm, rounds, device), data=data)
    ratios, loop_times, engine_times = [], [], []
    for pair in range(pairs):
        gc.collect()
        order = ("loop", "engine") if pair % 2 == 0 else ("engine", "loop")
        times = {}
        for side in order:
            if side == "loop":
                times[side] = median_round(run_loop(experiment, rounds))
            else:
                times[side] = median_round(run_engine(experiment, workers))
        ratios.append(times["engine"] / times["loop"])
        loop_times.append(times["loop"])
        engine_times.append(times["engine"])
    print(
        f"{model:9} {algorithm:9} workers {workers}: {statistics.median(ratios):.3f} "
        f"(of {', '.join(f'{r:.3f}' for r in sorted(ratios))}; loop "
        f"{1e3 * statistics.median(loop_times):.1f} ms, engine "
        f"{1e3 * statistics.median(engine_times):.1f} ms a round)",
        flush=True,
    )


def peak_growth(run: str, rounds: int) -> None:
    """Print by how many model vectors memory grew at its peak; called in a process of its own."""
    torch.set_num_threads(1)
    algorithm = "fedavg" if run == "loop" else run
    data = load_federated_data(make_config("cnn", algorithm, rounds))
    data = replace(data, test=None)  # the loop does not evaluate either
    experiment = Experiment(make_config("cnn", algorithm, rounds), data=data)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = memory_bytes("VmRSS")
    if run == "loop":
        run_loop(experiment, rounds)
    else:
        run_engine(experiment, workers=1)
    print((memory_bytes("VmHWM") - before) / (4 * experiment.model.size))


def memory_bytes(field: str) -> int:
    """Return a memory figure of this process from /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def compare_memory(rounds: int, repeats: int) -> None:
    """Print how many model vectors the engine's peak lies over the loop's."""
    medians = {}
    for run in ("loop", "fedavg", "padamfed"):
        command = [sys.executable, __file__, "--peak", run, "--rounds", str(rounds)]
        found = [float(subprocess.check_output(command)) for _ in range(repeats)]
        medians[run] = statistics.median(found)
    participants, clients = WORKS["cnn"], 500
    for run, bound in (("fedavg", 2 * participants), ("padamfed", clients + 4 * participants)):
        print(
            f"peak memory, {run}: {medians[run] - medians['loop']:.0f} model vectors over the "
            f"loop's {medians['loop']:.0f} (bound {bound})"
        )


class FirstRound(Silent):
    """Notes when round 1 was over."""

    def __init__(self) -> None:
        self.started, self.seconds = time.perf_counter(), 0.0

    def on_round(self, record: RoundRecord) -> None:
        if record.round == 1:
            self.seconds = time.perf_counter() - self.started


def compare_with_ray(model: str, rounds: int) -> None:
    """Print seconds a round, and until the end of the first, for fedavg on five engines.

    Flower gives a client 2 CPUs if nothing else is said: on two cores one trains at a time.
    """
    from stock_flower import run_stock

    config = make_config(model, "fedavg", rounds)
    times: dict[str, tuple[float, list[float]]] = {}
    for workers in (1, 2):
        first = FirstRound()
        result = run_experiment(Experiment(config), workers=workers, listener=first)
        times[f"in process, workers {workers}"] = first.seconds, seconds_of_rounds(result)
    first = FirstRound()
    result = simulate_on_ray(config, first, cpus_per_client=1, gpus_per_client=0)
    times["on Ray, 1 CPU a client"] = first.seconds, seconds_of_rounds(result)
    for cpus in (1, 2):
        times[f"Flower's FedAvg on Ray, {cpus} CPU a client"] = run_stock(config, cpus)
    ours = statistics.median(times["in process, workers 1"][1])
    for name, (until_first, later) in times.items():
        seconds = statistics.median(later)
        print(
            f"{model:9} {name}: {1e3 * seconds:.0f} ms a round ({seconds / ours:.2f} times "
            f"one worker in process), round 1 over after {until_first:.1f} s",
            flush=True,
        )


def seconds_of_rounds(result: Result) -> list[float]:
    """Return the seconds of every round after the first."""
    return [record.seconds for record in result.rounds[1:]]


def main() -> None:
    """Print every figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--memory", action="store_true", help="only the memory figures")
    parser.add_argument("--ray", action="store_true", help="only the engines on Ray")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        peak_growth(arguments.peak, arguments.rounds)
        return
    if not arguments.memory and not arguments.ray:
        torch.set_num_threads(1)
        data = load_federated_data(make_config("cnn", "fedavg", 1))
        print(
            f"torch {torch.__version__}, {os.cpu_count()} cores; engine / loop: median over pairs"
        )
        for model, algorithm, workers in (
            ("cnn", "fedavg", 1),
            ("cnn", "padamfed", 1),
            ("logistic", "fedavg", 1),
            ("cnn", "fedavg", 2),
        ):
            if workers == 1 or arguments.device == "cpu":
                pairs, rounds, device = arguments.pairs, arguments.rounds, arguments.device
                compare(data, model, algorithm, workers, pairs, rounds, device)
    if arguments.device == "cpu" and not arguments.ray:
        compare_memory(arguments.rounds, arguments.pairs)
    if arguments.device == "cpu" and not arguments.memory:
        for model in WORKS:
            compare_with_ray(model, arguments.rounds)


if __name__ == "__main__":
    main()

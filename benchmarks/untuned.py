"""Rules without a rate against the best rate of a grid: final accuracy, mean over seeds 0 to 2.

    FEDOPT_DATA=/path/to/data python benchmarks/untuned.py [--tasks digits-50] [--plot FILE]
    FEDOPT_DATA=/path/to/data python benchmarks/untuned.py --steady digits-50

The grids of fedavg, scaffold_m and fedadam run on seed 0; the best point of each then on seeds 1
and 2. Cells that are finished stand in untuned.json beside this file and are not run again: remove
those of a rule whose arithmetic changed. Without anything left to run it prints accuracies, and
in brackets the best point of a grid, or the share of the best tuned rule.

--steady tries autofed on digits-50 or mnist-mlp with few and many rounds, small and large batches,
few and all clients, beside the best fedavg there, all on seed 0.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from fedopt_flwr import RunConfig, simulate
from fedopt_flwr.run.plots import look

CELLS = Path(__file__).with_suffix(".json")
SEEDS = (0, 1, 2)
RATES = [0.02, 0.05, 0.1, 0.2, 0.4]
SERVER_RATES = [0.003, 0.01, 0.03]
RATES_OF = {  # where those are too short
    "digits-50": [*RATES, 0.8, 1.6, 3.2],
    "digits-500": [*RATES, 0.8, 1.6, 3.2],
    "shakespeare": [1, 2, 4, 8, 16],
    "newsgroups": [10, 20, 40, 80, 160],
}
SERVER_RATES_OF = {"newsgroups": [0.01, 0.03, 0.1]}


def grids(task: str) -> dict[str, dict[str, list[float]]]:
    """Return the points that each tuned rule is tried at, by its fields."""
    rates = RATES_OF.get(task, RATES)
    server_rates = SERVER_RATES_OF.get(task, SERVER_RATES)
    adam = {"client_learning_rate": rates[1:3], "server_learning_rate": server_rates}
    one = {"client_learning_rate": rates}
    return {"fedavg": one, "scaffold_m": one, "fedadam": adam}


UNTUNED = ("padamfed", "padamfed_dog", "autofed", "fedsps", "delta_sgd")
MARKERS = "osD^v"  # of these, so that nobody needs the colours
EXAMPLES = Path(__file__).parents[1] / "examples"


def digits(num_rounds: int) -> RunConfig:
    return RunConfig(
        federation={"num_clients": 20, "clients_per_round": 5, "num_rounds": num_rounds},
        training={"local_steps": 10, "batch_size": 32, "device": "cpu"},
        data={"name": "digits", "partition": {"kind": "dirichlet", "concentration": 0.3}},
    )


def synthetic() -> RunConfig:
    return RunConfig(
        federation={"num_clients": 30, "clients_per_round": 10, "num_rounds": 200},
        training={"local_steps": 10, "batch_size": 10, "device": "cpu"},
        data={"name": "synthetic"},  # synthetic(1,1)
        model={"name": "logistic"},
    )


def own(data: str, num_clients: int, model: str, partition: dict[str, Any]) -> RunConfig:
    """A task with data of untuned_data.py."""
    return RunConfig(
        federation={"num_clients": num_clients, "clients_per_round": 10, "num_rounds": 100},
        training={"local_steps": 10, "batch_size": 32, "device": "cpu"},
        data={"name": f"untuned_data:{data}", "partition": partition},
        model={"name": model},
    ).looking_in(Path(__file__).parent)


TASKS = {
    "digits-50": lambda: digits(50),
    "digits-500": lambda: digits(500),
    "synthetic": synthetic,
    "mnist-mlp": lambda: RunConfig.from_file(EXAMPLES / "mnist.toml"),
    "mnist-cnn": lambda: RunConfig.from_file(EXAMPLES / "mnist_cnn.toml"),
    "cifar10-cnn": lambda: own("cifar", 100, "cnn", {"concentration": 0.5}),
    "shakespeare": lambda: own("shakespeare", 100, "untuned_data:NextCharacter", {}),
    "newsgroups": lambda: own("newsgroups", 100, "logistic", {"concentration": 0.3}),
}
STEADY = {
    f"{base} T={rounds} B={batch} S={sampled or 'N'}": (base, rounds, batch, sampled)
    for base in ("digits-50", "mnist-mlp")
    for sampled in (2, None)
    for rounds in (50, 200, 1000)
    for batch in (4, 64)
}
TOO_LONG_FOR_FEDAVG = [  # up to an hour for each rate
    f"mnist-mlp T={size} S=N" for size in ("200 B=64", "1000 B=4", "1000 B=64")
]


def steady(base: str, num_rounds: int, batch_size: int, sampled: int | None) -> RunConfig:
    """A task with other rounds, batches and clients a round, which is evaluated ten times."""
    config = TASKS[base]()
    values = {
        "federation.num_rounds": num_rounds,
        "federation.clients_per_round": sampled or config.federation.num_clients,
        "training.batch_size": batch_size,
        "output.evaluate_every": num_rounds // 10,
    }
    return config.with_values(values)


class Cells:
    """What was measured, by task, rule with its rates, and seed."""

    def __init__(self) -> None:
        self.known: dict[str, dict[str, float]] = {}
        self._read()

    def _read(self) -> None:
        """Take what is in the file, where another process may have written meanwhile."""
        if CELLS.exists():
            self.known |= json.loads(CELLS.read_text(encoding="utf-8"))

    def accuracy(self, task: str, rule: str, rates: dict[str, float], seed: int) -> float:
        """Return the accuracy after the last round, 0 where a test loss was not finite."""
        label = ", ".join([rule, *(f"{name}={value}" for name, value in rates.items())])
        key = f"{task} | {label} | {seed}"
        if key not in self.known:
            config = steady(*STEADY[task]) if task in STEADY else TASKS[task]()
            self.known[key] = _run(config, rule, rates, seed)
            self._read()
            order = dict(sorted(self.known.items()))
            CELLS.write_text(json.dumps(order, indent=1) + "\n", encoding="utf-8")
            print(key, self.known[key], flush=True)
        return self.known[key]["accuracy"]


def _run(base: RunConfig, rule: str, rates: dict[str, float], seed: int) -> dict[str, float]:
    values: dict[str, Any] = {"federation.seed": seed}
    if base.output.evaluate_every == 1:
        values["output.evaluate_every"] = 1_000_000
    values |= {f"algorithm.{name}": value for name, value in rates.items()}
    started = time.monotonic()
    records = simulate(base.for_rule(rule).with_values(values)).rounds
    losses = [record.test_loss for record in records if record.test_loss is not None]
    last = records[-1].test_accuracy
    found = last if last is not None and all(map(math.isfinite, losses)) else 0.0
    return {"accuracy": round(found, 4), "seconds": round(time.monotonic() - started, 1)}


def tuned(cells: Cells, task: str, rule: str) -> tuple[float, str]:
    """Return the mean accuracy of a rule's best point, and that point."""
    grid = grids(task)[rule]
    points = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    best = max(points, key=lambda rates: cells.accuracy(task, rule, rates, SEEDS[0]))
    mean_of_best = mean(cells.accuracy(task, rule, best, seed) for seed in SEEDS)
    return mean_of_best, "/".join(map(str, best.values()))


def print_steady(cells: Cells, base: str) -> None:
    """Print how autofed ends beside the best fedavg, for every size of rounds, batches, cohorts."""
    for task in (name for name in STEADY if name.startswith(base)):
        found = cells.accuracy(task, "autofed", {}, 0)
        if task in TOO_LONG_FOR_FEDAVG:  # whose accuracy is 1 at most
            print(f"| {task} | – | {found:.4f} | > {math.floor(100 * found) / 100} |", flush=True)
            continue
        rates = RATES if base == "digits-50" or "S=2" in task else RATES[2:4]  # 800 s a run
        best = max(cells.accuracy(task, "fedavg", {"client_learning_rate": r}, 0) for r in rates)
        print(f"| {task} | {best:.4f} | {found:.4f} | {found / best:.3f} |", flush=True)


def plot(shares: dict[str, dict[str, float]], path: Path) -> None:
    """Draw each untuned rule's share of the best tuned accuracy, task by task."""
    lowest = 0.8
    figure = Figure(figsize=(look.WIDTH, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(1.0, color="black", linewidth=1)
    for number, rule in enumerate(UNTUNED):
        found = [by_rule[rule] for by_rule in shares.values()]
        places = [task + (number - len(UNTUNED) / 2 + 0.5) * 0.13 for task in range(len(found))]
        size = 9 if rule == "autofed" else 6
        shown = [max(share, lowest) for share in found]
        style = {"color": look.COLOURS[number], "marker": MARKERS[number], "markersize": size}
        axes.plot(places, shown, ls="", label=rule, **style)
        for place, share in zip(places, found, strict=True):
            if share < lowest:
                axes.annotate(
                    f"{share:.2f}",
                    (place, lowest),
                    (0, 7),
                    fontsize=7,
                    rotation=90,
                    textcoords="offset points",
                    ha="center",
                    va="bottom",
                )
    axes.set_xticks(range(len(shares)), [task.replace("-", "\n", 1) for task in shares])
    axes.set(ylabel="accuracy / best tuned accuracy", ylim=(lowest - 0.01, 1.03))
    axes.set_title("Rules without a rate; 1: the best of fedavg, scaffold_m and fedadam, tuned")
    axes.grid(visible=False, axis="x")
    figure.legend(loc="outside lower center", ncols=len(UNTUNED))
    look.save(figure, path)


def main() -> None:
    """Run what is missing, print a row for each task, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--steady", choices=["digits-50", "mnist-mlp"])
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    cells = Cells()
    if given.steady:
        print_steady(cells, given.steady)
        return
    shares: dict[str, dict[str, float]] = {}
    print("| task |", " | ".join(f"`{rule}`, tuned" for rule in grids("")), end=" | ")
    print(" | ".join(f"`{rule}`" for rule in UNTUNED), "|")
    for task in given.tasks.split(","):
        best = {rule: tuned(cells, task, rule) for rule in grids(task)}
        bar = max(value for value, _ in best.values())
        found = {r: mean(cells.accuracy(task, r, {}, seed) for seed in SEEDS) for r in UNTUNED}
        shares[task] = {rule: value / bar for rule, value in found.items()}
        row = [f"{value:.4f} ({point})" for value, point in best.values()]
        row += [f"{value:.4f} ({value / bar:.3f})" for value in found.values()]
        print(f"| {task} |", " | ".join(row), "|", flush=True)
    if given.plot:
        with look.drawing():
            plot(shares, given.plot)


if __name__ == "__main__":
    main()

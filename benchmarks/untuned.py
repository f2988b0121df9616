"""Rules without a rate against the best rate of a grid: final accuracy, mean over seeds 0 to 2.

    FEDOPT_DATA=/path/to/data python benchmarks/untuned.py [--tasks digits-50] [--rules autofed]

The grids of fedavg, scaffold_m and fedadam run on seed 0; the best point of each then on seeds 1
and 2. Cells that are finished stand in untuned.json beside this file and are not run again: remove
those of a rule whose arithmetic changed. Without anything left to run it prints the table.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from fedopt_flwr import RunConfig, simulate

CELLS = Path(__file__).with_suffix(".json")
SEEDS = (0, 1, 2)
RATES = [0.02, 0.05, 0.1, 0.2, 0.4]
GRIDS: dict[str, dict[str, list[float]]] = {
    "fedavg": {"client_learning_rate": RATES},
    "scaffold_m": {"client_learning_rate": RATES},
    "fedadam": {"client_learning_rate": [0.05, 0.1], "server_learning_rate": [0.003, 0.01, 0.03]},
}
UNTUNED = ("padamfed", "padamfed_dog", "autofed", "fedsps", "delta_sgd")
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


TASKS = {
    "digits-50": lambda: digits(50),
    "digits-500": lambda: digits(500),
    "synthetic": synthetic,
    "mnist-mlp": lambda: RunConfig.from_file(EXAMPLES / "mnist.toml"),
    "mnist-cnn": lambda: RunConfig.from_file(EXAMPLES / "mnist_cnn.toml"),
}


class Cells:
    """What was measured, by task, rule with its rates, and seed."""

    def __init__(self) -> None:
        self.known: dict[str, dict[str, float]] = {}
        if CELLS.exists():
            self.known = json.loads(CELLS.read_text(encoding="utf-8"))

    def accuracy(self, task: str, rule: str, rates: dict[str, float], seed: int) -> float:
        """Return the accuracy after the last round, 0 where the run failed or diverged."""
        label = ", ".join([rule, *(f"{name}={value}" for name, value in rates.items())])
        key = f"{task} | {label} | {seed}"
        if key not in self.known:
            self.known[key] = _run(TASKS[task](), rule, rates, seed)
            order = dict(sorted(self.known.items()))
            CELLS.write_text(json.dumps(order, indent=1) + "\n", encoding="utf-8")
            print(key, self.known[key], flush=True)
        return self.known[key]["accuracy"]


def _run(base: RunConfig, rule: str, rates: dict[str, float], seed: int) -> dict[str, float]:
    values: dict[str, Any] = {"federation.seed": seed, "output.evaluate_every": 1_000_000}
    values |= {f"algorithm.{name}": value for name, value in rates.items()}
    started = time.monotonic()
    last = simulate(base.for_rule(rule).with_values(values)).rounds[-1]
    found = 0.0 if last.test_accuracy is None else last.test_accuracy
    return {"accuracy": round(found, 4), "seconds": round(time.monotonic() - started, 1)}


def tuned(cells: Cells, task: str, rule: str) -> tuple[float, str]:
    """Return the mean accuracy of a rule's best point, and that point."""
    grid = GRIDS[rule]
    points = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    best = max(points, key=lambda rates: cells.accuracy(task, rule, rates, SEEDS[0]))
    mean_of_best = mean(cells.accuracy(task, rule, best, seed) for seed in SEEDS)
    return mean_of_best, "/".join(map(str, best.values()))


def main() -> None:
    """Run what is missing and print a row for each rule of each task."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--rules", default=",".join(UNTUNED))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    cells = Cells()
    for task in given.tasks.split(","):
        rows = {
            f"{rule} ({point})": value
            for rule in GRIDS
            for value, point in [tuned(cells, task, rule)]
        }
        bar = max(rows.values())
        rows |= {
            rule: mean(cells.accuracy(task, rule, {}, seed) for seed in SEEDS)
            for rule in given.rules.split(",")
        }
        print(f"\n{task}: mean over seeds {SEEDS}, and the share of the best tuned rule")
        for label, value in rows.items():
            print(f"| `{label}` | {value:.4f} | {value / bar:.3f} |")


if __name__ == "__main__":
    main()

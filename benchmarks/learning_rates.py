"""Final accuracy of every tuned rule on a configuration, over a small grid of learning rates.

    python benchmarks/learning_rates.py examples/mnist.toml [--algorithms fedavg,scaffold]

Prints one line a rule: each point of its grid and the best. Rules that find their rates themselves
have no grid. Only the last round is evaluated.
"""

from __future__ import annotations

import argparse
import warnings
from itertools import product
from pathlib import Path
from typing import Any

from fedopt_flwr import RunConfig
from fedopt_flwr.algorithm import Algorithm
from fedopt_flwr.algorithms import ALGORITHMS
from fedopt_flwr.data import load_federated_data
from fedopt_flwr.run.experiment import Experiment
from fedopt_flwr.run.simulate import run_experiment

SGD = {"client_learning_rate": [0.02, 0.05, 0.1, 0.2, 0.4]}
SERVER_ADAPTIVE = {
    "client_learning_rate": [0.1, 0.2, 0.4],
    "server_learning_rate": [0.003, 0.01, 0.03, 0.1],
}
LOCAL_ADAM = {"client_learning_rate": [0.0003, 0.001, 0.003, 0.01]}
REDUCED = {
    "client_learning_rate": [0.002, 0.005, 0.01],
    "server_learning_rate": [5.0, 10.0, 20.0],
    "momentum": [0.6, 0.8, 0.9],
}
GRIDS: dict[str, dict[str, list[float]]] = {
    **dict.fromkeys(("fedadagrad", "fedadam", "fedyogi"), SERVER_ADAPTIVE),
    **dict.fromkeys(("fedavg_m_vr", "scaffold_m_vr"), REDUCED),
    "fedavg_m": {"client_learning_rate": [0.1, 0.2, 0.4, 0.8, 1.6]},
    "fedams": {"client_learning_rate": [0.1, 0.2], "server_learning_rate": [0.03, 0.1, 0.3, 1.0]},
    "mb_storm": {"client_learning_rate": [0.005, 0.01, 0.02, 0.05]},
    **dict.fromkeys(("local_adam", "fa_nt", "fadamgc"), LOCAL_ADAM),
}


def accuracy(config: RunConfig, data: Any, rule: str, rates: dict[str, float]) -> float:
    """Return the accuracy after the last round; 0 for a run that fails."""
    settings = [f"algorithm.{name}={value}" for name, value in rates.items()]
    own = config.for_rule(rule).updated(settings)
    result = run_experiment(Experiment(own, data=data))
    return result.rounds[-1].test_accuracy or 0.0


def _has_rate(kind: type[Algorithm]) -> bool:
    return kind().model_dump().get("client_learning_rate") is not None


def main() -> None:
    """Print a line a rule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--algorithms", default="")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    config = RunConfig.from_file(arguments.config, ["output.evaluate_every=1000000"])
    data = load_federated_data(config)
    named = [name for name in arguments.algorithms.split(",") if name]
    tuned = [n for n, kind in ALGORITHMS.items() if _has_rate(kind)]
    for rule in named or tuned:
        grid = GRIDS.get(rule, SGD)
        found = []
        for point in product(*grid.values()):
            rates = dict(zip(grid, point, strict=True))
            found.append((accuracy(config, data, rule, rates), point))
        best = max(found)
        points = "  ".join(f"{'/'.join(map(str, p))}: {a:.4f}" for a, p in found)
        print(f"{rule:14} {points}   best {'/'.join(map(str, best[1]))}", flush=True)


if __name__ == "__main__":
    main()

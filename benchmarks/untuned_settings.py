"""What the accuracy of autofed depends on, beside the task: digits, means over seeds 0 to 2.

    python benchmarks/untuned_settings.py

Rows are inputs times 10 and 0.1 (with the fedavg that is best without that beside it), other first
lengths, a run whose end is not known, and the loss times a number. T = 50 and 200.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from statistics import mean
from typing import Any

from torch import Tensor
from torch.nn import functional

from fedopt_flwr import RunConfig, simulate

SEEDS = (0, 1, 2)
HORIZONS = (50, 200)
FEDAVG = {"algorithm.name": "fedavg", "algorithm.client_learning_rate": 0.8}


def times(by: float) -> dict[str, Any]:
    """Return the settings of digits with inputs times that."""
    return {"data.name": "untuned_data:digits", "data.options": {"by": by}}


ROWS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "inputs times 10": times(10.0),
    "inputs times 0.1": times(0.1),
    "`first_share` 0.001 for 0.01": {"algorithm.first_share": 0.001},
    "`first_share` 0.1 for 0.01": {"algorithm.first_share": 0.1},
    "`decays = false` (T unknown)": {"algorithm.decays": False},
    "the loss times 1,024": {"by": 1024.0},
    "the loss times 1,000": {"by": 1000.0},
    "`fedavg`, η = 0.8": FEDAVG,
    "`fedavg`, η = 0.8, inputs times 10": {**FEDAVG, **times(10.0)},
    "`fedavg`, η = 0.8, inputs times 0.1": {**FEDAVG, **times(0.1)},
}


def accuracy(num_rounds: int, seed: int, values: dict[str, Any]) -> float:
    """Return the accuracy after the last round; 0 where the run diverged."""
    config = RunConfig(
        federation={"num_clients": 20, "clients_per_round": 5, "seed": seed},
        training={"local_steps": 10, "batch_size": 32, "device": "cpu"},
        data={"name": "digits", "partition": {"kind": "dirichlet", "concentration": 0.3}},
    ).looking_in(Path(__file__).parent)
    by = values.get("by", 1.0)
    rounds = {"federation.num_rounds": num_rounds, "output.evaluate_every": num_rounds}
    settings = {name: value for name, value in values.items() if name != "by"}

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return by * functional.cross_entropy(outputs, targets)

    last = simulate(config.with_values({**rounds, **settings}), loss=loss).rounds[-1]
    return last.test_accuracy or 0.0


def main() -> None:
    """Print a row for each setting."""
    warnings.simplefilter("ignore")
    print("|", *(f"| T = {rounds} " for rounds in HORIZONS), "|")
    print("|---" * (1 + len(HORIZONS)), "|", sep="")
    for name, values in ROWS.items():
        found = [mean(accuracy(t, seed, values) for seed in SEEDS) for t in HORIZONS]
        print(f"| {name} |", " | ".join(f"{value:.4f}" for value in found), "|", flush=True)


if __name__ == "__main__":
    main()

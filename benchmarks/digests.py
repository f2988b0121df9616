"""Print the SHA-256 of the model that each rule ends with on digits.

    python benchmarks/digests.py > before.txt

Two versions that print the same compute the same, bit for bit, on one kind of CPU. A change that is
not meant to touch any rule's arithmetic must leave every line as it was.
"""

from __future__ import annotations

import hashlib
import tempfile
import warnings
from pathlib import Path

from fedopt_flwr import simulate
from fedopt_flwr.algorithms import ALGORITHMS
from fedopt_flwr.errors import FedoptWarning

ROUNDS = 12


def digest(rule: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "run")
        simulate(
            {
                "algorithm": {"name": rule},
                "federation": {"num_rounds": ROUNDS},
                "training": {"device": "cpu"},
                "output": {"directory": directory},
            }
        )
        return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()


if __name__ == "__main__":
    warnings.simplefilter("ignore", FedoptWarning)
    for rule in sorted(ALGORITHMS):
        print(rule, digest(rule), flush=True)

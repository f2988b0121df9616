"""How far PAdaMFed-VR's server momentum g lies from the gradient of f, for growing T.

    python benchmarks/gradient_error.py

Eight unlike noisy quadratics in ten dimensions (curvature and slope of each minibatch vary), S = 4,
K = 4, the theorem's step sizes. Prints E‖∇f(x) − g‖ over the second half of the rounds for both
momentum rules and T = 500, 2000, 8000, each the mean over seeds 0 to 2, and the slope of its
logarithm over that of T; the theorem's rate is −1/3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedopt_flwr.algorithms import PAdaMFedVR
from fedopt_flwr.conformance.harness import Federation, Toy

CLIENTS, SAMPLED, STEPS, SIZE = 8, 4, 4, 10
HORIZONS = (500, 2000, 8000)
SEEDS = (0, 1, 2)


class NoisyQuadratic(Toy):
    """Minibatches are drawn anew in every round; each is the same wherever it is evaluated."""

    def __init__(self, client: int, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed * CLIENTS + client)
        centre = torch.randn(SIZE, generator=self._generator)
        self.curvature = 0.5 + client / CLIENTS
        super().__init__(centre.tolist(), [(self.curvature, torch.zeros(SIZE))] * STEPS)

    def batches(self) -> Iterator[Any]:
        for _ in range(STEPS):
            noise = torch.randn(SIZE + 1, generator=self._generator)
            yield self.curvature * (1 + 0.2 * float(noise[0])), noise[1:]

    def gradient(self, y: Tensor, batch: Any) -> Tensor:
        curvature, slope = batch
        gradient: Tensor = curvature * (y - torch.tensor(self.centre)) + slope
        return gradient

    def exact_gradient(self, y: Tensor) -> Tensor:
        return self.curvature * (y - torch.tensor(self.centre))


def error(momentum_rule: str, num_rounds: int, seed: int) -> float:
    """Return the mean of ‖∇f(x) − g‖ over the second half of the rounds."""
    torch.set_num_threads(1)
    toys = [NoisyQuadratic(i, seed) for i in range(CLIENTS)]
    rule = PAdaMFedVR(momentum_rule=momentum_rule)
    federation = Federation(rule, toys, [0.0] * SIZE, sampled=SAMPLED, num_rounds=num_rounds)
    rng = np.random.default_rng(seed)
    distances = []
    for number in range(num_rounds):
        federation.round(sorted(rng.choice(CLIENTS, SAMPLED, replace=False).tolist()))
        if 2 * number >= num_rounds:
            x, g = federation.x, federation.server["server_momentum"]
            exact = torch.stack([toy.exact_gradient(x) for toy in toys]).mean(dim=0)
            distances.append(float((exact - g).norm()))
    return float(np.mean(distances))


def slope(errors: Sequence[float]) -> float:
    """Return the slope of log error over log T."""
    return float(np.polyfit(np.log(HORIZONS), np.log(errors), 1)[0])


def main() -> None:
    """Print a line for each momentum rule."""
    for momentum_rule in ("proved", "printed"):
        by_seed = [[error(momentum_rule, t, seed) for t in HORIZONS] for seed in SEEDS]
        errors = np.mean(by_seed, axis=0).tolist()
        shown = "  ".join(f"T = {t}: {e:.4f}" for t, e in zip(HORIZONS, errors, strict=True))
        of_each = ", ".join(f"{slope(found):.3f}" for found in by_seed)
        print(f"{momentum_rule:8} {shown}   slope {slope(errors):.3f} ({of_each})", flush=True)


if __name__ == "__main__":
    main()

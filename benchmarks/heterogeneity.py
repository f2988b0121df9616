"""Distance to the minimiser on two unlike quadratics: which rules end there, and which beside it.

    python benchmarks/heterogeneity.py docs/heterogeneity.png

F₁ = ½‖y − (−1, 1)‖² and F₂ = 2‖y − (2, 0)‖²; everyone takes part, full batches, K = 10. η = 0.05,
η_g = 1, β = 0.2; the local Adam family at 0.005; PAdaMFed's steps are its theorem's. Prints the
distances after the last round and draws all of them.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure

from fedopt_flwr.algorithms import ALGORITHMS
from fedopt_flwr.conformance.harness import Federation, build_rule, quadratic

ROUNDS, MINIMISER = 400, torch.tensor([1.4, 0.2])
NAMES = (
    *("fedavg", "fedprox", "fedavg_m", "fedavg_m_vr", "local_adam", "fa_nt", "fadamgc"),
    *("scaffold", "scaffold_m", "scaffold_m_vr", "padamfed", "padamfed_vr", "padamfed_dog"),
)


def distances(name: str) -> list[float]:
    """Return ‖x − x*‖ after every round."""
    kind = ALGORITHMS[name]
    rates = {} if name.startswith("padamfed") else {"client_learning_rate": 0.05}
    if name.endswith("_m_vr"):
        rates |= {"server_learning_rate": 1.0, "momentum": 0.2}  # the others' numbers
    if "adaptivity" in kind.model_fields:
        rates = {"client_learning_rate": 0.005}
    toys = [quadratic([-1.0, 1.0], 1.0, 10), quadratic([2.0, 0.0], 4.0, 10)]
    federation = Federation(build_rule(kind, **rates), toys, [1.0, 2.0], num_rounds=ROUNDS)
    return [float((federation.run(1) - MINIMISER).norm()) for _ in range(ROUNDS)]


def main() -> None:
    """Print a line a rule and draw them all."""
    warnings.simplefilter("ignore")
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(NAMES):
        found = distances(name)
        has_control_variates = "control_variate" in ALGORITHMS[name].client_state
        style = "-" if has_control_variates else "--"
        axes.semilogy(found, style, label=name, color=colormaps["tab20"](number))
        print(f"{name:14} {found[-1]:.2e}")
    axes.set(xlabel="round", ylabel="distance to the minimiser of the mean loss")
    axes.set_title("Two unlike clients; solid: with control variates")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right center")
    figure.savefig(Path(sys.argv[1]), dpi=110)


if __name__ == "__main__":
    main()

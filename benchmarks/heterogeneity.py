"""Distance to the minimiser on two unlike quadratics: which rules end there, and which beside it.

    python benchmarks/heterogeneity.py docs/heterogeneity.png

F₁ = ½‖y − (−1, 1)‖² and F₂ = 2‖y − (2, 0)‖²; everyone takes part, full batches, K = 10. η = 0.05,
η_g = 1, β = 0.2; the local Adam family at 0.005; PAdaMFed's steps are its theorem's. Prints the
distances after the last round and draws all of them, the best in colour.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from matplotlib.figure import Figure

from fedopt_flwr.algorithms import ALGORITHMS
from fedopt_flwr.conformance.harness import Federation, build_rule, quadratic
from fedopt_flwr.run.plots import look
from fedopt_flwr.run.plots.axes import End, label_ends, label_inches, set_log_scale

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


def draw(found: dict[str, list[float]], path: Path) -> None:
    """Draw the distances, the best first; who is not among the first eight is grey."""
    ranked = sorted(found, key=lambda name: found[name][-1])
    labels = [f"{rank} {name}  {found[name][-1]:.1e}" for rank, name in enumerate(ranked, 1)]
    colours = [*look.COLOURS, *[look.GREY] * len(ranked)]
    height = 4.0
    figure = Figure(figsize=(look.WIDTH, height + 1.2))
    look.write_heading(
        figure,
        "Distance to the minimiser of the mean loss, two unlike clients",
        f"Best first, the first {len(look.COLOURS)} of {len(ranked)} in colour; solid: with control"
        " variates, dashed: without.",
    )
    axes = look.place_axes(figure, 0.75, 0.65, look.WIDTH - 0.8 - label_inches(labels), height)
    ends = []
    for name, label, colour in zip(ranked, labels, colours, strict=False):
        has_control_variates = "control_variate" in ALGORITHMS[name].client_state
        style = "-" if has_control_variates else "--"
        axes.plot(range(1, ROUNDS + 1), found[name], style, color=colour)
        ends.append(End(ROUNDS, found[name][-1], label, colour))
    every = [value for values in found.values() for value in values]
    set_log_scale(axes, min(every), max(every))
    axes.margins(x=0)
    axes.set(xlabel="round", ylabel="‖x − x*‖")
    label_ends(axes, ends, height)
    look.save(figure, path)


def main() -> None:
    """Print a line a rule and draw them all."""
    warnings.simplefilter("ignore")
    found = {name: distances(name) for name in NAMES}
    for name, values in found.items():
        print(f"{name:14} {values[-1]:.2e}")
    with look.drawing():
        draw(found, Path(sys.argv[1]))


if __name__ == "__main__":
    main()

"""Reductions of one rule to another, and first steps that are known in closed form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .harness import Federation, Toy, configured, linear, quadratic
from .properties import RATES, X, near, unlike
from .suite import Check, Kind, require

# rule -> hyperparameters under which it is the other rule with the second ones
REDUCTIONS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "fedprox": ({"proximal_strength": 0.0}, "fedavg", {}),
    "fedavgm": ({"momentum": 0.0}, "fedavg", {}),
    "fedavg_m": ({"momentum": 1.0}, "fedavg", {}),
    "fedavg_m_vr": ({"momentum": 1.0}, "fedavg", {}),
    "scaffold_m": ({"momentum": 1.0}, "scaffold", {}),
    "scaffold_m_vr": ({"momentum": 1.0}, "scaffold", {}),
    "padamfed": (
        {"normalize": False, "momentum": 0.4, "control_variate_start": "zero"},
        "scaffold_m",
        {"momentum": 0.4, "control_variate_start": "zero"},
    ),
    "padamfed_vr": (
        {"normalize": False, "momentum": 0.4, "momentum_rule": "proved"},
        "scaffold_m_vr",
        {"momentum": 0.4},
    ),
    "fedmos": ({"local_momentum": 1.0, "momentum": 0.0, "proximal_strength": 0.0}, "fedavg", {}),
}
# rules that one full-batch step of everyone turns into gradient descent
DESCENTS: dict[str, dict[str, Any]] = {
    **{key: {} for key in ("fedavg", "fedprox", "scaffold", "fedavg_m_vr", "scaffold_m_vr")},
    "mb_storm": {},
    "padamfed_vr": {"normalize": False, "momentum_rule": "proved"},
}
# x − x⁰ after a first round with mean movement D, β₁ = 0.5, β₂ = 0.5, τ = 0.1, η_g = 1
FIRST_STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "fedadagrad": lambda d: 0.5 * d / ((0.01 + d**2).sqrt() + 0.1),
    "fedadam": lambda d: 0.5 * d / ((0.005 + 0.5 * d**2).sqrt() + 0.1),
    "fedyogi": lambda d: 0.5 * d / ((0.01 - 0.5 * d**2 * (0.01 - d**2).sign()).sqrt() + 0.1),
    "fedams": lambda d: 0.5 * d / (0.5 * d**2).clamp(min=0.1).sqrt(),
}


def check_reduction(kind: Kind) -> None:
    from ..algorithms import ALGORITHMS

    ours, name, theirs = REDUCTIONS[kind.name]
    one = unlike(configured(kind, **{**RATES, **ours}), 2)
    other = unlike(configured(ALGORITHMS[name], **{**RATES, **theirs}), 2)
    pairs: list[list[int]] = [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    if not kind.unbiased_weights:
        pairs += [[1, 3], [0, 2]]
    found, expected = (f.run(len(pairs), lambda n: pairs[n]) for f in (one, other))
    require(near(found, expected), f"with {ours} not {name}: {found.tolist()}, {expected.tolist()}")


def check_gradient_descent(kind: Kind) -> None:
    toys = [quadratic([c, -c], 0.5 + c, 1) for c in (0.0, 1.0, 2.0)]
    federation = Federation(configured(kind, **RATES, **DESCENTS[kind.name]), toys, X)
    x = torch.tensor(X)
    for number in range(1, 4):
        x = x - 0.1 * torch.stack([toy.full_gradient(x) for toy in toys]).mean(dim=0)
        federation.run(1)
        found = federation.x
        require(near(found, x), f"round {number}: {found.tolist()}, gradient descent {x.tolist()}")


def check_first_step(kind: Kind) -> None:
    decays = {"first_decay": 0.5, "second_decay": 0.5, "adaptivity": 0.1}
    rule = configured(kind, client_learning_rate=0.1, server_learning_rate=1.0, **decays)
    federation = Federation(rule, [linear([1.0, -4.0], 2)] * 2, X)
    step = federation.run(1) - torch.tensor(X)
    expected = FIRST_STEPS[kind.name](torch.tensor([-0.2, 0.8]))
    require(near(step, expected), f"first step {step.tolist()}, not {expected.tolist()}")


def check_pull(kind: Kind) -> None:
    """Three steps on a linear loss: −ηa Σ r^k, r = 1 − ημ (1 − μ where μ is not multiplied)."""
    mu, eta = 0.4, 0.1
    rule = configured(kind, **RATES, proximal_strength=mu, momentum=0.0, local_momentum=1.0)
    federation = Federation(rule, [linear([1.0, -20.0])], X)
    step = federation.run(1) - torch.tensor(X)
    slope = torch.tensor([1.0, -20.0])
    allowed = [-eta * slope * (1 + r + r * r) for r in (1 - eta * mu, 1 - mu)]
    require(
        any(near(step, expected) for expected in allowed),
        f"moves by {step.tolist()}; a pull μ(y − x) gives {allowed[0].tolist()}",
    )


def check_unequal_steps(kind: Kind) -> None:
    """Slopes (1, 0) with K = 1 and (0, 1) with K = 3: PAdaMFed weighs both alike, others by K."""
    toys: list[Toy] = [linear([1.0, 0.0], 1), linear([0.0, 1.0], 3)]
    rule = configured(kind, **RATES, proximal_strength=0.0, control_variate_start="zero")
    step = Federation(rule, toys, X).run(1) - torch.tensor(X)
    by_steps = "normalize" not in kind.model_fields
    expected = torch.tensor([-0.05, -0.15] if by_steps else [-0.1, -0.1])
    require(near(step, expected), f"moves by {step.tolist()}, not {expected.tolist()}")


def check_printed_momentum(kind: Kind) -> None:
    """g ← β(Σ w_i(c_i⁺ − c_i) + c) + (1−β)g with the c and g of before the round."""
    federation = unlike(configured(kind, **RATES, momentum=0.3), 2)
    for asked in ([0, 3], [1, 2], [2, 3]):
        c, g = federation.server["control_variate"], federation.server["server_momentum"]
        federation.round(asked)
        change = sum(r.weight * r.upload["control_variate_change"] for r in federation.replies)
        expected = 0.3 * (change + c) + 0.7 * g
        found = federation.server["server_momentum"]
        require(near(found, expected, 1e-5), f"g is {found.tolist()}, not {expected.tolist()}")


CLOSED_FORMS = (
    Check("reduces to a simpler rule", lambda kind: kind.name in REDUCTIONS, check_reduction),
    Check(
        "one full-batch step of everyone is gradient descent",
        lambda kind: kind.name in DESCENTS,
        check_gradient_descent,
    ),
    Check("the first server step", lambda kind: kind.name in FIRST_STEPS, check_first_step),
    Check(
        "the pull to the server's model is μ(y − x)",
        lambda kind: "proximal_strength" in kind.model_fields,
        check_pull,
    ),
    Check(
        "unequal local steps have their right weights",
        lambda kind: kind.name in ("fedavg", "fedprox", "scaffold", "padamfed", "padamfed_vr"),
        check_unequal_steps,
    ),
    Check(
        "the printed momentum takes the old c",
        lambda kind: kind.name in ("padamfed", "padamfed_dog", "padamfed_vr"),
        check_printed_momentum,
    ),
)

"""Reductions of one rule to another, and what is known in closed form."""

from __future__ import annotations

from typing import Any

import torch

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


def reduction(kind: Kind) -> Any:
    """Return what a rule of this package, or by its own word a user's, reduces to, or None."""
    return REDUCTIONS.get(kind.name, kind.reduces_to)


def check_reduction(kind: Kind) -> None:
    from ..algorithms import ALGORITHMS

    ours, name, theirs = reduction(kind)
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


def check_pull(kind: Kind) -> None:
    """Three steps on a linear loss: −ηa Σ r^k, r = 1 − ημ, or 1 − μ in FedMoS; either elsewhere."""
    mu, eta = 0.4, 0.1
    rule = configured(kind, **RATES, proximal_strength=mu, momentum=0.0, local_momentum=1.0)
    federation = Federation(rule, [linear([1.0, -20.0])], X)
    step = federation.run(1) - torch.tensor(X)
    slope = torch.tensor([1.0, -20.0])
    ratios = {"fedprox": [1 - eta * mu], "fedmos": [1 - mu]}.get(kind.name, [1 - eta * mu, 1 - mu])
    allowed = [-eta * slope * (1 + r + r * r) for r in ratios]
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
    Check("reduces to a simpler rule", lambda kind: bool(reduction(kind)), check_reduction),
    Check(
        "one full-batch step of everyone is gradient descent",
        lambda kind: kind.name in DESCENTS,
        check_gradient_descent,
    ),
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

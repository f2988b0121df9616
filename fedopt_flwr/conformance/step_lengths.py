"""How far a round moves the model: step sizes, their theorems, and closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .checks import Check, Kind, has_field, is_named, require
from .harness import (
    RATES,
    START,
    Federation,
    Toy,
    build_rule,
    is_close,
    linear,
    quadratic,
    unlike_clients,
)

# rules that one full-batch step of everyone turns into gradient descent
DESCENTS: dict[str, dict[str, Any]] = {
    **{key: {} for key in ("fedavg", "fedprox", "scaffold", "fedavg_m_vr", "scaffold_m_vr")},
    "mb_storm": {},
    "padamfed_vr": {"normalize": False, "momentum_rule": "proved"},
}
# −η·slope times this is the movement of a second round of K = 3 steps on a linear loss; with
# β = 0.2, g = βa after one round, so that a step has the length β + (1−β)β
LINEAR_STEPS = {
    **dict.fromkeys(("fedavg", "fedprox", "fedavgm", "scaffold", "fedmos", "mb_storm"), 3.0),
    **dict.fromkeys(("fedavg_m_vr", "scaffold_m_vr"), 3.0),
    **dict.fromkeys(("fedavg_m", "scaffold_m"), 3 * 0.36),
    "stem": 4.0,
}
# ηK, γ and β of the theorems from SK and T
THEOREMS: dict[str, Callable[[float, float], tuple[float, float, float]]] = {
    "padamfed": lambda sk, t: (t**-0.5, sk**0.25 / t**0.75, (sk / t) ** 0.5),
    "padamfed_vr": lambda sk, t: (1 / t, (sk / t**2) ** (1 / 3), (sk / t**2) ** (1 / 3)),
}


def check_bounded_steps(kind: Kind) -> None:
    federation = unlike_clients(build_rule(kind, **RATES))
    for _ in range(3):
        federation.round([0, 1, 2, 3])
        eta = federation.now.client_learning_rate  # type: ignore[attr-defined]
        for reply in federation.replies:
            length = float(reply.upload["delta"].norm())
            bound = eta * reply.num_steps
            require(length <= bound * (1 + 1e-4), f"‖Δ‖ is {length:.4g}, above ηK = {bound:.4g}")


def check_scale_invariance(kind: Kind) -> None:
    ends = []
    for scale in (1.0, 1000.0):
        toys = [quadratic([c, -c], 1.0 + c, 3, scale) for c in (0.0, 1.0, 2.0)]
        federation = Federation(build_rule(kind), toys, START, sampled=2)
        ends.append(federation.run(5, lambda n: [n % 3, 2 - n % 2]))
    require(
        is_close(ends[0], ends[1]),
        f"the loss times 1000 leads to {ends[1].tolist()}, not {ends[0].tolist()}",
    )


def check_server_rate(kind: Kind) -> None:
    moved = []
    for rate in (0.5, 1.0):
        rates = {"client_learning_rate": 0.1, "server_learning_rate": rate}
        federation = Federation(build_rule(kind, **rates), [linear([1.0, 2.0])] * 2, START)
        before = federation.x
        moved.append(federation.run(1) - before)
    require(is_close(2 * moved[0], moved[1], 1e-4), f"twice η_g moves {moved[1]} where {moved[0]}")


def check_client_rate(kind: Kind) -> None:
    moved = []
    for rate in (0.1, 0.2):
        rates = {"client_learning_rate": rate, "server_learning_rate": 1.0}
        federation = Federation(build_rule(kind, **rates), [linear([1.0, 2.0])] * 2, START)
        before = federation.x
        moved.append(federation.run(1) - before)
    require(not is_close(moved[0], moved[1]), f"η = 0.1 and 0.2 both move by {moved[0].tolist()}")


def check_gradient_descent(kind: Kind) -> None:
    toys = [quadratic([c, -c], 0.5 + c, 1) for c in (0.0, 1.0, 2.0)]
    federation = Federation(build_rule(kind, **RATES, **DESCENTS[kind.name]), toys, START)
    x = torch.tensor(START)
    for number in range(1, 4):
        x = x - 0.1 * torch.stack([toy.full_gradient(x) for toy in toys]).mean(dim=0)
        federation.run(1)
        found = federation.x
        require(
            is_close(found, x), f"round {number}: {found.tolist()}, gradient descent {x.tolist()}"
        )


def check_pull(kind: Kind) -> None:
    """Three steps on a linear loss: −ηa Σ r^k, r = 1 − ημ, or 1 − μ in FedMoS; either elsewhere."""
    mu = 0.4
    eta = RATES["client_learning_rate"]
    rule = build_rule(kind, **RATES, proximal_strength=mu, momentum=0.0, local_momentum=1.0)
    federation = Federation(rule, [linear([1.0, -20.0])], START)
    step = federation.run(1) - torch.tensor(START)
    slope = torch.tensor([1.0, -20.0])
    ratios = {"fedprox": [1 - eta * mu], "fedmos": [1 - mu]}.get(kind.name, [1 - eta * mu, 1 - mu])
    allowed = [-eta * slope * (1 + r + r * r) for r in ratios]
    require(
        any(is_close(step, expected) for expected in allowed),
        f"moves by {step.tolist()}; a pull μ(y − x) gives {allowed[0].tolist()}",
    )


def check_unequal_steps(kind: Kind) -> None:
    """Slopes (1, 0) with K = 1 and (0, 1) with K = 3: PAdaMFed weighs both alike, others by K."""
    toys: list[Toy] = [linear([1.0, 0.0], 1), linear([0.0, 1.0], 3)]
    rule = build_rule(kind, **RATES, proximal_strength=0.0, control_variate_start="zero")
    step = Federation(rule, toys, START).run(1) - torch.tensor(START)
    by_steps = "normalize" not in kind.model_fields
    expected = torch.tensor([-0.05, -0.15] if by_steps else [-0.1, -0.1])
    require(is_close(step, expected), f"moves by {step.tolist()}, not {expected.tolist()}")


def check_linear_steps(kind: Kind) -> None:
    momentum = 0.0 if kind.name in ("fedavgm", "fedmos") else 0.2
    rule = build_rule(kind, **RATES, momentum=momentum, proximal_strength=0.0)
    federation = Federation(rule, [linear([1.0, 2.0], 3)] * 2, START)
    before = federation.run(1)
    step = federation.run(1) - before
    expected = torch.tensor([1.0, 2.0]) * (-0.1 * LINEAR_STEPS[kind.name])
    require(is_close(step, expected), f"round 2 moves by {step.tolist()}, not {expected.tolist()}")


def check_theorem(kind: Kind) -> None:
    rule = unlike_clients(kind(), 2).rule  # S = 2, K = 3, T = 400
    path, gamma, beta = THEOREMS[kind.name](6, 400)
    expected = {
        "client_learning_rate": path / 3,
        "server_learning_rate": gamma / path,
        "momentum": beta,
    }
    for name, value in expected.items():
        found = getattr(rule, name)
        require(math.isclose(found, value, rel_tol=1e-6), f"{name} is {found:.6g}, not {value:.6g}")


def check_distance_over_gradients(kind: Kind) -> None:
    federation = Federation(kind(), [linear([1.0, 2.0]), linear([0.0, 3.0])], START, num_rounds=10)
    start = torch.tensor(START)
    squares = 0.0
    distance = 0.01 * (1 + float(start.norm()))
    for t in range(5):
        before = federation.x
        distance = max(distance, float((before - start).norm()))
        expected = distance / math.sqrt(squares) * (1 - t / 10) if t else distance
        federation.run(1)
        eta = federation.now.client_learning_rate  # type: ignore[attr-defined]
        found = eta * 3 * math.sqrt(federation.now.momentum)  # type: ignore[attr-defined]
        require(math.isclose(found, expected, rel_tol=1e-4), f"γ_{t} is {found}, not {expected}")
        squares += float(((federation.x - before) / found).square().sum())


STEP_LENGTHS = (
    Check("η changes the movement", has_field("client_learning_rate"), check_client_rate),
    Check("η_g multiplies the movement", has_field("server_learning_rate"), check_server_rate),
    Check("local steps have length η at most", has_field("normalize"), check_bounded_steps),
    Check("the scale of the loss is not seen", has_field("normalize"), check_scale_invariance),
    Check("the pull to the server's model is μ(y − x)", has_field("proximal_strength"), check_pull),
    Check(
        "one full-batch step of everyone is gradient descent",
        is_named(*DESCENTS),
        check_gradient_descent,
    ),
    Check(
        "unequal local steps have their right weights",
        is_named("fedavg", "fedprox", "scaffold", "padamfed", "padamfed_vr"),
        check_unequal_steps,
    ),
    Check(
        "a linear loss moves the model by its steps", is_named(*LINEAR_STEPS), check_linear_steps
    ),
    Check("step sizes are the theorem's", is_named(*THEOREMS), check_theorem),
    Check(
        "steps are distance over gradients", is_named("padamfed_dog"), check_distance_over_gradients
    ),
)

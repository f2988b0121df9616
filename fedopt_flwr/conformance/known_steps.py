"""Steps of rules with moments, and step sizes of theorems, beside the formulas written out anew."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .harness import Federation, configured, linear, quadratic
from .properties import RATES, X, field, keeps_control_variates, near, unlike
from .suite import Check, Kind, require

_ETA, _DECAY, _FLOOR = 0.1, 0.5, 0.1  # η, β₁ = β₂ and τ or ε of these checks
_SLOPES = ([1.0, -4.0], [0.25, -1.0])  # of the first and of the second round


@dataclass(frozen=True)
class ServerMoment:
    """v of a server-adaptive rule: where it starts, how D = Δ̄ changes it, what divides m."""

    start: float
    after: Callable[[Tensor, Tensor], Tensor]
    divisor: Callable[[Tensor, Tensor], Tensor] = lambda v, largest: v.sqrt() + _FLOOR


SERVER_MOMENTS = {
    "fedadagrad": ServerMoment(0.01, lambda v, d: v + d**2),
    "fedadam": ServerMoment(0.01, lambda v, d: 0.5 * v + 0.5 * d**2),
    "fedyogi": ServerMoment(0.01, lambda v, d: v - 0.5 * d**2 * (v - d**2).sign()),
    "fedams": ServerMoment(
        0.0,
        lambda v, d: 0.5 * v + 0.5 * d**2,
        lambda v, largest: largest.clamp(min=_FLOOR).sqrt(),
    ),
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


def check_server_moments(kind: Kind) -> None:
    decays = {"first_decay": _DECAY, "second_decay": _DECAY, "adaptivity": _FLOOR}
    rule = configured(kind, client_learning_rate=_ETA, server_learning_rate=1.0, **decays)
    federation, moment = Federation(rule, [linear(_SLOPES[0], 2)] * 2, X), SERVER_MOMENTS[kind.name]
    x, m = torch.tensor(X), torch.zeros(2)
    v = largest = torch.full((2,), moment.start)
    for number, slope in enumerate(_SLOPES, 1):
        federation.toys = [linear(slope, 2)] * 2
        d = torch.tensor(slope) * (-_ETA * 2)
        m, v = _DECAY * m + (1 - _DECAY) * d, moment.after(v, d)
        largest = largest.maximum(v)
        x = x + m / moment.divisor(v, largest)
        found = federation.run(1)
        require(near(found, x), f"round {number} ends at {found.tolist()}, not {x.tolist()}")


def check_local_moments(kind: Kind) -> None:
    slopes, steps = torch.tensor([[1.0, 2.0], [3.0, -1.0]]), 2
    decays = {"first_decay": _DECAY, "second_decay": _DECAY, "adaptivity": _FLOOR}
    federation = Federation(
        configured(kind, **RATES, **decays), [linear(s.tolist(), steps) for s in slopes], X
    )
    x, v = torch.tensor(X), torch.zeros(2, 2)  # rows are clients
    c_i = slopes.clone() if federation.rule.start_names else torch.zeros(2, 2)
    tracks, after = keeps_control_variates(kind), kind.name == "fa_nt"  # corrects m/√v̂
    for number in range(1, 4):
        drift = c_i.mean(dim=0) - c_i if tracks else torch.zeros(2, 2)
        gradient = slopes if after else slopes + drift
        m, largest, total = torch.zeros(2, 2), v, torch.zeros(2, 2)
        for _ in range(steps):
            m, v = _DECAY * (m + gradient), _DECAY * (v + gradient**2)
            largest = largest.maximum(v)
            total = total + m / (largest.sqrt() + _FLOOR)
        deltas = -_ETA * (total + steps * drift if after else total)
        x, c_i = x + deltas.mean(dim=0), total / steps if after else c_i
        end = federation.run(1)
        found = torch.stack([reply.upload["delta"] for reply in federation.replies])
        require(near(found, deltas), f"round {number}: Δ {found.tolist()}, not {deltas.tolist()}")
        require(near(end, x), f"round {number} ends at {end.tolist()}, not {x.tolist()}")


def check_tracking(kind: Kind) -> None:
    rule = configured(kind, **RATES, tracked_clients=1, control_variate_start="zero")
    federation = Federation(rule, [linear([1.0, 2.0])] * 2, X)
    federation.run(1)
    moved = [bool(state["control_variate"].any()) for state in federation.states]
    require(moved == [True, False], f"with 1 of 2 tracked, c_i changed: {moved}")


def check_linear_steps(kind: Kind) -> None:
    momentum = 0.0 if kind.name in ("fedavgm", "fedmos") else 0.2
    rule = configured(kind, **RATES, momentum=momentum, proximal_strength=0.0)
    federation = Federation(rule, [linear([1.0, 2.0], 3)] * 2, X)
    before = federation.run(1)
    step = federation.run(1) - before
    expected = torch.tensor([1.0, 2.0]) * (-_ETA * LINEAR_STEPS[kind.name])
    require(near(step, expected), f"round 2 moves by {step.tolist()}, not {expected.tolist()}")


def check_theorem(kind: Kind) -> None:
    rule = unlike(kind(), 2).rule  # S = 2, K = 3, T = 400
    path, gamma, beta = THEOREMS[kind.name](6, 400)
    expected = {
        "client_learning_rate": path / 3,
        "server_learning_rate": gamma / path,
        "momentum": beta,
    }
    for name, value in expected.items():
        found = getattr(rule, name)
        require(math.isclose(found, value, rel_tol=1e-6), f"{name} is {found:.6g}, not {value:.6g}")


def check_momentum_start(kind: Kind) -> None:
    server = unlike(kind(), 2).server
    g, c = server["server_momentum"], server["control_variate"]
    require(near(g, c), f"g⁰ is {g.tolist()}, c⁰ {c.tolist()}")


def check_distance_over_gradients(kind: Kind) -> None:
    federation = Federation(kind(), [linear([1.0, 2.0]), linear([0.0, 3.0])], X, num_rounds=10)
    start, squares = torch.tensor(X), 0.0
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


def check_two_sided_momentum(kind: Kind) -> None:
    """One client with ½‖y‖²: u ← y + (1−a)(u − y_prev), K times, then the server's own step."""
    federation = Federation(configured(kind, **RATES, local_momentum=0.3), [quadratic([0, 0])], X)
    x = torch.tensor(X)
    u = x.clone()
    for number in range(1, 3):
        y, y_prev = x, x + _ETA * u
        for _ in range(3):
            u = y + 0.7 * (u - y_prev)
            y, y_prev = y - _ETA * u, y
        x, found = y - _ETA * u, federation.run(1)
        require(near(found, x), f"round {number} ends at {found.tolist()}, not {x.tolist()}")


def _named(*names: str) -> Callable[[Kind], bool]:
    return lambda kind: kind.name in names


KNOWN_STEPS = (
    Check("two steps of the server's moments", _named(*SERVER_MOMENTS), check_server_moments),
    Check(
        "three rounds of the clients' moments",
        _named("local_adam", "fa_nt", "fadamgc"),
        check_local_moments,
    ),
    Check("only tracked clients renew c_i", partial(field, "tracked_clients"), check_tracking),
    Check("a linear loss moves the model by its steps", _named(*LINEAR_STEPS), check_linear_steps),
    Check("momentum on both sides", _named("stem"), check_two_sided_momentum),
    Check("step sizes are the theorem's", _named(*THEOREMS), check_theorem),
    Check(
        "momentum starts at c",
        _named("padamfed", "padamfed_vr", "padamfed_dog"),
        check_momentum_start,
    ),
    Check(
        "steps are distance over gradients", _named("padamfed_dog"), check_distance_over_gradients
    ),
)

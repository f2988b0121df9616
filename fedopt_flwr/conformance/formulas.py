"""Formulas of papers, written out anew beside the rules that they are for."""

from __future__ import annotations

import math

import torch

from ..algorithms import ALGORITHMS
from .checks import Kind, check, is_named, require
from .harness import (
    RATES,
    START,
    Federation,
    build_rule,
    linear,
    movement,
    quadratic,
    require_close,
    unlike_clients,
)

# −η·slope times this is the movement of a second round of K = 3 steps on a linear loss; with
# β = 0.2, g = βa after one round, so that a step has the length β + (1−β)β
LINEAR_STEPS = {
    **dict.fromkeys(
        ("fedavg", "fedprox", "fedavgm", "scaffold", "fedmos", "mb_storm", "stem"), 3.0
    ),
    **dict.fromkeys(("fedavg_m_vr", "scaffold_m_vr", "fednova", "fedexp"), 3.0),
    **dict.fromkeys(("fedavg_m", "scaffold_m", "mimelite"), 3 * 0.36),
}
_DECAY = 0.5  # β₁ and β₂
_FLOOR = 0.1  # τ or ε
_MOMENTS = {**RATES, "first_decay": _DECAY, "second_decay": _DECAY, "adaptivity": _FLOOR}
is_padamfed = is_named("padamfed", "padamfed_vr", "padamfed_dog")
# how D = Δ̄ changes v of a server-adaptive rule
SERVER_MOMENTS = {
    "fedadagrad": lambda v, d: v + d**2,
    "fedadam": lambda v, d: 0.5 * v + 0.5 * d**2,
    "fedyogi": lambda v, d: v - 0.5 * d**2 * (v - d**2).sign(),
    "fedams": lambda v, d: 0.5 * v + 0.5 * d**2,
}


@check(
    "one full-batch step of everyone is gradient descent",
    is_named(
        *("fedavg", "fedprox", "fednova", "scaffold", "fedavg_m_vr", "scaffold_m_vr", "mb_storm"),
        "padamfed_vr",
    ),
)
def check_gradient_descent(kind: Kind) -> None:
    toys = [quadratic([c, -c], 0.5 + c, 1) for c in (0.0, 1.0, 2.0)]
    rule = build_rule(kind, **RATES, normalize=False, momentum_rule="proved")
    federation = Federation(rule, toys)
    x = torch.tensor(START)
    for number in range(1, 4):
        x = x - 0.1 * torch.stack([toy.full_gradient(x) for toy in toys]).mean(dim=0)
        require_close(federation.run(1), x, f"round {number} ends at")


@check(
    "unequal local steps have their right weights",
    is_named("fedavg", "fedprox", "fednova", "scaffold", "padamfed", "padamfed_vr"),
)
def check_unequal_steps(kind: Kind) -> None:
    """Slopes (1, 0) with K = 1 and (0, 1) with K = 3: alike, or by K."""
    toys = [linear([1.0, 0.0], 1), linear([0.0, 1.0], 3)]
    step = movement(kind, toys, proximal_strength=0.0, control_variate_start="zero")
    by_steps = kind.name in ("fedavg", "fedprox", "scaffold")
    require_close(step, [-0.05, -0.15] if by_steps else [-0.1, -0.1], "moves by")


@check("a linear loss moves the model by its steps", is_named(*LINEAR_STEPS))
def check_linear_steps(kind: Kind) -> None:
    momentum = 0.0 if kind.name in ("fedavgm", "fedmos") else 0.2
    toys = [linear([1.0, 2.0])] * 2
    step = movement(kind, toys, 2, momentum=momentum, proximal_strength=0.0)
    expected = torch.tensor([1.0, 2.0]) * (-0.1 * LINEAR_STEPS[kind.name])
    require_close(step, expected, "round 2 moves by")


@check("step sizes are the theorem's", is_named("padamfed", "padamfed_vr"))
def check_theorem(kind: Kind) -> None:
    rule = unlike_clients(kind(), 2).rule  # S = 2, K = 3, T = 400
    path, gamma, beta = {  # ηK, γ and β from SK and T
        "padamfed": (400**-0.5, 6**0.25 / 400**0.75, (6 / 400) ** 0.5),
        "padamfed_vr": (1 / 400, (6 / 400**2) ** (1 / 3), (6 / 400**2) ** (1 / 3)),
    }[kind.name]
    fields = ("client_learning_rate", "server_learning_rate", "momentum")
    for name, value in zip(fields, (path / 3, gamma / path, beta), strict=True):
        found = getattr(rule, name)
        require(math.isclose(found, value, rel_tol=1e-6), f"{name} is {found:.6g}, not {value:.6g}")


@check("steps are distance over gradients", is_named("padamfed_dog"))
def check_distance_over_gradients(kind: Kind) -> None:
    federation = Federation(kind(), [linear([1.0, 2.0]), linear([0.0, 3.0])], num_rounds=10)
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


@check("a range test finds the length of rounds", is_named("autofed"))
def check_range_test(kind: Kind) -> None:
    """Down a slope rounds move γ, γ, 2γ, 4γ; where it turns, by what that found."""
    slope = torch.tensor([3.0, 4.0])
    federation = Federation(kind(), [linear(slope.tolist())] * 2)
    gamma = 0.01 * (1 + math.sqrt(2))
    for number, times in enumerate((1, 1, 2, 4), 1):
        x = federation.x - gamma * times * slope / 5
        require_close(federation.run(1), x, f"round {number} ends at")
    federation.toys = [linear((-slope).tolist())] * 2
    g, before = slope, federation.x
    federation.run(1)  # u = 0.2(∇F − c_i + c) + 0.8g, with the c_i and c of before it
    g = 0.2 * -slope + 0.8 * g
    require_close(federation.x, before - 8 * gamma * slope / 5, "the ramp's last round ends at")
    floor = 3 * 5 * 0.6  # 3‖g‖/‖ḡ‖, where ‖ḡ‖ is 1
    x = federation.x - 3 * 8 * gamma * (0.2 * -slope + 0.8 * g) / floor
    require_close(federation.run(1), x, "the first round after it ends at")


@check("momentum starts at c", is_padamfed)
def check_momentum_start(kind: Kind) -> None:
    server = unlike_clients(kind(), 2).server
    require_close(server["server_momentum"], server["control_variate"], "g⁰ is")


@check("the printed momentum takes the old c", is_padamfed)
def check_printed_momentum(kind: Kind) -> None:
    """g ← β(Σ w_i(c_i⁺ − c_i) + c) + (1−β)g with the c and g of before the round."""
    federation = unlike_clients(build_rule(kind, **RATES, momentum=0.3, momentum_rule="printed"), 2)
    for asked in ([0, 3], [1, 2], [2, 3]):
        c, g = federation.server["control_variate"], federation.server["server_momentum"]
        federation.round(asked)
        change = sum(r.weight * r.upload["control_variate_change"] for r in federation.replies)
        expected = 0.3 * (change + c) + 0.7 * g
        require_close(federation.server["server_momentum"], expected, "g is", 1e-5)


@check("momentum on both sides", is_named("stem"))
def check_two_sided_momentum(kind: Kind) -> None:
    """One client with ½‖y‖²: u ← y + (1−a)(u − y_prev); the last of K steps is the server's."""
    federation = Federation(build_rule(kind, **RATES, local_momentum=0.3), [quadratic([0, 0])])
    u = torch.tensor(START)
    x = u - 0.1 * u
    for number in range(1, 3):
        y, y_prev = x, x + 0.1 * u
        for _ in range(3):
            u = y + 0.7 * (u - y_prev)
            y, y_prev = y - 0.1 * u, y
        x = y
        require_close(federation.run(1), x, f"round {number} ends at")


@check("a = 1 is FedAvg after the start", is_named("stem"))
def check_no_momentum_is_fedavg(kind: Kind) -> None:
    federation = unlike_clients(build_rule(kind, **RATES, local_momentum=1.0), 4)
    begins = federation.server["model"].tolist()
    fedavg = build_rule(ALGORITHMS["fedavg"], **RATES)
    weights = federation.plan.importance.values()
    expected = Federation(fedavg, federation.toys, begins, importance=[*weights]).run(3)
    require_close(federation.run(3), expected, "three rounds end at", 1e-6)


@check("two steps of the server's moments", is_named(*SERVER_MOMENTS))
def check_server_moments(kind: Kind) -> None:
    federation = Federation(build_rule(kind, **_MOMENTS), [linear([0.0, 0.0])] * 2)
    keeps_largest = kind.name == "fedams"  # and starts at v = 0
    x, m = torch.tensor(START), torch.zeros(2)
    v = largest = torch.full((2,), 0.0 if keeps_largest else 0.01)
    for number, slope in enumerate(([1.0, -4.0], [0.25, -1.0]), 1):
        federation.toys = [linear(slope, 2)] * 2
        d = torch.tensor(slope) * (-RATES["client_learning_rate"] * 2)
        m, v = _DECAY * m + (1 - _DECAY) * d, SERVER_MOMENTS[kind.name](v, d)
        largest = largest.maximum(v)
        x = x + m / (largest.clamp(min=_FLOOR).sqrt() if keeps_largest else v.sqrt() + _FLOOR)
        require_close(federation.run(1), x, f"round {number} ends at")


@check("three rounds of the clients' moments", is_named("local_adam", "fa_nt", "fadamgc"))
def check_local_moments(kind: Kind) -> None:
    slopes = torch.tensor([[1.0, 2.0], [3.0, -1.0]])
    steps = 2
    toys = [linear(slope.tolist(), steps) for slope in slopes]
    federation = Federation(build_rule(kind, **_MOMENTS), toys)
    x, v = torch.tensor(START), torch.zeros(2, 2)  # rows are clients
    c_i = slopes.clone() if federation.rule.start_names else torch.zeros(2, 2)
    after = kind.name == "fa_nt"  # corrects m/√v̂
    for number in range(1, 4):
        drift = c_i.mean(dim=0) - c_i
        gradient = slopes if after else slopes + drift
        m, largest, total = torch.zeros(2, 2), v, torch.zeros(2, 2)
        for _ in range(steps):
            m, v = _DECAY * (m + gradient), _DECAY * (v + gradient**2)
            largest = largest.maximum(v)
            total = total + m / (largest.sqrt() + _FLOOR)
        deltas = -RATES["client_learning_rate"] * (total + steps * drift if after else total)
        x, c_i = x + deltas.mean(dim=0), total / steps if after else c_i
        require_close(federation.run(1), x, f"round {number} ends at")
        found = torch.stack([reply.upload["delta"] for reply in federation.replies])
        require_close(found, deltas, f"round {number}: Δ")


@check("the server's step is the disagreement of movements", is_named("fedexp"))
def check_extrapolation(kind: Kind) -> None:
    """Δ = (−0.3, 0) and (0, −0.3), and the iterate of η_g Δ̄ on both sides of the mean."""
    federation = Federation(
        build_rule(kind, **RATES, adaptivity=0.015), [linear([1.0, 0.0]), linear([0.0, 1.0])]
    )
    server_step = 0.09 / (2 * (0.045 + 0.015))  # below 1, so that 1 counts
    require(server_step < 1, "the case is one of a step of 1")
    require_close(federation.run(1), torch.tensor(START) - 0.075, "round 1 ends at")
    bold = Federation(build_rule(kind, **RATES, adaptivity=1e-6), [linear([4.0, -3.9])] * 2)
    bold.toys = [linear([4.0, -3.9]), linear([-3.9, 4.0])]
    square, mean = 0.09 * (16 + 15.21), 2 * (0.3 * 0.05) ** 2  # ‖Δ_i‖² and ‖Δ̄‖²
    expected = torch.tensor(START) - square / (2 * (mean + 1e-6)) * 0.3 * 0.05 / 2
    require_close(bold.run(1), expected, "clients that disagree end at", 1e-3)


@check("h is Σ p_i h_i whoever takes part", is_named("feddyn"))
def check_duals_sum(kind: Kind) -> None:
    federation = unlike_clients(kind(), 2)
    shares = torch.tensor(list(federation.plan.importance.values()))
    for number in range(12):
        federation.round([number % 4, (number + 1) % 4][: 1 + number % 2])
        mean = shares @ torch.stack([state["local_dual"] for state in federation.states])
        require_close(mean, federation.server["server_dual"], f"round {number}: Σ p_i h_i is", 1e-3)


@check("clients step by what the loss allows", is_named("fedsps"))
def check_polyak_steps(kind: Kind) -> None:
    """On ½h‖y‖² the step is ½/(ch) and 1 at most; with c = ½ a steep client is there at once."""
    for curvature, left in ((4.0, 0.0), (0.5, 0.5**3)):
        end = Federation(kind(), [quadratic([0.0, 0.0], curvature)] * 2).run(1)
        require_close(end, left * torch.tensor(START), f"with h = {curvature} a round ends at")


@check("clients step by how fast their gradient changes", is_named("delta_sgd"))
def check_auto_tuned_steps(kind: Kind) -> None:
    """On ½h‖y‖² the bound is 1/h, and below it a step grows by √(1 + 0.1θ)."""
    for curvature in (1.0, 8.0):
        factor, eta, ratio = 1 - 0.2 * curvature, 0.2, 1.0
        for _ in range(3):
            before, eta = eta, min(1 / curvature, math.sqrt(1 + 0.1 * ratio) * eta)
            ratio, factor = eta / before, factor * (1 - eta * curvature)
        end = Federation(kind(), [quadratic([0.0, 0.0], curvature, 4)] * 2).run(1)
        require_close(end, factor * torch.tensor(START), f"with h = {curvature} a round ends at")


@check("momentum follows the gradients at the server's model", is_named("mimelite"))
def check_momentum_at_the_server(kind: Kind) -> None:
    federation = unlike_clients(build_rule(kind, **RATES, momentum=0.3), 2)
    for asked in ([0, 3], [1, 2], [2, 3]):
        x, g = federation.x, federation.server["server_momentum"]
        federation.round(asked)
        fresh = sum(
            r.weight * federation.toys[int(r.client_id)].full_gradient(x)
            for r in federation.replies
        )
        require_close(federation.server["server_momentum"], 0.3 * fresh + 0.7 * g, "g is", 1e-5)

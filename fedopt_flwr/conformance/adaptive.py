"""Rules with Adam's moments, on the server or on the clients, beside their formulas anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import Check, Kind, is_named, keeps_control_variates, require
from .harness import RATES, START, Federation, build_rule, is_close, linear

_ETA = 0.1  # η
_DECAY = 0.5  # β₁ and β₂
_FLOOR = 0.1  # τ or ε
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


def check_server_moments(kind: Kind) -> None:
    decays = {"first_decay": _DECAY, "second_decay": _DECAY, "adaptivity": _FLOOR}
    rule = build_rule(kind, client_learning_rate=_ETA, server_learning_rate=1.0, **decays)
    federation = Federation(rule, [linear(_SLOPES[0], 2)] * 2, START)
    moment = SERVER_MOMENTS[kind.name]
    x, m = torch.tensor(START), torch.zeros(2)
    v = largest = torch.full((2,), moment.start)
    for number, slope in enumerate(_SLOPES, 1):
        federation.toys = [linear(slope, 2)] * 2
        d = torch.tensor(slope) * (-_ETA * 2)
        m, v = _DECAY * m + (1 - _DECAY) * d, moment.after(v, d)
        largest = largest.maximum(v)
        x = x + m / moment.divisor(v, largest)
        found = federation.run(1)
        require(is_close(found, x), f"round {number} ends at {found.tolist()}, not {x.tolist()}")


def check_local_moments(kind: Kind) -> None:
    slopes = torch.tensor([[1.0, 2.0], [3.0, -1.0]])
    steps = 2
    decays = {"first_decay": _DECAY, "second_decay": _DECAY, "adaptivity": _FLOOR}
    federation = Federation(
        build_rule(kind, **RATES, **decays), [linear(s.tolist(), steps) for s in slopes], START
    )
    x, v = torch.tensor(START), torch.zeros(2, 2)  # rows are clients
    c_i = slopes.clone() if federation.rule.start_names else torch.zeros(2, 2)
    tracks = keeps_control_variates(kind)
    after = kind.name == "fa_nt"  # corrects m/√v̂
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
        require(
            is_close(found, deltas), f"round {number}: Δ {found.tolist()}, not {deltas.tolist()}"
        )
        require(is_close(end, x), f"round {number} ends at {end.tolist()}, not {x.tolist()}")


ADAPTIVE = (
    Check("two steps of the server's moments", is_named(*SERVER_MOMENTS), check_server_moments),
    Check(
        "three rounds of the clients' moments",
        is_named("local_adam", "fa_nt", "fadamgc"),
        check_local_moments,
    ),
)

"""Properties of rules with momentum, on the clients or on the server."""

from __future__ import annotations

import torch

from .checks import Check, Kind, is_named, require
from .harness import (
    RATES,
    START,
    Federation,
    build_rule,
    is_close,
    linear,
    quadratic,
    unlike_clients,
)


def check_full_batches_hide_local_momentum(kind: Kind) -> None:
    """With nothing but full batches of one client, ∇F(y) + (1−a)(u − ∇F(y_prev)) is ∇F(y)."""
    ends = []
    for weight in (0.1, 1.0):
        rates = {"client_learning_rate": 0.1, "server_learning_rate": 0.5}
        rule = build_rule(kind, **rates, local_momentum=weight)
        ends.append(Federation(rule, [quadratic([0.0, 2.0])], START).run(3))
    require(
        is_close(ends[0], ends[1]),
        f"a = 0.1 ends at {ends[0].tolist()}, a = 1 at {ends[1].tolist()}",
    )


def check_noise_cancels(kind: Kind) -> None:
    """On linear losses a minibatch's noise is the same at both points, and must vanish."""
    free = {"local_momentum": 0.0} if "local_momentum" in kind.model_fields else {"momentum": 0.0}
    ends = []
    for noise in ([0.0, 0.0, 0.0], [5.0, -3.0, -2.0]):
        federation = Federation(
            build_rule(kind, **RATES, **free), [linear([1.0, 2.0], 3, noise)] * 2, START
        )
        ends.append(federation.run(2))
    require(
        is_close(ends[0], ends[1]), f"without noise {ends[0].tolist()}, with it {ends[1].tolist()}"
    )


def check_server_momentum(kind: Kind) -> None:
    """Where the gradient is always the same, the server's momentum must approach it."""
    slope = [1.0, 2.0]
    toys = [linear(slope, steps) for steps in (2, 4)]
    federation = Federation(build_rule(kind, **RATES, momentum=0.3), toys, START)
    federation.run(60)
    found = federation.server["server_momentum"]
    require(is_close(found, torch.tensor(slope), 1e-3), f"g is {found.tolist()}, not {slope}")


def check_accumulated_momentum(kind: Kind) -> None:
    """b ← βb + Δ̄ moves 1/(1 − β) times as far in the long run."""
    rule = build_rule(kind, **RATES, momentum=0.5, proximal_strength=0.0)
    federation = Federation(rule, [linear([1.0, 2.0])] * 2, START)
    before = federation.run(40)
    step = federation.run(1) - before
    expected = torch.tensor([1.0, 2.0]) * (-0.1 * 3 / 0.5)
    require(is_close(step, expected, 1e-3), f"moves by {step.tolist()}, not {expected.tolist()}")


def check_momentum_start(kind: Kind) -> None:
    server = unlike_clients(kind(), 2).server
    g, c = server["server_momentum"], server["control_variate"]
    require(is_close(g, c), f"g⁰ is {g.tolist()}, c⁰ {c.tolist()}")


def check_printed_momentum(kind: Kind) -> None:
    """g ← β(Σ w_i(c_i⁺ − c_i) + c) + (1−β)g with the c and g of before the round."""
    federation = unlike_clients(build_rule(kind, **RATES, momentum=0.3), 2)
    for asked in ([0, 3], [1, 2], [2, 3]):
        c, g = federation.server["control_variate"], federation.server["server_momentum"]
        federation.round(asked)
        change = sum(r.weight * r.upload["control_variate_change"] for r in federation.replies)
        expected = 0.3 * (change + c) + 0.7 * g
        found = federation.server["server_momentum"]
        require(is_close(found, expected, 1e-5), f"g is {found.tolist()}, not {expected.tolist()}")


def check_two_sided_momentum(kind: Kind) -> None:
    """One client with ½‖y‖²: u ← y + (1−a)(u − y_prev), K times, then the server's own step."""
    federation = Federation(
        build_rule(kind, **RATES, local_momentum=0.3), [quadratic([0, 0])], START
    )
    x = torch.tensor(START)
    u = x.clone()
    for number in range(1, 3):
        y, y_prev = x, x + 0.1 * u
        for _ in range(3):
            u = y + 0.7 * (u - y_prev)
            y, y_prev = y - 0.1 * u, y
        x, found = y - 0.1 * u, federation.run(1)
        require(is_close(found, x), f"round {number} ends at {found.tolist()}, not {x.tolist()}")


MOMENTUM = (
    Check(
        "a minibatch's noise cancels between two points",
        lambda kind: "local_momentum" in kind.model_fields or "previous_model" in kind.server_state,
        check_noise_cancels,
    ),
    Check(
        "full batches hide the local momentum",
        # not stem, whose y_prev is another point: its docstring says so
        lambda kind: "local_momentum" in kind.model_fields and kind.name != "stem",
        check_full_batches_hide_local_momentum,
    ),
    Check(
        "server momentum finds the gradient",
        lambda kind: "server_momentum" in kind.server_state and not kind.unbiased_weights,
        check_server_momentum,
    ),
    Check(
        "accumulated momentum moves 1/(1 − β) as far",
        lambda kind: (
            "momentum" in kind.model_fields
            and ("first_moment" in kind.server_state or kind.unbiased_weights)
        ),
        check_accumulated_momentum,
    ),
    Check(
        "momentum starts at c",
        is_named("padamfed", "padamfed_vr", "padamfed_dog"),
        check_momentum_start,
    ),
    Check(
        "the printed momentum takes the old c",
        is_named("padamfed", "padamfed_dog", "padamfed_vr"),
        check_printed_momentum,
    ),
    Check("momentum on both sides", is_named("stem"), check_two_sided_momentum),
)

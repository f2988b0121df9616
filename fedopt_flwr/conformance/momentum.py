"""Properties of rules with momentum, on the clients or on the server."""

from __future__ import annotations

import torch

from .harness import Federation, configured, linear, quadratic
from .properties import RATES, X, field, near
from .suite import Check, Kind, require


def check_full_batches_hide_local_momentum(kind: Kind) -> None:
    """With nothing but full batches of one client, ∇F(y) + (1−a)(u − ∇F(y_prev)) is ∇F(y)."""
    ends = []
    for weight in (0.1, 1.0):
        rates = {"client_learning_rate": 0.1, "server_learning_rate": 0.5}
        rule = configured(kind, **rates, local_momentum=weight)
        ends.append(Federation(rule, [quadratic([0.0, 2.0])], X).run(3))
    require(
        near(ends[0], ends[1]), f"a = 0.1 ends at {ends[0].tolist()}, a = 1 at {ends[1].tolist()}"
    )


def check_noise_cancels(kind: Kind) -> None:
    """On linear losses a minibatch's noise is the same at both points, and must vanish."""
    free = {"local_momentum": 0.0} if field("local_momentum", kind) else {"momentum": 0.0}
    ends = []
    for noise in ([0.0, 0.0, 0.0], [5.0, -3.0, -2.0]):
        federation = Federation(
            configured(kind, **RATES, **free), [linear([1.0, 2.0], 3, noise)] * 2, X
        )
        ends.append(federation.run(2))
    require(near(ends[0], ends[1]), f"without noise {ends[0].tolist()}, with it {ends[1].tolist()}")


def check_server_momentum(kind: Kind) -> None:
    """Where one gradient is there all the time, it is what the server's momentum must find."""
    slope, steps = [1.0, 2.0], [2, 4]
    toys = [linear(slope, k) for k in steps]
    federation = Federation(configured(kind, **RATES, momentum=0.3), toys, X)
    federation.run(60)
    found = federation.server["server_momentum"]
    require(near(found, torch.tensor(slope), 1e-3), f"g is {found.tolist()}, not {slope}")


def check_accumulated_momentum(kind: Kind) -> None:
    """b ← βb + Δ̄ moves 1/(1 − β) times as far once it is in swing."""
    rule = configured(kind, **RATES, momentum=0.5, proximal_strength=0.0)
    federation = Federation(rule, [linear([1.0, 2.0])] * 2, X)
    before = federation.run(40)
    step = federation.run(1) - before
    expected = torch.tensor([1.0, 2.0]) * (-0.1 * 3 / 0.5)
    require(near(step, expected, 1e-3), f"moves by {step.tolist()}, not {expected.tolist()}")


MOMENTUM = (
    Check(
        "a minibatch's noise cancels between two points",
        lambda kind: field("local_momentum", kind) or "previous_model" in kind.server_state,
        check_noise_cancels,
    ),
    Check(
        "full batches hide the local momentum",
        lambda kind: field("local_momentum", kind) and kind.name != "stem",  # its y_prev: docstring
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
            field("momentum", kind)
            and ("first_moment" in kind.server_state or kind.unbiased_weights)
        ),
        check_accumulated_momentum,
    ),
)

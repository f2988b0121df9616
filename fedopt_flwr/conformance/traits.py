"""Properties of rules that have a certain state or hyperparameter."""

from __future__ import annotations

import torch

from ..algorithms import FANT
from .checks import Kind, check, has_field, keeps_control_variates, require
from .harness import (
    RATES,
    START,
    Federation,
    Toy,
    build_rule,
    is_close,
    linear,
    movement,
    quadratic,
    require_close,
    unlike_clients,
)


def has_client_means(kind: Kind) -> bool:
    """Return whether vectors of the server are means of what its clients keep."""
    return bool(kind.client_means)


def has_gradient_variates(kind: Kind) -> bool:
    """Return whether a rule's c_i are gradients; those of FA-NT are steps."""
    return keeps_control_variates(kind) and not issubclass(kind, FANT)


@check(
    "unlike clients reach the minimiser of their mean",
    lambda kind: (
        kind.name == "feddyn"
        or (keeps_control_variates(kind) and "second_moment" not in kind.client_state)
    ),
)
def check_unlike_clients_minimise(kind: Kind) -> None:
    toys = [quadratic([-1.0, 1.0], 1.0, 10), quadratic([2.0, 0.0], 4.0, 10)]
    # a normalised rule takes its theorem's
    rates = {} if "normalize" in kind.model_fields else {**RATES, "client_learning_rate": 0.05}
    federation = Federation(build_rule(kind, **rates), toys, [1.0, 2.0])
    minimiser = torch.tensor([1.4, 0.2])  # Σ h_i m_i / Σ h_i
    distance = float((federation.run(400) - minimiser).norm())
    # FedAvg's fixed point lies 0.4 away
    require(distance < 0.06, f"ends {distance:.3g} from the minimiser of the mean loss")


@check("c is Σ p_i c_i whoever takes part", keeps_control_variates)
def check_control_variates_sum(kind: Kind) -> None:
    federation = unlike_clients(build_rule(kind, **RATES), 2)
    shares = torch.tensor(list(federation.plan.importance.values()))
    for number in range(12):  # by turns one client and two
        c = federation.server["control_variate"]
        mean = shares @ torch.stack([state["control_variate"] for state in federation.states])
        require_close(mean, c, f"round {number}: Σ p_i c_i is", 1e-3)
        federation.round([number % 4, (number + 1) % 4][: 1 + number % 2])


@check("what a server must know of its clients follows from their replies", has_client_means)
def check_client_changes(kind: Kind) -> None:
    federation, means = unlike_clients(build_rule(kind, **RATES), 2), kind.client_means or {}
    shares = torch.tensor(list(federation.plan.importance.values()))
    for asked in ([0, 1, 2, 3], [0, 3], [2, 1]):
        server, states = federation.server, [dict(state) for state in federation.states]
        federation.round(asked)
        for vector, name in means.items():
            for reply in federation.replies:
                i = int(reply.client_id)
                change = federation.now.client_changes(server, reply).get(name)
                expected = states[i][name] if change is None else states[i][name] + change
                text = f"client {i}'s {name!r}, moved by client_changes, is"
                require_close(expected, federation.states[i][name], text)
            mean = shares @ torch.stack([state[name] for state in federation.states])
            require_close(federation.server[vector], mean, f"{vector!r}, in client_means, is", 1e-3)


@check("control variates start at gradients", has_gradient_variates)
def check_start(kind: Kind) -> None:
    federation = unlike_clients(build_rule(kind))
    if "control_variate" not in federation.rule.start_names:
        return
    for i, state in enumerate(federation.states):
        gradient = federation.toys[i].full_gradient(torch.tensor(START))
        require_close(state["control_variate"], gradient, f"c_{i} starts at")


@check("control variates are gradients for any K and η", has_gradient_variates)
def check_control_variates_are_gradients(kind: Kind) -> None:
    slopes = [[1.0, 2.0], [3.0, -1.0]]
    toys = [linear(slopes[0], 2), linear(slopes[1], 5)]
    rates = {**RATES, "client_learning_rate": 0.2, "control_variate_start": "zero"}
    federation = Federation(build_rule(kind, **rates), toys)
    federation.run(1)
    # a schedule has changed the step size by the second round
    federation.round([0, 1], client_learning_rate=0.1)
    for i, slope in enumerate(slopes):
        require_close(federation.states[i]["control_variate"], slope, f"c_{i} is")


@check("only tracked clients renew c_i", has_field("tracked_clients"))
def check_tracking(kind: Kind) -> None:
    rule = build_rule(kind, **RATES, tracked_clients=1, control_variate_start="zero")
    federation = Federation(rule, [linear([1.0, 2.0])] * 2)
    federation.run(1)
    moved = [bool(state["control_variate"].any()) for state in federation.states]
    require(moved == [True, False], f"with 1 of 2 tracked, c_i changed: {moved}")


@check(
    "a minibatch's noise cancels between two points",
    lambda kind: "local_momentum" in kind.model_fields or "previous_model" in kind.server_state,
)
def check_noise_cancels(kind: Kind) -> None:
    """On linear losses a minibatch's noise is the same at both points, and must vanish."""
    rule = build_rule(kind, **RATES, local_momentum=0.0, momentum=0.0)
    slope = torch.tensor([1.0, 2.0])
    noisy, without = (
        Federation(rule, [Toy([0.0, 0.0], [(0.0, slope + n) for n in noise])] * 2).run(2)
        for noise in ([5.0, -3.0, -2.0], [0.0, 0.0, 0.0])
    )
    require_close(noisy, without, "with noise ends at")


@check(
    "full batches hide the local momentum",
    lambda kind: "local_momentum" in kind.model_fields,
)
def check_full_batches_hide_local_momentum(kind: Kind) -> None:
    """With nothing but full batches of one client, ∇F(y) + (1−a)(u − ∇F(y_prev)) is ∇F(y)."""
    found, expected = (
        Federation(build_rule(kind, **RATES, local_momentum=a), [quadratic([0.0, 2.0])]).run(3)
        for a in (0.1, 1.0)
    )
    require_close(found, expected, "with a = 0.1, not 1, ends at")


@check(
    "server momentum finds the gradient",
    lambda kind: "server_momentum" in kind.server_state and not kind.unbiased_weights,
)
def check_server_momentum(kind: Kind) -> None:
    toys = [linear([1.0, 2.0], steps) for steps in (2, 4)]
    federation = Federation(build_rule(kind, **RATES, momentum=0.3), toys)
    federation.run(60)
    require_close(federation.server["server_momentum"], [1.0, 2.0], "g is", 1e-3)


@check(
    "accumulated momentum moves 1/(1 − β) as far",
    lambda kind: (
        "momentum" in kind.model_fields
        and ("first_moment" in kind.server_state or kind.unbiased_weights)
    ),
)
def check_accumulated_momentum(kind: Kind) -> None:
    toys = [linear([1.0, 2.0])] * 2
    step = movement(kind, toys, 41, momentum=0.5, proximal_strength=0.0)
    require_close(step, [-0.1 * 3 / 0.5, -0.2 * 3 / 0.5], "moves by", 1e-3)  # b ← βb + Δ̄


@check("η changes the movement", has_field("client_learning_rate"))
def check_client_rate(kind: Kind) -> None:
    toys = [linear([1.0, 2.0])] * 2
    moved, faster = (movement(kind, toys, client_learning_rate=rate) for rate in (0.1, 0.2))
    require(not is_close(moved, faster), f"η = 0.1 and 0.2 both move by {moved.tolist()}")


@check("η_g multiplies the movement", has_field("server_learning_rate"))
def check_server_rate(kind: Kind) -> None:
    toys = [linear([1.0, 2.0])] * 2
    moved, faster = (movement(kind, toys, server_learning_rate=rate) for rate in (0.5, 1.0))
    require_close(faster, 2 * moved, "with twice η_g moves by")


@check("local steps have length η at most", has_field("normalize"))
def check_bounded_steps(kind: Kind) -> None:
    federation = unlike_clients(build_rule(kind, **RATES))
    for _ in range(3):
        federation.run(1)
        eta = federation.now.client_learning_rate  # type: ignore[attr-defined]
        for reply in federation.replies:
            length = float(reply.upload["delta"].norm())
            bound = eta * reply.num_steps
            require(length <= bound * (1 + 1e-4), f"‖Δ‖ is {length:.4g}, above ηK = {bound:.4g}")


@check(
    "the scale of the loss is not seen",
    lambda kind: "normalize" in kind.model_fields or kind.name == "autofed",
)
def check_scale_invariance(kind: Kind) -> None:
    ends = []
    for scale in (1.0, 1000.0):
        toys = [quadratic([c, -c], scale * (1.0 + c)) for c in (0.0, 1.0, 2.0)]
        federation = Federation(build_rule(kind), toys, sampled=2)
        for number in range(5):
            federation.round([number % 3, 2 - number % 2])
        ends.append(federation.x)
    require_close(ends[1], ends[0], "the loss times 1000 leads to")


@check("the pull to the server's model is μ(y − x)", has_field("proximal_strength"))
def check_pull(kind: Kind) -> None:
    """Three steps on a linear loss: −ηa Σ r^k, r = 1 − ημ, or 1 − μ in FedMoS; either elsewhere."""
    toys = [linear([1.0, -20.0])]
    step = movement(kind, toys, proximal_strength=0.4, momentum=0.0, local_momentum=1.0)
    ratios = {"fedprox": [0.96], "fedmos": [0.6]}.get(kind.name, [0.96, 0.6])
    allowed = [torch.tensor([-0.1, 2.0]) * (1 + r + r * r) for r in ratios]
    require(
        any(is_close(step, expected) for expected in allowed),
        f"moves by {step.tolist()}; a pull μ(y − x) gives {allowed[0].tolist()}",
    )

"""Properties of rules that keep control variates."""

from __future__ import annotations

import torch

from ..algorithms import FANT
from .checks import Check, Kind, has_field, keeps_control_variates, require
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


def has_gradient_variates(kind: Kind) -> bool:
    """Return whether a rule's c_i are gradients; those of FA-NT are steps."""
    return keeps_control_variates(kind) and not issubclass(kind, FANT)


def check_unlike_clients_minimise(kind: Kind) -> None:
    toys = [quadratic([-1.0, 1.0], 1.0, 10), quadratic([2.0, 0.0], 4.0, 10)]
    rates = {"client_learning_rate": 0.05, "server_learning_rate": 1.0}
    if "normalize" in kind.model_fields:
        rates = {}  # its theorem's
    federation = Federation(build_rule(kind, **rates), toys, [1.0, 2.0])
    minimiser = torch.tensor([1.4, 0.2])  # Σ h_i m_i / Σ h_i
    distance = float((federation.run(400) - minimiser).norm())
    # FedAvg's fixed point lies 0.4 away
    require(distance < 0.06, f"ends {distance:.3g} from the minimiser of the mean loss")


def check_control_variates_sum(kind: Kind) -> None:
    federation = unlike_clients(build_rule(kind, **RATES), 2)
    for number in range(12):  # by turns one client and two
        c = federation.server["control_variate"]
        mean = federation.mean_control_variate()
        gap = float((c - mean).abs().max())
        require(gap < 1e-3 * max(1.0, float(c.abs().max())), f"round {number}: off by {gap:.3g}")
        federation.round([number % 4, (number + 1) % 4][: 1 + number % 2])


def check_start(kind: Kind) -> None:
    rule = build_rule(kind)
    if "control_variate" not in rule.start_names:
        return
    federation = unlike_clients(rule)
    for i, state in enumerate(federation.states):
        toy = federation.toys[i]
        gradient = toy.full_gradient(torch.tensor(START))
        found = state["control_variate"]
        require(
            is_close(found, gradient), f"c_{i} starts at {found.tolist()}, not {gradient.tolist()}"
        )


def check_control_variates_are_gradients(kind: Kind) -> None:
    slopes = [[1.0, 2.0], [3.0, -1.0]]
    toys = [linear(slopes[0], 2), linear(slopes[1], 5)]
    rates = {**RATES, "client_learning_rate": 0.2, "control_variate_start": "zero"}
    federation = Federation(build_rule(kind, **rates), toys, START)
    federation.round([0, 1])
    # a schedule has changed the step size by the second round
    federation.round(
        [0, 1], change=lambda rule: rule.model_copy(update={"client_learning_rate": 0.1})
    )
    for i, slope in enumerate(slopes):
        found = federation.states[i]["control_variate"]
        require(is_close(found, torch.tensor(slope)), f"c_{i} is {found.tolist()}, not {slope}")


def check_tracking(kind: Kind) -> None:
    rule = build_rule(kind, **RATES, tracked_clients=1, control_variate_start="zero")
    federation = Federation(rule, [linear([1.0, 2.0])] * 2, START)
    federation.run(1)
    moved = [bool(state["control_variate"].any()) for state in federation.states]
    require(moved == [True, False], f"with 1 of 2 tracked, c_i changed: {moved}")


CONTROL_VARIATES = (
    Check(
        "unlike clients reach the minimiser of their mean",
        lambda kind: keeps_control_variates(kind) and "second_moment" not in kind.client_state,
        check_unlike_clients_minimise,
    ),
    Check("c is Σ p_i c_i whoever takes part", keeps_control_variates, check_control_variates_sum),
    Check("control variates start at gradients", has_gradient_variates, check_start),
    Check(
        "control variates are gradients for any K and η",
        has_gradient_variates,
        check_control_variates_are_gradients,
    ),
    Check("only tracked clients renew c_i", has_field("tracked_clients"), check_tracking),
)

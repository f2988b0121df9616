"""Properties that any rule must have, or any rule that keeps a certain kind of state."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..algorithm import Algorithm, Reply
from .harness import Federation, configured, linear, quadratic, snapshot
from .suite import Check, Kind, require

X = [1.0, -1.0]
RATES = {"client_learning_rate": 0.1, "server_learning_rate": 1.0}


def field(name: str, kind: Kind) -> bool:
    """Whether a rule has this hyperparameter."""
    return name in kind.model_fields


def keeps_control_variates(kind: Kind) -> bool:
    return "control_variate" in kind.client_state


def is_gradient_scaled(kind: Kind) -> bool:
    """Whether its control variates are gradients; those of fa_nt are steps."""
    return keeps_control_variates(kind) and not issubclass(kind, _fa_nt())


def _fa_nt() -> Kind:
    from ..algorithms import FANT

    return FANT


def near(one: Tensor, other: Tensor, tolerance: float = 1e-4) -> bool:
    return bool((one - other).abs().max() <= tolerance * max(1.0, float(other.abs().max())))


def unlike(rule: Algorithm, sampled: int = 4) -> Federation:
    """Four clients with their own minima, curvatures and importance."""
    toys = [quadratic([c, -c], 0.5 + 0.5 * i) for i, c in enumerate((-2.0, 0.0, 1.0, 3.0))]
    return Federation(rule, toys, X, sampled=sampled, importance=[0.1, 0.2, 0.3, 0.4])


def check_messages(kind: Kind) -> None:
    federation = unlike(configured(kind), 2)
    for number in range(3):
        federation.round([number, number + 1])
        sent = set(federation.now.broadcast(federation.server))
        declared = set(federation.now.broadcast_names)
        require(sent == declared, f"sends down {sorted(sent)}, declares {sorted(declared)}")
        for reply in federation.replies:
            told = federation.now.for_client(reply.rank)
            require(
                set(reply.upload) == set(told.upload_names),
                f"sends up {sorted(reply.upload)}, declares {sorted(told.upload_names)}",
            )
    for name, vector in federation.server.vectors.items():
        require(bool(vector.isfinite().all()), f"server vector {name!r} is not finite")
    kept = {tuple(sorted(state)) for state in federation.states}
    declared = set(kind.client_state)
    require(
        kept == {tuple(sorted(declared))},
        f"clients keep {sorted(kept)}, client_state declares {sorted(declared)}",
    )


def check_purity(kind: Kind) -> None:
    federation = unlike(configured(kind))
    federation.round([0, 1, 2, 3])
    received = federation.now.broadcast(federation.server)
    state = federation.states[1]
    before = {n: v.clone() for n, v in {**received, **state}.items()}
    federation.now.client_update(received, dict(state), federation.toys[1])
    for name, vector in {**received, **state}.items():
        require(torch.equal(vector, before[name]), f"client_update writes to its {name!r}")
    server, vectors = federation.server, snapshot(federation.server)
    federation.now.server_update(server, federation.replies)
    for name, vector in server.vectors.items():
        require(torch.equal(vector, vectors[name]), f"server_update writes to its {name!r}")


def check_order(kind: Kind) -> None:
    one, other = unlike(configured(kind)), unlike(configured(kind))
    for _ in range(3):
        one.round([0, 1, 2, 3])
        other.round([0, 1, 2, 3], arrange=lambda replies: replies[::-1])
    require(near(one.x, other.x, 1e-5), f"replies in reverse: {other.x.tolist()}, {one.x.tolist()}")


def check_every_reply_counts(kind: Kind) -> None:
    slopes = [[1.0, 2.0], [2.0, 1.0], [3.0, -1.0]]
    start = {"control_variate_start": "zero"}
    plain = Federation(configured(kind, **start), [linear(s) for s in slopes], X)
    expected = plain.run(1)
    for i in range(3):
        changed = [[-s[0], s[1]] if j == i else s for j, s in enumerate(slopes)]
        other = Federation(configured(kind, **start), [linear(s) for s in changed], X).run(1)
        require(not torch.equal(other, expected), f"the reply of client {i} of 3 changes nothing")


def check_weights(kind: Kind) -> None:
    """Two replies of half the weight are one of the whole: means are Σ w_i, sums are Σ p_i."""

    def halved(replies: list[Reply]) -> list[Reply]:
        one = replies[0]
        half = replace(one, weight=one.weight / 2, importance=one.importance / 2)
        return [half, half, *replies[1:]]

    whole, split = unlike(configured(kind, **RATES), 2), unlike(configured(kind, **RATES), 2)
    for pair in ([0, 3], [1, 2]):
        whole.round(pair)
        split.round(pair, arrange=halved)
        for name, vector in whole.server.vectors.items():
            found = split.server[name]
            require(
                near(found, vector, 1e-5),
                f"{name!r} is {found.tolist()} with a reply in two halves, {vector.tolist()} whole",
            )


def check_every_batch_counts(kind: Kind) -> None:
    federation = Federation(configured(kind), [linear([1.0, 2.0], 4)] * 2, X)
    federation.toys[0].seen.clear()
    federation.round([0, 1])
    seen = federation.toys[0].seen
    require(seen == set(range(4)), f"of 4 minibatches only {sorted(seen)} were used")


def check_dropouts(kind: Kind) -> None:
    rule = configured(kind, **RATES)
    all_four, two = (Federation(rule, [linear([1.0, 2.0])] * 4, X, sampled=4) for _ in range(2))
    all_four.round([0, 1, 2, 3])
    two.round([0, 2])
    require(
        near(all_four.x, two.x, 1e-5),
        f"four equal clients end at {all_four.x.tolist()}, two of them at {two.x.tolist()}",
    )


def check_descent(kind: Kind) -> None:
    federation = Federation(configured(kind), [quadratic([0.0, 0.0])] * 2, X)
    federation.run(1)
    require(float(federation.x.norm()) < 2**0.5, f"one round led from {X} to {federation.x}")


def check_equal_clients_minimise(kind: Kind) -> None:
    rates = {"server_learning_rate": 0.05} if field("adaptivity", kind) else {}
    if "second_moment" in kind.client_state:
        rates = {"client_learning_rate": 0.01}
    federation = Federation(configured(kind, **rates), [quadratic([0.0, 0.0])] * 3, X)
    federation.run(400)
    distance = float(federation.x.norm())
    require(distance < 0.4, f"after 400 rounds {distance:.3g} from the minimum, at first 1.41")


def check_unlike_clients_minimise(kind: Kind) -> None:
    toys = [quadratic([-1.0, 1.0], 1.0, 10), quadratic([2.0, 0.0], 4.0, 10)]
    rates = {"client_learning_rate": 0.05, "server_learning_rate": 1.0}
    if field("normalize", kind):
        rates = {}  # its theorem's
    federation = Federation(configured(kind, **rates), toys, [1.0, 2.0])
    minimiser = torch.tensor([1.4, 0.2])  # Σ h_i m_i / Σ h_i
    distance = float((federation.run(400) - minimiser).norm())
    # FedAvg's fixed point lies 0.4 away
    require(distance < 0.06, f"ends {distance:.3g} from the minimiser of the mean loss")


def check_control_variates_sum(kind: Kind) -> None:
    federation = unlike(configured(kind, **RATES), 2)
    for number in range(12):  # by turns one client and two
        c, mean = federation.server["control_variate"], federation.mean_control_variate()
        gap = float((c - mean).abs().max())
        require(gap < 1e-3 * max(1.0, float(c.abs().max())), f"round {number}: off by {gap:.3g}")
        federation.round([number % 4, (number + 1) % 4][: 1 + number % 2])


def check_start(kind: Kind) -> None:
    rule = configured(kind)
    if "control_variate" not in rule.start_names:
        return
    federation = unlike(rule)
    for i, state in enumerate(federation.states):
        toy = federation.toys[i]
        gradient = toy.full_gradient(torch.tensor(X))
        found = state["control_variate"]
        require(near(found, gradient), f"c_{i} starts at {found.tolist()}, not {gradient.tolist()}")


def check_control_variates_are_gradients(kind: Kind) -> None:
    slopes = [[1.0, 2.0], [3.0, -1.0]]
    toys = [linear(slopes[0], 2), linear(slopes[1], 5)]
    rates = {**RATES, "client_learning_rate": 0.2, "control_variate_start": "zero"}
    federation = Federation(configured(kind, **rates), toys, X)
    federation.round([0, 1])
    # a schedule has changed the step size by the second round
    federation.round(
        [0, 1], change=lambda rule: rule.model_copy(update={"client_learning_rate": 0.1})
    )
    for i, slope in enumerate(slopes):
        found = federation.states[i]["control_variate"]
        require(near(found, torch.tensor(slope)), f"c_{i} is {found.tolist()}, not {slope}")


def check_bounded_steps(kind: Kind) -> None:
    federation = unlike(configured(kind, **RATES))
    for _ in range(3):
        federation.round([0, 1, 2, 3])
        eta = federation.now.client_learning_rate  # type: ignore[attr-defined]
        for reply in federation.replies:
            length, bound = float(reply.upload["delta"].norm()), eta * reply.num_steps
            require(length <= bound * (1 + 1e-4), f"‖Δ‖ is {length:.4g}, above ηK = {bound:.4g}")


def check_scale_invariance(kind: Kind) -> None:
    ends = []
    for scale in (1.0, 1000.0):
        toys = [quadratic([c, -c], 1.0 + c, 3, scale) for c in (0.0, 1.0, 2.0)]
        ends.append(
            Federation(configured(kind), toys, X, sampled=2).run(5, lambda n: [n % 3, 2 - n % 2])
        )
    require(
        near(ends[0], ends[1]),
        f"the loss times 1000 leads to {ends[1].tolist()}, not {ends[0].tolist()}",
    )


def check_server_rate(kind: Kind) -> None:
    moved = []
    for rate in (0.5, 1.0):
        rates = {"client_learning_rate": 0.1, "server_learning_rate": rate}
        federation = Federation(configured(kind, **rates), [linear([1.0, 2.0])] * 2, X)
        before = federation.x
        moved.append(federation.run(1) - before)
    require(near(2 * moved[0], moved[1], 1e-4), f"twice η_g moves {moved[1]} where {moved[0]}")


def check_client_rate(kind: Kind) -> None:
    moved = []
    for rate in (0.1, 0.2):
        rates = {"client_learning_rate": rate, "server_learning_rate": 1.0}
        federation = Federation(configured(kind, **rates), [linear([1.0, 2.0])] * 2, X)
        before = federation.x
        moved.append(federation.run(1) - before)
    require(not near(moved[0], moved[1]), f"η = 0.1 and 0.2 both move by {moved[0].tolist()}")


PROPERTIES = (
    Check("sends and keeps what it declares", lambda kind: True, check_messages),
    Check("leaves its inputs alone", lambda kind: True, check_purity),
    Check("does not depend on the order of replies", lambda kind: True, check_order),
    Check("every reply counts", lambda kind: True, check_every_reply_counts),
    Check("a reply counts by its weight", lambda kind: True, check_weights),
    Check("every minibatch counts", lambda kind: True, check_every_batch_counts),
    Check("drop-outs do not shorten a round", lambda kind: True, check_dropouts),
    Check("the first round descends", lambda kind: True, check_descent),
    Check("equal clients reach the minimum", lambda kind: True, check_equal_clients_minimise),
    Check(
        "unlike clients reach the minimiser of their mean",
        lambda kind: keeps_control_variates(kind) and "second_moment" not in kind.client_state,
        check_unlike_clients_minimise,
    ),
    Check("c is Σ p_i c_i whoever takes part", keeps_control_variates, check_control_variates_sum),
    Check("control variates start at gradients", is_gradient_scaled, check_start),
    Check(
        "control variates are gradients for any K and η",
        is_gradient_scaled,
        check_control_variates_are_gradients,
    ),
    Check("local steps have length η at most", partial(field, "normalize"), check_bounded_steps),
    Check("the scale of the loss is not seen", partial(field, "normalize"), check_scale_invariance),
    Check("η changes the movement", partial(field, "client_learning_rate"), check_client_rate),
    Check("η_g multiplies the movement", partial(field, "server_learning_rate"), check_server_rate),
)

"""Properties that any rule must have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..algorithm import Reply
from ..algorithms import ALGORITHMS
from .checks import Kind, check, require
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


def require_names(found: Iterable[str], declared: Iterable[str], what: str) -> None:
    require(set(found) == set(declared), f"{what} {sorted(found)}, declares {sorted(declared)}")


@check("sends and keeps what it declares")
def check_messages(kind: Kind) -> None:
    federation = unlike_clients(build_rule(kind), 2)
    for number in range(3):
        federation.round([number, number + 1])
        rule = federation.now
        require_names(rule.broadcast(federation.server), rule.broadcast_names, "sends down")
        for reply in federation.replies:
            require_names(reply.upload, rule.for_client(reply.rank).upload_names, "sends up")
    for name, vector in federation.server.vectors.items():
        require(bool(vector.isfinite().all()), f"server vector {name!r} is not finite")
    for state in federation.states:
        require_names(state, kind.client_state, "a client keeps")


def require_pure(method: Callable[..., Any], read: Mapping[str, Tensor], *inputs: Any) -> None:
    before = {name: vector.clone() for name, vector in read.items()}
    method(*inputs)
    for name, vector in read.items():
        require(torch.equal(vector, before[name]), f"{method.__name__} writes to its {name!r}")


@check("leaves its inputs alone")
def check_purity(kind: Kind) -> None:
    federation = unlike_clients(build_rule(kind))
    federation.run(1)
    rule = federation.now
    server = federation.server
    received = rule.broadcast(server)
    state = federation.states[1]
    inputs = (received, dict(state), federation.toys[1])
    require_pure(rule.client_update, {**received, **state}, *inputs)
    require_pure(rule.server_update, server.vectors, server, federation.replies)


def require_same(kind: Kind, arrange: Callable[[list[Reply]], list[Reply]], how: str) -> None:
    """Require that the server comes to the same vectors when it gets replies so arranged."""
    plain, other = (unlike_clients(build_rule(kind, **RATES), 2) for _ in range(2))
    for asked in ([0, 1, 2, 3], [0, 3], [1, 2]):
        plain.round(asked)
        other.round(asked, arrange)
        for name, vector in plain.server.vectors.items():
            require_close(other.server[name], vector, f"{name!r} with {how}", 1e-5)


@check("does not depend on the order of replies")
def check_order(kind: Kind) -> None:
    require_same(kind, lambda replies: replies[::-1], "replies in reverse")


@check("every reply counts")
def check_every_reply_counts(kind: Kind) -> None:
    toys = [linear([1.0, 2.0]), linear([2.0, 1.0]), linear([3.0, -1.0])]
    expected = movement(kind, toys, control_variate_start="zero")
    for i in range(3):
        changed = [*toys[:i], linear([-3.0, 1.5]), *toys[i + 1 :]]
        found = movement(kind, changed, control_variate_start="zero")
        require(not torch.equal(found, expected), f"the reply of client {i} of 3 changes nothing")


@check("a reply counts by its weight")
def check_weights(kind: Kind) -> None:
    """Two replies of half the weight are one of the whole: means are Σ w_i, sums are Σ p_i."""

    def halved(replies: list[Reply]) -> list[Reply]:
        one = replies[0]
        half = replace(one, weight=one.weight / 2, importance=one.importance / 2)
        return [half, half, *replies[1:]]

    require_same(kind, halved, "a reply in two halves")


@check("every minibatch counts")
def check_every_batch_counts(kind: Kind) -> None:
    toy = linear([1.0, 2.0], 4)
    federation = Federation(build_rule(kind), [toy] * 2)
    toy.seen.clear()
    federation.run(1)
    require(toy.seen == set(range(4)), f"of 4 minibatches only {sorted(toy.seen)} were used")


# in feddyn's h a client that is away counts with nothing
@check("drop-outs do not shorten a round", lambda kind: kind.name != "feddyn")
def check_dropouts(kind: Kind) -> None:
    all_four, two = (
        Federation(build_rule(kind, **RATES), [linear([1.0, 2.0])] * 4) for _ in range(2)
    )
    two.round([0, 2])
    require_close(two.x, all_four.run(1), "two of four equal clients end at", 1e-5)


@check("the first round descends")
def check_descent(kind: Kind) -> None:
    end = Federation(build_rule(kind), [quadratic([0.0, 0.0])] * 2).run(1)
    require(float(end.norm()) < 2**0.5, f"one round led from {START} to {end.tolist()}")


@check("equal clients reach the minimum")
def check_equal_clients_minimise(kind: Kind) -> None:
    rates = {"server_learning_rate": 0.05} if "adaptivity" in kind.model_fields else {}
    if "second_moment" in kind.client_state:
        rates = {"client_learning_rate": 0.01}
    end = Federation(build_rule(kind, **rates), [quadratic([0.0, 0.0])] * 3).run(400)
    distance = float(end.norm())
    require(distance < 0.4, f"after 400 rounds {distance:.3g} from the minimum, at first 1.41")


@check("reduces to a simpler rule", lambda kind: kind.reduces_to is not None)
def check_reduction(kind: Kind) -> None:
    if kind.reduces_to is None:
        return
    ours, name, theirs = kind.reduces_to
    require(name in ALGORITHMS, f"reduces_to: no rule is named {name!r}; see `fedopt algorithms`")
    one = unlike_clients(build_rule(kind, **{**RATES, **ours}), 2)
    other = unlike_clients(build_rule(ALGORITHMS[name], **{**RATES, **theirs}), 2)
    rounds: list[list[int]] = [[0, 1, 2, 3]] * 3
    if not kind.unbiased_weights:
        rounds += [[1, 3], [0, 2]]
    for asked in rounds:
        one.round(asked)
        other.round(asked)
    require_close(one.x, other.x, f"with {ours} not {name}")

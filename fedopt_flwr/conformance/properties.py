"""Properties that any rule must have."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..algorithm import Reply
from ..algorithms import ALGORITHMS
from .checks import Check, Kind, require
from .harness import (
    RATES,
    START,
    Federation,
    build_rule,
    copy_vectors,
    is_close,
    linear,
    quadratic,
    unlike_clients,
)


def check_messages(kind: Kind) -> None:
    federation = unlike_clients(build_rule(kind), 2)
    for number in range(3):
        federation.round([number, number + 1])
        sent = set(federation.now.broadcast(federation.server))
        declared = set(federation.now.broadcast_names)
        require(sent == declared, f"sends down {sorted(sent)}, declares {sorted(declared)}")
        for reply in federation.replies:
            sender = federation.now.for_client(reply.rank)
            require(
                set(reply.upload) == set(sender.upload_names),
                f"sends up {sorted(reply.upload)}, declares {sorted(sender.upload_names)}",
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
    federation = unlike_clients(build_rule(kind))
    federation.round([0, 1, 2, 3])
    received = federation.now.broadcast(federation.server)
    state = federation.states[1]
    before = {n: v.clone() for n, v in {**received, **state}.items()}
    federation.now.client_update(received, dict(state), federation.toys[1])
    for name, vector in {**received, **state}.items():
        require(torch.equal(vector, before[name]), f"client_update writes to its {name!r}")
    server = federation.server
    vectors = copy_vectors(server)
    federation.now.server_update(server, federation.replies)
    for name, vector in server.vectors.items():
        require(torch.equal(vector, vectors[name]), f"server_update writes to its {name!r}")


def check_order(kind: Kind) -> None:
    one = unlike_clients(build_rule(kind))
    other = unlike_clients(build_rule(kind))
    for _ in range(3):
        one.round([0, 1, 2, 3])
        other.round([0, 1, 2, 3], arrange=lambda replies: replies[::-1])
    require(
        is_close(one.x, other.x, 1e-5), f"replies in reverse: {other.x.tolist()}, {one.x.tolist()}"
    )


def check_every_reply_counts(kind: Kind) -> None:
    slopes = [[1.0, 2.0], [2.0, 1.0], [3.0, -1.0]]
    start = {"control_variate_start": "zero"}
    plain = Federation(build_rule(kind, **start), [linear(s) for s in slopes], START)
    expected = plain.run(1)
    for i in range(3):
        changed = [[-s[0], s[1]] if j == i else s for j, s in enumerate(slopes)]
        other = Federation(build_rule(kind, **start), [linear(s) for s in changed], START).run(1)
        require(not torch.equal(other, expected), f"the reply of client {i} of 3 changes nothing")


def check_weights(kind: Kind) -> None:
    """Two replies of half the weight are one of the whole: means are Σ w_i, sums are Σ p_i."""

    def halved(replies: list[Reply]) -> list[Reply]:
        one = replies[0]
        half = replace(one, weight=one.weight / 2, importance=one.importance / 2)
        return [half, half, *replies[1:]]

    whole = unlike_clients(build_rule(kind, **RATES), 2)
    split = unlike_clients(build_rule(kind, **RATES), 2)
    for pair in ([0, 3], [1, 2]):
        whole.round(pair)
        split.round(pair, arrange=halved)
        for name, vector in whole.server.vectors.items():
            found = split.server[name]
            require(
                is_close(found, vector, 1e-5),
                f"{name!r} is {found.tolist()} with a reply in two halves, {vector.tolist()} whole",
            )


def check_every_batch_counts(kind: Kind) -> None:
    federation = Federation(build_rule(kind), [linear([1.0, 2.0], 4)] * 2, START)
    federation.toys[0].seen.clear()
    federation.round([0, 1])
    seen = federation.toys[0].seen
    require(seen == set(range(4)), f"of 4 minibatches only {sorted(seen)} were used")


def check_dropouts(kind: Kind) -> None:
    rule = build_rule(kind, **RATES)
    all_four, two = (Federation(rule, [linear([1.0, 2.0])] * 4, START, sampled=4) for _ in range(2))
    all_four.round([0, 1, 2, 3])
    two.round([0, 2])
    require(
        is_close(all_four.x, two.x, 1e-5),
        f"four equal clients end at {all_four.x.tolist()}, two of them at {two.x.tolist()}",
    )


def check_descent(kind: Kind) -> None:
    federation = Federation(build_rule(kind), [quadratic([0.0, 0.0])] * 2, START)
    federation.run(1)
    require(float(federation.x.norm()) < 2**0.5, f"one round led from {START} to {federation.x}")


def check_equal_clients_minimise(kind: Kind) -> None:
    rates = {"server_learning_rate": 0.05} if "adaptivity" in kind.model_fields else {}
    if "second_moment" in kind.client_state:
        rates = {"client_learning_rate": 0.01}
    federation = Federation(build_rule(kind, **rates), [quadratic([0.0, 0.0])] * 3, START)
    federation.run(400)
    distance = float(federation.x.norm())
    require(distance < 0.4, f"after 400 rounds {distance:.3g} from the minimum, at first 1.41")


def check_reduction(kind: Kind) -> None:
    if kind.reduces_to is None:
        return
    ours, name, theirs = kind.reduces_to
    require(name in ALGORITHMS, f"reduces_to: no rule is named {name!r}; see `fedopt algorithms`")
    one = unlike_clients(build_rule(kind, **{**RATES, **ours}), 2)
    other = unlike_clients(build_rule(ALGORITHMS[name], **{**RATES, **theirs}), 2)
    pairs: list[list[int]] = [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    if not kind.unbiased_weights:
        pairs += [[1, 3], [0, 2]]
    found, expected = (f.run(len(pairs), lambda n: pairs[n]) for f in (one, other))
    require(
        is_close(found, expected), f"with {ours} not {name}: {found.tolist()}, {expected.tolist()}"
    )


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
    Check("reduces to a simpler rule", lambda kind: kind.reduces_to is not None, check_reduction),
)

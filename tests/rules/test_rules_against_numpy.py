"""Whole runs through Flower's loop against a few lines of NumPy for each rule.

Full-batch softmax regression on unequal clients, in float64 on the NumPy side; the NumPy side reads
from the records only who took part. Agreement to 1e-5 after 12 rounds.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers import SOFTMAX_DATA, SOFTMAX_SIZES, linear_model
from numpy_rivals import RIVALS
from numpy_rules import ETA, ROUNDS, K, N, Vector, gradient
from numpy_rules import REFERENCES as OTHERS

from fedopt_flwr import simulate


def fedavg(x: Vector, rounds: list[list[int]], p: Vector, mu: float = 0.0) -> Vector:
    for sampled in rounds:
        deltas = []
        for i in sampled:
            y = x.copy()
            for _ in range(K):
                y -= ETA * (gradient(i, y) + mu * (y - x))
            deltas.append(y - x)
        x = x + np.average(deltas, axis=0, weights=p[sampled])
    return x


def fedprox(x: Vector, rounds: list[list[int]], p: Vector) -> Vector:
    return fedavg(x, rounds, p, mu=0.3)


def fedavg_m(x: Vector, rounds: list[list[int]], p: Vector, beta: float = 0.4) -> Vector:
    g = np.zeros_like(x)
    for sampled in rounds:
        deltas = []
        for i in sampled:
            y = x.copy()
            for _ in range(K):
                y -= ETA * (beta * gradient(i, y) + (1 - beta) * g)
            deltas.append(y - x)
        mean = np.average(deltas, axis=0, weights=p[sampled])
        x, g = x + mean, -mean / (ETA * K)
    return x


def scaffold_m(x: Vector, rounds: list[list[int]], p: Vector, beta: float = 0.4) -> Vector:
    c_i = np.array([gradient(i, x) for i in range(N)])
    c, g = p @ c_i, np.zeros_like(x)
    for sampled in rounds:
        deltas, fresh = [], {}
        for i in sampled:
            y, seen = x.copy(), []
            for _ in range(K):
                seen.append(gradient(i, y))
                y -= ETA * (beta * (seen[-1] - c_i[i] + c) + (1 - beta) * g)
            deltas.append(y - x)
            fresh[i] = np.mean(seen, axis=0)
        mean = np.average(deltas, axis=0, weights=p[sampled])
        x, g = x + mean, -mean / (ETA * K)
        for i, value in fresh.items():
            c = c + p[i] * (value - c_i[i])
            c_i[i] = value
    return x


def scaffold(x: Vector, rounds: list[list[int]], p: Vector) -> Vector:
    return scaffold_m(x, rounds, p, beta=1.0)


def padamfed(x: Vector, rounds: list[list[int]], p: Vector) -> Vector:
    num_rounds, sampled_count = len(rounds), len(rounds[0])
    eta = 1 / (K * np.sqrt(num_rounds))
    gamma = (sampled_count * K) ** 0.25 / num_rounds**0.75
    beta = min(1.0, np.sqrt(sampled_count * K / num_rounds))
    c_i = np.array([gradient(i, x) for i in range(N)])
    c = p @ c_i
    g = c.copy()
    for sampled in rounds:
        w = p[sampled] / p[sampled].sum()
        deltas, fresh = [], []
        for i in sampled:
            y, seen = x.copy(), []
            for _ in range(K):
                seen.append(gradient(i, y))
                u = beta * (seen[-1] - c_i[i] + c) + (1 - beta) * g
                y -= eta * u / np.linalg.norm(u)
            deltas.append(y - x)
            fresh.append(np.mean(seen, axis=0))
        change = np.array(fresh) - c_i[sampled]
        x = x + gamma / (eta * K) * (w @ np.array(deltas))
        g = beta * (w @ change + c) + (1 - beta) * g
        c = c + p[sampled] @ change
        c_i[sampled] = fresh
    return x


# test id -> (rule, reference, hyperparameters)
REFERENCES = {
    "fedavg": ("fedavg", fedavg, {"client_learning_rate": ETA}),
    "fedprox": ("fedprox", fedprox, {"client_learning_rate": ETA, "proximal_strength": 0.3}),
    "fedavg_m": ("fedavg_m", fedavg_m, {"client_learning_rate": ETA, "momentum": 0.4}),
    "scaffold": ("scaffold", scaffold, {"client_learning_rate": ETA}),
    "scaffold_m": ("scaffold_m", scaffold_m, {"client_learning_rate": ETA, "momentum": 0.4}),
    "padamfed": ("padamfed", padamfed, {}),
    **OTHERS,
    **RIVALS,
}


def test_every_rule_has_a_reference() -> None:
    from fedopt_flwr.algorithms import ALGORITHMS

    assert {name for name, _, _ in REFERENCES.values()} == set(ALGORITHMS)


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize("sampled", [N, 2])
@pytest.mark.parametrize("case", REFERENCES)
def test_rule_equals_its_numpy_version(case: str, sampled: int, weighting: str) -> None:
    name, reference, hyperparameters = REFERENCES[case]
    result = simulate(
        {
            "algorithm": {"name": name, **hyperparameters},
            "federation": {
                "num_clients": N,
                "clients_per_round": sampled,
                "num_rounds": ROUNDS,
                "weighting": weighting,
            },
            "training": {"local_steps": K, "batch_size": 0},
        },
        model=linear_model,
        client_data=SOFTMAX_DATA,
    )
    rounds = [record.clients for record in result.rounds if record.round > 0]
    assert all(len(clients) == sampled for clients in rounds)
    assert sampled == N or len({tuple(clients) for clients in rounds}) > 1
    layer = linear_model()
    start = np.concatenate([p.detach().numpy().ravel() for p in layer.parameters()]).astype(float)
    p = (
        np.full(N, 1 / N)
        if weighting == "uniform"
        else np.array(SOFTMAX_SIZES) / sum(SOFTMAX_SIZES)
    )
    expected = reference(start, rounds, p)
    assert np.abs(expected - start).max() > 0.05
    np.testing.assert_allclose(result.parameters, expected, atol=1e-5)

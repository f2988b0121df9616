"""NumPy versions of the rules that others compare with: `rule(x, rounds, p) -> x`."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from helpers import SOFTMAX_CLIENTS
from numpy_rules import ETA, FULL, K, N, Rule, Vector, gradient, gradients_at, weights


def loss(i: int, theta: Vector) -> float:
    """Mean cross-entropy of softmax regression."""
    inputs, labels = SOFTMAX_CLIENTS[i]
    classes = theta.size // (inputs.shape[1] + 1)
    scores = inputs @ theta[:-classes].reshape(classes, -1).T + theta[-classes:]
    top = scores.max(axis=1)
    log_sum = np.log(np.exp(scores - top[:, None]).sum(axis=1)) + top
    return float(np.mean(log_sum - scores[np.arange(len(labels)), labels]))


def fednova(x: Vector, rounds: list[list[int]], p: Vector) -> Vector:
    """With equal K_i the effective number of steps is K: the rule is FedAvg."""
    for sampled in rounds:
        directions, steps = np.zeros_like(x), 0.0
        for i, w in zip(sampled, weights(p, sampled), strict=True):
            y, seen = x.copy(), np.zeros_like(x)
            for _ in range(K):
                q = gradient(i, y)
                y, seen = y - ETA * q, seen + q
            directions, steps = directions + w * seen / K, steps + w * K
        x = x - steps * ETA * directions
    return x


def fedexp(x: Vector, rounds: list[list[int]], p: Vector, eps: float = 1e-5) -> Vector:
    last = before = x
    for sampled in rounds:
        w, moves = weights(p, sampled), []
        for i in sampled:
            y = last.copy()
            for _ in range(K):
                y = y - ETA * gradient(i, y)
            moves.append(y - last)
        mean = w @ np.array(moves)
        total = sum(a * (move @ move) for a, move in zip(w, moves, strict=True))
        before, last = last, last + max(1.0, total / (2 * (mean @ mean + eps))) * mean
    return (before + last) / 2


def feddyn(x: Vector, rounds: list[list[int]], p: Vector, alpha: float = 0.3) -> Vector:
    bends, server_bend = np.zeros((N, x.size)), np.zeros_like(x)
    for sampled in rounds:
        ends = []
        for i in sampled:
            y = x.copy()
            for _ in range(K):
                y = y - ETA * (gradient(i, y) - bends[i] + alpha * (y - x))
            bends[i] -= alpha * (y - x)
            server_bend = server_bend - alpha * p[i] * (y - x)
            ends.append(y)
        x = weights(p, sampled) @ np.array(ends) - server_bend / alpha
    return x


def mimelite(x: Vector, rounds: list[list[int]], p: Vector, beta: float = 0.4) -> Vector:
    s = np.zeros_like(x)
    for sampled in rounds:
        w = weights(p, sampled)
        at_x = w @ np.array([gradient(i, x) for i in sampled])
        ends = []
        for i in sampled:
            y = x.copy()
            for _ in range(K):
                y = y - ETA * ((1 - beta) * s + beta * gradient(i, y))
            ends.append(y)
        x, s = w @ np.array(ends), (1 - beta) * s + beta * at_x
    return x


def fedsps(
    x: Vector, rounds: list[list[int]], p: Vector, divisor: float = 0.5, bound: float = 1.0
) -> Vector:
    for sampled in rounds:
        ends = []
        for i in sampled:
            y = x.copy()
            for _ in range(K):
                q = gradient(i, y)
                y = y - min(loss(i, y) / (divisor * (q @ q)), bound) * q
            ends.append(y)
        x = weights(p, sampled) @ np.array(ends)
    return x


def delta_sgd(x: Vector, rounds: list[list[int]], p: Vector) -> Vector:
    for sampled in rounds:
        ends = []
        for i in sampled:
            y, q, eta, theta = x - 0.2 * gradient(i, x), gradient(i, x), 0.2, 1.0
            before = x
            for _ in range(K - 1):
                q_new = gradient(i, y)
                smooth = 2.0 * np.linalg.norm(y - before) / (2 * np.linalg.norm(q_new - q))
                eta_new = min(smooth, np.sqrt(1 + 0.1 * theta) * eta)
                theta, eta, q, before = eta_new / eta, eta_new, q_new, y
                y = y - eta * q
            ends.append(y)
        x = weights(p, sampled) @ np.array(ends)
    return x


def autofed(
    x: Vector, rounds: list[list[int]], p: Vector, share_of_slope: float = 0.3, by: float = 1.25
) -> Vector:
    """A range test with unit directions, then directions cut at three times their usual length, a
    length that grows while training stays aligned and gets better, and a way back."""
    first = p @ np.array([loss(i, x) for i in range(len(p))])
    lowest, mean_loss, mean_cosine, grown = np.inf, np.nan, 0.0, 0
    beta, horizon, end, cut = 0.2, len(rounds), 0, 0.0
    length, steepest, moved = 0.01 * (1 + np.linalg.norm(x)), 0.0, np.zeros_like(x)
    own = gradients_at(x)
    c = p @ own
    g = c.copy()
    for t, sampled in enumerate(rounds):
        w = weights(p, sampled)
        left = min(1.0, 2 * (1 - (t - end) / (horizon - end))) if end else 1.0
        total, seen, now = np.zeros_like(x), [], 0.0
        for i, share in zip(sampled, w, strict=True):
            y, mean = x.copy(), np.zeros_like(x)
            for _ in range(K):
                q, now = gradient(i, y), now + share * loss(i, y) / K
                u = beta * (q - own[i] + c) + (1 - beta) * g
                y = y - length * left / K * u / max(np.linalg.norm(u), cut)
                mean = mean + q / K
            total, seen = total + share * (y - x), [*seen, mean]
        fresh = c + w @ (np.array(seen) - own[sampled])
        g = beta * fresh + (1 - beta) * g
        slope = -(fresh @ moved) / np.linalg.norm(moved) if moved.any() else 0.0
        if end:
            mean_loss = now if np.isnan(mean_loss) else (1 - beta) * mean_loss + beta * now
            mean_cosine = (1 - beta) * mean_cosine + beta * slope / np.linalg.norm(fresh)
            lowest = min(lowest, mean_loss)
            if grown > 0 and mean_loss > 1.2 * lowest:
                length, grown = length / by ** (grown / 2), -1
            elif (
                grown >= 0
                and t + 1 < (horizon + end) / 2
                and min(mean_cosine, slope / np.linalg.norm(fresh)) > 0.15
                and first / 4 < mean_loss == lowest
            ):
                length, grown = length * by, grown + 1
        elif moved.any():
            steepest = max(steepest, slope)
            if slope > share_of_slope * max(steepest, np.linalg.norm(fresh)):
                length = 2 * length
            else:
                end, cut = t + 1, 3 * np.linalg.norm(g) / (np.linalg.norm(total) / length)
                length = 3 * length
        c = c + p[sampled] @ (np.array(seen) - own[sampled])
        own[sampled] = seen
        x, moved = x + total, total
    assert end
    assert by == 1.25 or grown
    return x


# test id -> (name of the rule, reference, hyperparameters)
RIVALS: dict[str, tuple[str, Rule, dict[str, Any]]] = {
    "fednova": ("fednova", fednova, FULL),
    "fedexp": ("fedexp", fedexp, {**FULL, "adaptivity": 1e-5}),
    "feddyn": ("feddyn", feddyn, {**FULL, "regularization": 0.3}),
    "mimelite": ("mimelite", mimelite, {**FULL, "momentum": 0.4}),
    # steps of 1 make a small difference a large one in 12 rounds
    "fedsps": ("fedsps", partial(fedsps, bound=0.3), {"largest_learning_rate": 0.3}),
    # where the bound seldom counts
    "fedsps-polyak": (
        "fedsps",
        partial(fedsps, divisor=10.0, bound=0.3),
        {"polyak_divisor": 10.0, "largest_learning_rate": 0.3},
    ),
    "delta_sgd": ("delta_sgd", delta_sgd, {}),
    "autofed": ("autofed", autofed, {}),
    "autofed-grows": (
        "autofed",
        partial(autofed, share_of_slope=0.9, by=1.5),
        {"least_slope": 0.9, "later_growth": 1.5},
    ),
}

"""NumPy versions of the larger rules, each written from the formulas without sight of ours.

`rule(x, rounds, p) -> x` on full local batches, as in test_rules_against_numpy.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from helpers import SOFTMAX_CLIENTS, softmax_gradient

N = len(SOFTMAX_CLIENTS)
K = 5
ROUNDS = 12
ETA = 0.1

Vector = np.ndarray
Gradient = Callable[[int, Vector], Vector]
Rule = Callable[[Vector, list[list[int]], Vector], Vector]


def gradient(i: int, y: Vector) -> Vector:
    return softmax_gradient(y, *SOFTMAX_CLIENTS[i])


def gradients_at(x: Vector) -> Vector:
    """The gradient start: one row for each of the N clients."""
    return np.array([gradient(i, x) for i in range(N)])


def weights(p: Vector, sampled: list[int]) -> Vector:
    return p[sampled] / p[sampled].sum()


# --- section 2: the server-side adaptive rules --------------------------------------------------


def local_sgd(x: Vector, sampled: list[int], p: Vector) -> Vector:
    """The mean movement of FedAvg's clients."""
    mean = np.zeros_like(x)
    for i, w in zip(sampled, weights(p, sampled), strict=True):
        y = x.copy()
        for _ in range(K):
            y -= ETA * gradient(i, y)
        mean += w * (y - x)
    return mean


def fedavgm(
    x: Vector, rounds: list[list[int]], p: Vector, beta: float = 0.6, eta_g: float = 0.9
) -> Vector:
    m = np.zeros_like(x)
    for sampled in rounds:
        m = beta * m + local_sgd(x, sampled, p)
        x = x + eta_g * m
    return x


def server_adaptive(
    x: Vector,
    rounds: list[list[int]],
    p: Vector,
    second_moment: Callable[[Vector, Vector, float], Vector],
    eta_g: float = 0.1,
    b1: float = 0.7,
    b2: float = 0.9,
    tau: float = 1e-2,
) -> Vector:
    m, v = np.zeros_like(x), np.full_like(x, tau**2)
    for sampled in rounds:
        d = local_sgd(x, sampled, p)
        m = b1 * m + (1 - b1) * d
        v = second_moment(v, d**2, b2)
        x = x + eta_g * m / (np.sqrt(v) + tau)
    return x


def fedadam(x: Vector, rounds: list[list[int]], p: Vector) -> Vector:
    return server_adaptive(x, rounds, p, lambda v, d2, b2: b2 * v + (1 - b2) * d2)


def fedyogi(x: Vector, rounds: list[list[int]], p: Vector) -> Vector:
    return server_adaptive(x, rounds, p, lambda v, d2, b2: v - (1 - b2) * d2 * np.sign(v - d2))


def fedadagrad(x: Vector, rounds: list[list[int]], p: Vector) -> Vector:
    return server_adaptive(x, rounds, p, lambda v, d2, b2: v + d2)


def fedams(
    x: Vector,
    rounds: list[list[int]],
    p: Vector,
    eta_g: float = 0.1,
    b1: float = 0.7,
    b2: float = 0.9,
    eps: float = 1e-3,
) -> Vector:
    m, v, v_max = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
    for sampled in rounds:
        d = local_sgd(x, sampled, p)
        m = b1 * m + (1 - b1) * d
        v = b2 * v + (1 - b2) * d**2
        v_max = np.maximum(np.maximum(v_max, v), eps)
        x = x + eta_g * m / np.sqrt(v_max)
    return x


# --- section 3: the momentum family with variance reduction -------------------------------------


def fedavg_m_vr(
    x: Vector, rounds: list[list[int]], p: Vector, beta: float = 0.4, eta_g: float = 0.8
) -> Vector:
    g, x_before = p @ gradients_at(x), x
    for sampled in rounds:
        mean = np.zeros_like(x)
        for i, w in zip(sampled, weights(p, sampled), strict=True):
            y = x.copy()
            for _ in range(K):
                y -= ETA * (gradient(i, y) + (1 - beta) * (g - gradient(i, x_before)))
            mean += w * (y - x)
        x_before, x, g = x, x + eta_g * mean, -mean / (ETA * K)
    return x


def scaffold_m_vr(
    x: Vector, rounds: list[list[int]], p: Vector, beta: float = 0.4, eta_g: float = 0.8
) -> Vector:
    c_i = gradients_at(x)
    c = p @ c_i
    g, x_before = c.copy(), x
    for sampled in rounds:
        mean, c_next = np.zeros_like(x), c.copy()
        for i, w in zip(sampled, weights(p, sampled), strict=True):
            y, seen = x.copy(), np.zeros_like(x)
            for _ in range(K):
                here, before = gradient(i, y), gradient(i, x_before)
                y -= ETA * (here + beta * (c - c_i[i]) + (1 - beta) * (g - before))
                seen += here / K
            mean += w * (y - x)
            c_next += p[i] * (seen - c_i[i])
            c_i[i] = seen
        x_before, x, g, c = x, x + eta_g * mean, -mean / (ETA * K), c_next
    return x


# --- section 4: PAdaMFed ------------------------------------------------------------------------


def padamfed_vr(
    x: Vector,
    rounds: list[list[int]],
    p: Vector,
    momentum_rule: str = "printed",
    normalize: bool = True,
    eta: float | None = None,
    eta_g: float | None = None,
    beta: float | None = None,
) -> Vector:
    """What is None comes from the theorem; eta_g with the eta that is used."""
    num_rounds, sampled_count = len(rounds), len(rounds[0])
    gamma = (sampled_count * K) ** (1 / 3) / num_rounds ** (2 / 3)
    eta = 1 / (K * num_rounds) if eta is None else eta
    eta_g = gamma / (eta * K) if eta_g is None else eta_g
    beta = min(1.0, gamma) if beta is None else beta
    c_i = gradients_at(x)
    c = p @ c_i
    g, x_before = c.copy(), x
    for sampled in rounds:
        mean, change, direction = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
        c_next = c.copy()
        for i, w in zip(sampled, weights(p, sampled), strict=True):
            y, seen = x.copy(), np.zeros_like(x)
            for _ in range(K):
                here, before = gradient(i, y), gradient(i, x_before)
                u = here + beta * (c - c_i[i]) + (1 - beta) * (g - before)
                y -= eta * u / (np.linalg.norm(u) if normalize else 1.0)
                seen += here / K
                direction += w * u / K
            mean += w * (y - x)
            change += w * (seen - c_i[i])
            c_next += p[i] * (seen - c_i[i])
            c_i[i] = seen
        printed = beta * (change + c) + (1 - beta) * g
        g = printed if momentum_rule == "printed" else direction
        x_before, x, c = x, x + eta_g * mean, c_next
    return x


def padamfed_unnormalized(
    x: Vector,
    rounds: list[list[int]],
    p: Vector,
    eta: float = ETA,
    beta: float = 0.4,
    eta_g: float = 0.8,
) -> Vector:
    c_i = gradients_at(x)
    c = p @ c_i
    g = c.copy()
    for sampled in rounds:
        mean, change, c_next = np.zeros_like(x), np.zeros_like(x), c.copy()
        for i, w in zip(sampled, weights(p, sampled), strict=True):
            y, seen = x.copy(), np.zeros_like(x)
            for _ in range(K):
                here = gradient(i, y)
                y -= eta * (beta * (here - c_i[i] + c) + (1 - beta) * g)
                seen += here / K
            mean += w * (y - x)
            change += w * (seen - c_i[i])
            c_next += p[i] * (seen - c_i[i])
            c_i[i] = seen
        x, g, c = x + eta_g * mean, beta * (change + c) + (1 - beta) * g, c_next
    return x


def padamfed_dog(x: Vector, rounds: list[list[int]], p: Vector, beta: float = 0.3) -> Vector:
    x_start, squares = x, 0.0
    distance = 0.01 * (1 + float(np.linalg.norm(x)))
    c_i = gradients_at(x)
    c = p @ c_i
    g = c.copy()
    for t, sampled in enumerate(rounds):
        distance = max(distance, float(np.linalg.norm(x - x_start)))
        gamma = distance / squares**0.5 * (1 - t / len(rounds)) if t else distance
        eta = gamma / (K * beta**0.5)
        mean, change, c_next = np.zeros_like(x), np.zeros_like(x), c.copy()
        for i, w in zip(sampled, weights(p, sampled), strict=True):
            y, seen = x.copy(), np.zeros_like(x)
            for _ in range(K):
                here = gradient(i, y)
                u = beta * (here - c_i[i] + c) + (1 - beta) * g
                y -= eta * u / np.linalg.norm(u)
                seen += here / K
            mean += w * (y - x)
            change += w * (seen - c_i[i])
            c_next += p[i] * (seen - c_i[i])
            c_i[i] = seen
        g_bar = mean / (eta * K)
        squares += float(g_bar @ g_bar)
        x, g, c = x + gamma * g_bar, beta * (change + c) + (1 - beta) * g, c_next
    return x


# --- sections 5 and 6: FedMoS, STEM, MB-STORM ---------------------------------------------------


def fedmos(
    x: Vector,
    rounds: list[list[int]],
    p: Vector,
    eta: float = 0.05,
    eta_g: float = 0.9,
    beta: float = 0.4,
    a: float = 0.3,
    mu: float = 0.05,
) -> Vector:
    b = np.zeros_like(x)
    for sampled in rounds:
        d_bar = np.zeros_like(x)
        for i in sampled:
            y = y_before = x
            d = gradient(i, x)
            for k in range(K):
                if k > 0:
                    d = gradient(i, y) + (1 - a) * (d - gradient(i, y_before))
                y, y_before = y - eta * d - mu * (y - x), y
            d_bar += N * p[i] / len(sampled) * (y - x)
        b = beta * b + d_bar
        x = x + eta_g * b
    return x


def stem(
    x: Vector,
    rounds: list[list[int]],
    p: Vector,
    a: float = 0.3,
) -> Vector:
    u_bar = p @ gradients_at(x)
    x = x - ETA * u_bar
    for sampled in rounds:
        y_mean, u_mean = np.zeros_like(x), np.zeros_like(x)
        for i, w in zip(sampled, weights(p, sampled), strict=True):
            y, u, y_before = x, u_bar, x + ETA * u_bar
            for k in range(K):
                u = gradient(i, y) + (1 - a) * (u - gradient(i, y_before))
                if k < K - 1:
                    y_before, y = y, y - ETA * u
            y_mean += w * y
            u_mean += w * u
        u_bar = u_mean
        x = y_mean - ETA * u_bar
    return x


def mb_storm(
    x: Vector, rounds: list[list[int]], p: Vector, beta: float = 0.4, eta_g: float = 0.8
) -> Vector:
    g, x_before = p @ gradients_at(x), x
    for sampled in rounds:
        q = [gradient(i, x) - (1 - beta) * gradient(i, x_before) for i in sampled]
        g = weights(p, sampled) @ np.array(q) + (1 - beta) * g
        x_before, x = x, x - eta_g * ETA * K * g
    return x


# --- section 7: the local Adam family -----------------------------------------------------------


def local_adaptive(
    x: Vector,
    rounds: list[list[int]],
    p: Vector,
    rule: str,
    optimizer: str = "adam",
    eta: float = 0.02,
    eta_g: float = 0.9,
    b1: float = 0.7,
    b2: float = 0.9,
    eps: float = 1e-2,
    decay: float = 0.1,
) -> Vector:
    """All sampled clients are tracked; v is client state, m and v_max are of one round."""
    v_i = np.zeros((N, x.size), x.dtype)
    c_i = gradients_at(x) if rule == "fadamgc" else np.zeros_like(v_i)
    c = p @ c_i
    for sampled in rounds:
        mean, c_next = np.zeros_like(x), c.copy()
        for i, w in zip(sampled, weights(p, sampled), strict=True):
            y, m, v, v_max, seen = x.copy(), np.zeros_like(x), v_i[i], v_i[i], np.zeros_like(x)
            for _ in range(K):
                here = gradient(i, y)
                corrected = here + c - c_i[i] if rule == "fadamgc" else here
                m = b1 * m + (1 - b1) * corrected
                v = b2 * v + (1 - b2) * corrected**2
                v_max = np.maximum(v_max, v)
                step = m / (np.sqrt(v_max) + eps)
                if optimizer == "rmsprop":
                    step = corrected / (np.sqrt(v) + eps)
                if optimizer == "adamw":
                    step = step + decay * y
                if rule == "fa_nt":
                    step = step + c - c_i[i]
                y = y - eta * step
                seen += here / K
            v_i[i] = v
            mean += w * (y - x)
            fresh = {
                "local_adam": c_i[i],
                "fa_nt": c_i[i] - c + (x - y) / (K * eta),
                "fadamgc": seen,
            }[rule]
            c_next += p[i] * (fresh - c_i[i])
            c_i[i] = fresh
        x, c = x + eta_g * mean, c_next
    return x


FULL = {"client_learning_rate": ETA}
MOMENTUM = {**FULL, "server_learning_rate": 0.8, "momentum": 0.4}
SERVER = {**FULL, "server_learning_rate": 0.1, "first_decay": 0.7, "second_decay": 0.9}
LOCAL = {
    "client_learning_rate": 0.02,
    "server_learning_rate": 0.9,
    "first_decay": 0.7,
    "second_decay": 0.9,
    "adaptivity": 1e-2,
}

# test id -> (name of the rule, reference, hyperparameters)
REFERENCES: dict[str, tuple[str, Rule, dict[str, Any]]] = {
    "fedavgm": ("fedavgm", fedavgm, {**FULL, "server_learning_rate": 0.9, "momentum": 0.6}),
    "fedadagrad": (
        "fedadagrad",
        fedadagrad,
        # Adagrad has no second decay
        {**FULL, "server_learning_rate": 0.1, "first_decay": 0.7, "adaptivity": 1e-2},
    ),
    "fedadam": ("fedadam", fedadam, {**SERVER, "adaptivity": 1e-2}),
    "fedyogi": ("fedyogi", fedyogi, {**SERVER, "adaptivity": 1e-2}),
    "fedams": ("fedams", fedams, {**SERVER, "adaptivity": 1e-3}),
    "fedavg_m_vr": ("fedavg_m_vr", fedavg_m_vr, MOMENTUM),
    "scaffold_m_vr": ("scaffold_m_vr", scaffold_m_vr, MOMENTUM),
    "padamfed-not-normalized": (
        "padamfed",
        padamfed_unnormalized,
        {**MOMENTUM, "normalize": False},
    ),
    # eta_g > 1 multiplies float32's rounding: one case for each derived step, none with all three
    "padamfed_vr-printed": (
        "padamfed_vr",
        partial(padamfed_vr, eta=ETA),
        {"client_learning_rate": ETA, "momentum_rule": "printed"},
    ),
    "padamfed_vr-printed-derived-eta": (
        "padamfed_vr",
        partial(padamfed_vr, eta_g=1.5),
        {"server_learning_rate": 1.5, "momentum_rule": "printed"},
    ),
    "padamfed_vr-proved": (
        "padamfed_vr",
        partial(padamfed_vr, momentum_rule="proved", eta=0.03, eta_g=0.5, beta=0.4),
        {
            "client_learning_rate": 0.03,
            "server_learning_rate": 0.5,
            "momentum": 0.4,
        },
    ),
    "padamfed_dog": ("padamfed_dog", padamfed_dog, {}),
    "fedmos": (
        "fedmos",
        fedmos,
        {
            "client_learning_rate": 0.05,
            "server_learning_rate": 0.9,
            "momentum": 0.4,
            "local_momentum": 0.3,
            "proximal_strength": 0.05,
        },
    ),
    "stem": ("stem", stem, {**FULL, "local_momentum": 0.3}),
    "mb_storm": ("mb_storm", mb_storm, MOMENTUM),
    "local_adam": ("local_adam", partial(local_adaptive, rule="local_adam"), LOCAL),
    "local_adam-rmsprop": (
        "local_adam",
        partial(local_adaptive, rule="local_adam", optimizer="rmsprop"),
        {**LOCAL, "optimizer": "rmsprop"},
    ),
    "local_adam-adamw": (
        "local_adam",
        partial(local_adaptive, rule="local_adam", optimizer="adamw"),
        {**LOCAL, "optimizer": "adamw", "decoupled_weight_decay": 0.1},
    ),
    "fa_nt": ("fa_nt", partial(local_adaptive, rule="fa_nt"), LOCAL),
    "fadamgc-adam": ("fadamgc", partial(local_adaptive, rule="fadamgc"), LOCAL),
    "fadamgc-rmsprop": (
        "fadamgc",
        partial(local_adaptive, rule="fadamgc", optimizer="rmsprop"),
        {**LOCAL, "optimizer": "rmsprop"},
    ),
    "fadamgc-adamw": (
        "fadamgc",
        partial(local_adaptive, rule="fadamgc", optimizer="adamw"),
        {**LOCAL, "optimizer": "adamw", "decoupled_weight_decay": 0.1},
    ),
}

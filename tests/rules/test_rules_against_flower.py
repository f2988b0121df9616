"""The server-side rules against Flower's own strategies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import strategy as flower
from helpers import make_plan

from fedopt_flwr.algorithm import Reply
from fedopt_flwr.algorithms import ALGORITHMS, FedAdagrad, FedAdam, FedYogi


def answers(deltas: list[np.ndarray], x: np.ndarray) -> list[Any]:
    ok = Status(Code.OK, "")
    return [(None, FitRes(ok, ndarrays_to_parameters([x + d]), 1, {})) for d in deltas]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (FedAdagrad, flower.FedAdagrad),
        (FedYogi, flower.FedYogi),
        (FedAdam, flower.FedAdam),
    ],
)
def test_server_rules_against_flowers_own(ours: Any, theirs: Any) -> None:
    """Alike but for two things: Flower starts v at 0, and its FedAdam corrects the step."""
    x, rng = np.array([1.0, -2.0, 0.5]), np.random.default_rng(0)
    rates = {"eta": 0.1, "beta_1": 0.6, "tau": 1e-2}
    if ours is not FedAdagrad:
        rates["beta_2"] = 0.9
    else:
        del rates["beta_1"]
    other = theirs(initial_parameters=ndarrays_to_parameters([x]), **rates)
    hyperparameters = {"first_decay": rates.get("beta_1", 0.0), "adaptivity": 1e-2}
    rule = ours(
        server_learning_rate=0.1,
        **hyperparameters,
        **({"second_decay": 0.9} if "beta_2" in rates else {}),
    )
    state = rule.init_server(torch.tensor(x), make_plan(2, [1, 1]))
    state = state.replace(second_moment=torch.zeros(3, dtype=torch.float64))
    for server_round in range(1, 6):
        deltas = [rng.normal(size=3), rng.normal(size=3)]
        found, _ = other.aggregate_fit(server_round, answers(deltas, x), [])
        theirs_x = parameters_to_ndarrays(found)[0]
        replies = [Reply(i, {"delta": torch.tensor(d)}, 0.5, 0.5, 1) for i, d in enumerate(deltas)]
        following = rule.server_update(state, replies)
        step = following["model"].numpy() - state["model"].numpy()
        if ours is FedAdam:
            step *= np.sqrt(1 - 0.9 ** (server_round + 1)) / (1 - 0.6 ** (server_round + 1))
        np.testing.assert_allclose(step, theirs_x - x, rtol=1e-6)
        x = theirs_x
        state = following.replace(model=torch.tensor(x))


def test_fedavgm_is_flowers_own() -> None:
    x, rng = np.array([1.0, -2.0, 0.5]), np.random.default_rng(1)
    other = flower.FedAvgM(
        initial_parameters=ndarrays_to_parameters([x]),
        server_learning_rate=0.5,
        server_momentum=0.6,
    )
    rule = ALGORITHMS["fedavgm"](server_learning_rate=0.5, momentum=0.6)
    state = rule.init_server(torch.tensor(x), make_plan(2, [1, 1]))
    for server_round in range(1, 6):
        deltas = [rng.normal(size=3), rng.normal(size=3)]
        found, _ = other.aggregate_fit(server_round, answers(deltas, x), [])
        replies = [Reply(i, {"delta": torch.tensor(d)}, 0.5, 0.5, 1) for i, d in enumerate(deltas)]
        state = rule.server_update(state, replies)
        x = parameters_to_ndarrays(found)[0]
        np.testing.assert_allclose(state["model"].numpy(), x, rtol=1e-9)

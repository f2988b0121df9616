"""Parameters that stay with each client: personal heads, and batch norm's own weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    CLASSES,
    FEATURES,
    WITH_CONTROL_VARIATES,
    At,
    open_run,
    small_config,
    softmax_clients,
)
from streams import served
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from fedopt_flwr import ConfigError, FedoptError, ModelError, clients, resume, simulate, strategies
from fedopt_flwr.algorithms import ALGORITHMS, MBSTORM
from fedopt_flwr.data import as_client_data
from fedopt_flwr.engines.in_process import run_in_process
from fedopt_flwr.engines.pairs import run_pair
from fedopt_flwr.flower import MemoryStates
from fedopt_flwr.training.flat_model import LOCAL_PARAMETERS, FlatModel
from fedopt_flwr.training.objective import ModelObjective

RULES = (
    "scaffold_m",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedavg", "padamfed")),
)
SIZES = [30, 12, 21]
PARTS = [TensorDataset(torch.from_numpy(x), torch.from_numpy(y)) for x, y in softmax_clients(SIZES)]


class TwoParts(nn.Module):
    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.body = nn.Linear(FEATURES, 4)
            self.head = nn.Linear(4, CLASSES)
        self.head.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


def config_of(rule: str = "fedavg", rate: float | None = 0.1, **sections: Any) -> dict[str, Any]:
    config = small_config(algorithm={"name": rule}, **sections)
    config["federation"] |= {"local_parameters": ["head.*"], "num_rounds": 3}
    config["training"] |= {} if rate is None else {"local_learning_rate": rate}
    return config


def test_fedavg_against_a_few_lines_of_torch() -> None:
    """Each client's head takes plain SGD's steps; the bodies are averaged."""
    config = config_of(rate=0.3)
    config["algorithm"] |= {"client_learning_rate": 0.1}
    config["training"] |= {"batch_size": 0, "local_steps": 2, "weight_decay": 0.01}
    config["federation"]["weighting"] = "examples"
    run = open_run(config, PARTS, TwoParts)
    models = [TwoParts() for _ in PARTS]
    for _ in range(3):
        for model, part in zip(models, PARTS, strict=True):
            groups = [
                {"params": model.body.parameters(), "lr": 0.1},
                {"params": model.head.parameters(), "lr": 0.3},
            ]
            optimizer = torch.optim.SGD(groups, weight_decay=0.01)
            for _ in range(2):
                optimizer.zero_grad()
                x, y = part.tensors
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        shares = np.array(SIZES) / sum(SIZES)
        with torch.no_grad():
            for each in zip(*(model.body.parameters() for model in models), strict=True):
                mean = sum(float(s) * p for s, p in zip(shares, each, strict=True))
                for parameter in each:
                    parameter.copy_(mean)
    body = torch.cat([p.detach().reshape(-1) for p in models[0].body.parameters()])
    assert torch.allclose(run.strategy.state["model"], body, atol=1e-6)
    for i, model in enumerate(models):
        head = torch.cat([p.detach().reshape(-1) for p in model.head.parameters()])
        assert torch.allclose(run.client_vector(i, LOCAL_PARAMETERS), head, atol=1e-6)


@pytest.mark.parametrize("rule", ALGORITHMS)
def test_a_rate_of_zero_is_a_frozen_head(rule: str) -> None:
    """The vector, its norms, momentum and control variates are of the body alone."""
    still = simulate(config_of(rule, rate=0.0), TwoParts, PARTS)
    plain = small_config(algorithm={"name": rule})
    plain["federation"] |= {"num_rounds": 3}
    frozen = simulate(plain, lambda: TwoParts(frozen=True), PARTS)
    assert still.parameters.tobytes() == frozen.parameters.tobytes()
    assert still.parameters.size == 4 * (FEATURES + 1)


@pytest.mark.parametrize("rule", WITH_CONTROL_VARIATES)
def test_c_stays_the_mean_with_local_parameters(rule: str) -> None:
    run = open_run(config_of(rule), PARTS, TwoParts)
    c = run.strategy.state["control_variate"].double()
    assert torch.allclose(run.mean_control_variate(), c, atol=1e-6)
    heads = [run.client_vector(i, LOCAL_PARAMETERS) for i in range(3)]
    assert not torch.equal(heads[0], heads[1])


@pytest.mark.parametrize("rule", RULES)
def test_over_grpc_ends_with_the_same_bits(rule: str, tmp_path: Path) -> None:
    config = config_of(rule)
    config |= {"data": {"name": "digits", "holdout": 0.2}, "evaluation": {"on_clients": True}}
    config["federation"]["local_parameters"] = ["2.*"]
    config["model"] = {"options": {"hidden": [8]}}
    config["federation"]["clients_per_round"] = 2
    alone = simulate(config)
    result = served(config, tmp_path)
    assert result.parameters.tobytes() == alone.parameters.tobytes()
    assert [r.on_clients for r in result.rounds] == [r.on_clients for r in alone.rounds]


@pytest.mark.parametrize("rule", RULES)
def test_a_resumed_run_continues_with_each_clients_own(rule: str, tmp_path: Path) -> None:
    found = []
    for cut in (False, True):
        folder = tmp_path / str(cut)
        config = config_of(rule, output={"directory": folder, "checkpoint_every": 1})
        config |= {"data": {"holdout": 0.3}, "evaluation": {"on_clients": True}}
        if not cut:
            found.append(simulate(config, TwoParts, PARTS))
            continue

        def stop() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            simulate(config, TwoParts, PARTS, listener=At(2, stop))
        found.append(resume(folder, TwoParts, PARTS))
    assert found[0].parameters.tobytes() == found[1].parameters.tobytes()
    assert found[0].rounds[-1].on_clients == found[1].rounds[-1].on_clients


@pytest.mark.parametrize("rule", ["FedAvg", "ScaffoldM", "PAdaMFed"])
def test_in_ones_own_app_it_is_the_same(rule: str) -> None:
    sizes = {"num_clients": 3, "clients_per_round": 3, "num_rounds": 3}
    strategy = getattr(strategies, rule)(
        TwoParts(),
        **sizes,
        local_steps=2,
        batch_size=4,
        local_parameters=["head.*"],
        local_learning_rate=0.1,
    )
    kind = getattr(clients, f"{rule}Client")
    members = [kind(TwoParts(), PARTS[i], client_id=i, device="cpu") for i in range(3)]
    run_in_process(strategy, members, MemoryStates(), num_rounds=3)
    name = next(n for n, kind in ALGORITHMS.items() if kind.__name__ == rule)
    expected = simulate(config_of(name), TwoParts, PARTS)
    assert strategy.rounds[-1].failures == 0
    assert strategy.model.vector.numpy().tobytes() == expected.parameters.tobytes()


def test_own_models_are_evaluated_beside_the_global_one() -> None:
    """Clients whose labels contradict each other: only their own heads can be right."""
    x = torch.randn(60, FEATURES, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    parts = [TensorDataset(x, y), TensorDataset(x, 1 - y)]
    config = config_of(rate=1.0, data={"holdout": 0.3}, evaluation={"on_clients": True})
    config["federation"] |= {"num_clients": 2, "clients_per_round": 2, "num_rounds": 40}
    config["algorithm"] |= {"client_learning_rate": 0.5}
    found = simulate(config, TwoParts, parts).rounds[-1].on_clients
    assert found["own_spread"]["accuracy"]["worst"] > 0.8
    assert found["spread"]["accuracy"]["mean"] < 0.7


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x))


def test_fedbn_keeps_statistics_and_weights_of_batch_norm_at_home() -> None:
    config = config_of(data={"holdout": 0.3}, evaluation={"on_clients": True})
    config["federation"] |= {"local_parameters": ["norm.*"], "buffers": "local"}
    run = open_run(config, PARTS, Norm)
    state = run.states.load(0, 3)
    assert set(state) == {LOCAL_PARAMETERS, "buffers.float32", "buffers.int64"}
    assert len(state[LOCAL_PARAMETERS]) == 2 * FEATURES
    assert run.strategy.model.size == CLASSES * (FEATURES + 1)


def test_the_servers_model_has_the_initial_values() -> None:
    result = simulate(config_of(), TwoParts, PARTS, PARTS[0])
    assert torch.equal(result.model.head.weight, TwoParts().head.weight)
    outputs = result.model(PARTS[0].tensors[0])
    loss = float(functional.cross_entropy(outputs, PARTS[0].tensors[1]).detach())
    assert result.rounds[-1].test_loss == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    ("patterns", "text"),
    [
        (["tail.*"], r"'tail.\*' matches no trainable parameter; they are body.weight, body.bias"),
        (["*"], r"\['\*'\] match all trainable parameters .*leave some out"),
        (["head.*", "body.*"], "match all trainable parameters"),
    ],
)
def test_patterns_that_cannot_be_are_refused(patterns: list[str], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        FlatModel(TwoParts(), local=patterns)
    config = config_of()
    config["federation"]["local_parameters"] = patterns
    with pytest.raises(FedoptError, match=r"federation.local_parameters"):
        simulate(config, TwoParts, PARTS)


def test_rates_and_combinations_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'padamfed' derives its step sizes, so .* need one"):
        simulate(config_of("padamfed", rate=None), TwoParts, PARTS)
    without = config_of()
    del without["federation"]["local_parameters"]
    with pytest.raises(ConfigError, match=r"got 0.1 without federation.local_parameters"):
        simulate(without, TwoParts, PARTS)
    with pytest.raises(ConfigError, match=r"got true beside federation.local_parameters"):
        simulate(config_of(output={"diagnostics": True}), TwoParts, PARTS)


def test_the_rules_rate_is_the_default() -> None:
    config = config_of(rate=None)
    config["algorithm"] |= {"client_learning_rate": 0.2}
    named = config_of(rate=0.2)
    named["algorithm"] |= {"client_learning_rate": 0.2}
    config |= {"data": {"holdout": 0.3}, "evaluation": {"on_clients": True}}
    named |= {"data": {"holdout": 0.3}, "evaluation": {"on_clients": True}}
    one, other = (simulate(c, TwoParts, PARTS).rounds[-1].on_clients for c in (config, named))
    assert one == other


def test_in_ones_own_app_clients_report_their_own_model_too() -> None:
    x = torch.randn(60, FEATURES, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    parts = [TensorDataset(x, y), TensorDataset(x, 1 - y)]
    seen: list[list[tuple[int, dict[str, Any]]]] = []
    strategy = strategies.FedAvg(
        TwoParts(),
        num_clients=2,
        clients_per_round=2,
        num_rounds=30,
        local_parameters=["head.*"],
        local_learning_rate=1.0,
        client_learning_rate=0.5,
        fraction_evaluate=1.0,
        evaluate_metrics_aggregation_fn=lambda metrics: seen.append(metrics) or {},
    )
    members = [
        clients.FedAvgClient(
            TwoParts(),
            part,
            client_id=i,
            device="cpu",
            metric=lambda o, t: (o.argmax(1) == t).float().mean(),
        )
        for i, part in enumerate(parts)
    ]
    run_pair(strategy, [member.to_client() for member in members], 30)
    assert len(seen) == 30
    last = [own for _, own in seen[-1]]
    assert min(own["own_metric"] for own in last) > 0.8
    assert np.mean([own["metric"] for own in last]) < 0.7


def test_heads_take_a_step_a_batch_under_mb_storm() -> None:
    """F = x·h with x = x⁻ = 1, K = 2 and a rate of 0.1: h is 1, then 0.9, and 0.8 at the end."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x, self.head = (nn.Parameter(torch.ones(1)) for _ in range(2))

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs * self.x * self.head

    model = FlatModel(Product(), local=["head"])
    data = as_client_data(TensorDataset(torch.ones(1, 1), torch.zeros(1, 1)))
    objective = ModelObjective(
        model,
        lambda outputs, targets: outputs.mean(),
        data,
        [torch.tensor([0])] * 2,
        local_learning_rate=0.1,
        compares_points=True,
    )
    one = torch.ones(1)
    rule = MBSTORM(client_learning_rate=0.1, momentum=0.2)
    upload, _ = rule.client_update({"model": one, "previous_model": one}, {}, objective)
    assert upload["gradient_change"].item() == pytest.approx(0.95 - 0.8 * 0.95)
    assert model.local_vector.item() == pytest.approx(0.8)


@pytest.mark.parametrize("rule", ["fedmos", "stem", "fedavg_m_vr", "scaffold_m_vr"])
def test_every_rule_trains_the_heads_with_a_single_step_too(rule: str) -> None:
    config = config_of(rule)
    config["training"] |= {"local_steps": 1}
    run = open_run(config, PARTS, TwoParts)
    start = FlatModel(TwoParts(), local=["head.*"]).local_vector
    assert all(not torch.equal(run.client_vector(i, LOCAL_PARAMETERS), start) for i in range(3))

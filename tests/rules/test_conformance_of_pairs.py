"""`fedopt verify`: the command, and the suite for any Flower strategy with its client."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from flwr.client import NumPyClient
from flwr.common import ndarrays_to_parameters
from flwr.server import strategy as flower
from torch.nn import functional

from fedopt_flwr import clients, strategies
from fedopt_flwr.conformance import verify_pair


class PlainClient(NumPyClient):
    """A user's own client: five full-batch steps."""

    def __init__(self, model, dataset, client_id):
        self._model, (self._inputs, self._targets) = model, dataset.tensors

    def fit(self, parameters, config):
        self._model.load_state_dict(
            {n: torch.tensor(a) for n, a in zip(self._model.state_dict(), parameters, strict=True)}
        )
        optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            functional.cross_entropy(self._model(self._inputs), self._targets).backward()
            optimizer.step()
        return [v.numpy() for v in self._model.state_dict().values()], len(self._targets), {}


class ForgetfulClient(PlainClient):
    def fit(self, parameters, config):
        return parameters, len(self._targets), {}


def plain_strategy(model, kind=flower.FedAvg, *, num_clients, clients_per_round, num_rounds):
    initial = ndarrays_to_parameters([p.detach().numpy() for p in model.parameters()])
    return kind(
        initial_parameters=initial,
        fraction_evaluate=0.0,
        min_fit_clients=clients_per_round,
        min_available_clients=num_clients,
    )


class OneReplyOnly(flower.FedAvg):
    """Counts one reply a round, as a strategy does that keeps only the last one. Which one is drawn
    from a fixed sequence: Flower's own order is sometimes the same in two runs of 4 rounds."""

    dice: ClassVar[random.Random]

    def aggregate_fit(self, server_round, results, failures):
        ordered = sorted(results, key=lambda result: result[0].cid)
        return super().aggregate_fit(server_round, [self.dice.choice(ordered)], failures)


def failed_pair(make_strategy: Any, make_client: Any) -> list[str]:
    outcomes = verify_pair(make_strategy, make_client)
    return [outcome.check for outcome in outcomes if outcome.verdict != "passed"]


def test_flowers_own_fedavg_with_a_plain_client_conforms() -> None:
    assert failed_pair(plain_strategy, PlainClient) == []


@pytest.mark.parametrize("name", ["FedAvg", "ScaffoldM", "PAdaMFed", "FAdamGC"])
def test_our_strategies_with_their_clients_conform(name: str) -> None:
    assert failed_pair(getattr(strategies, name), getattr(clients, f"{name}Client")) == []


@pytest.mark.parametrize("kind", [flower.FedAdam, flower.FedYogi, flower.FedAdagrad])
def test_flowers_adaptive_strategies_conform(kind: Any) -> None:
    def make(model: Any, **sizes: int) -> Any:
        return plain_strategy(model, partial(kind, eta=0.03), **sizes)

    assert failed_pair(make, PlainClient) == []


def test_a_strategy_that_waits_for_more_clients_is_told_so() -> None:
    def patient(model: Any, **sizes: int) -> Any:
        return plain_strategy(model, **{**sizes, "num_clients": 10})

    outcomes = verify_pair(patient, PlainClient)
    assert all(outcome.verdict == "failed" for outcome in outcomes)
    assert "waits for 10 clients; the 4 of this run are all connected" in outcomes[0].note


def test_clients_of_a_pair_are_asked_one_after_another() -> None:
    inside: list[int] = []

    class Watched(PlainClient):
        def fit(self, parameters, config):
            inside.append(len(inside))
            time.sleep(0.002)  # for others to come in, if any may
            assert inside == [0]
            inside.clear()
            return super().fit(parameters, config)

    assert failed_pair(plain_strategy, Watched) == []


def test_what_a_client_failed_with_is_told() -> None:
    class Wrong(PlainClient):
        def fit(self, parameters, config):
            raise TypeError("no field 'loss'")

    for make, client, told in (
        (plain_strategy, Wrong, "a client's fit failed: TypeError: no field 'loss'"),
        (strategies.FedAvg, clients.FedProxClient, "take the client of that rule"),
    ):
        notes = {o.check: o.note for o in verify_pair(make, client)}
        assert told in notes["the mean loss falls"]


def test_faults_of_a_pair_are_caught() -> None:
    def one_only(model: Any, **sizes: int) -> Any:
        return plain_strategy(model, OneReplyOnly, **sizes)

    OneReplyOnly.dice = random.Random(0)
    assert "the same run gives the same result" in failed_pair(one_only, PlainClient)
    assert "the mean loss falls" in failed_pair(plain_strategy, ForgetfulClient)

    class Greedy(flower.FedAvg):
        def aggregate_fit(self, server_round, results, failures):
            if failures:
                return None, {}
            return super().aggregate_fit(server_round, results, failures)

    def greedy(model: Any, **sizes: int) -> Any:
        return plain_strategy(model, Greedy, **sizes)

    assert failed_pair(greedy, PlainClient) == ["a client that fails stops nobody"]


def verify(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedopt_flwr", "verify", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_the_command_says_what_failed_and_by_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from fedopt_flwr.algorithms import FedAvg\n"
        "class Mine(FedAvg):\n"
        "    name = 'mine'\n"
        "    def server_update(self, state, replies):\n"
        "        return state.replace(model=state['model'] + replies[-1].upload['delta'])\n"
        "class Noisy(FedAvg):\n"
        "    name = 'noisy'\n"
        "    def server_update(self, state, replies):\n"
        "        raise ValueError('[red]is text[/]')\n"
        "class Good(FedAvg):\n"
        "    name = 'good'\n"
    )
    bad = verify("mine:Mine", cwd=tmp_path)
    assert bad.returncode == 1
    assert "every reply counts" in bad.stdout
    assert "the reply of client 0 of 3 changes nothing" in bad.stdout
    assert "[red]is text[/]" in verify("mine:Noisy", cwd=tmp_path).stdout  # no markup
    good = verify("mine:Good", cwd=tmp_path)
    assert good.returncode == 0, good.stdout + good.stderr
    assert "0 failed" in good.stdout
    unknown = verify("scafold", cwd=tmp_path)
    assert unknown.returncode == 2
    assert "did you mean 'scaffold'" in unknown.stderr
    lone = verify("--strategy", "mine:Good", cwd=tmp_path)
    assert lone.returncode == 2
    assert "must be the module:attribute that makes a client" in " ".join(lone.stderr.split())


def test_the_example_of_a_custom_rule_conforms() -> None:
    folder = Path(__file__).parents[2] / "examples" / "custom_algorithm"
    module = next(path.stem for path in folder.glob("*.py"))
    result = verify(f"{module}:SignFedAvg", cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr

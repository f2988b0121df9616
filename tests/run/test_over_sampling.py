"""More clients are asked than count: those that reply first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.common import Code
from helpers import SOFTMAX_DATA, At, checkpointed, linear_model, open_run, softmax_config
from streams import ClientThread, ServerThread, make_config, served

from fedopt_flwr import ConfigError, RunConfig, clients, resume, simulate, strategies
from fedopt_flwr.algorithm import Plan, ServerState
from fedopt_flwr.algorithms import FedAvg
from fedopt_flwr.engines.pairs import run_pair
from fedopt_flwr.flower.members import Members
from fedopt_flwr.rounds.participation import Participation
from fedopt_flwr.rounds.record import TOO_LATE
from fedopt_flwr.rounds.sampling import sample_uniform
from fedopt_flwr.run.hosts import ClientHost

RULES = ("fedavg", "scaffold_m", "padamfed")


@pytest.mark.parametrize("rule", RULES)
def test_in_process_the_first_of_the_drawn_order_count(rule: str) -> None:
    config = softmax_config(rule, sampled=2, rounds=8)
    config["federation"] |= {"over_sample": 1.7}  # 4 of 6
    run = open_run(config, SOFTMAX_DATA)
    for record in run.records:
        if record.round:
            order = sample_uniform(range(6), 0, record.round)
            assert record.clients == sorted(order[:2])
            assert sorted(e["client"] for e in record.errors) == sorted(order[2:4])
            assert {e["error"] for e in record.errors} == {TOO_LATE}
            assert (record.failures, record.num_late) == (2, 2)
    if rule != "fedavg":
        c = run.strategy.state["control_variate"].double()
        assert np.allclose(run.mean_control_variate().numpy(), c.numpy(), atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_those_that_count_end_as_if_only_they_had_been_asked(rule: str) -> None:
    config = softmax_config(rule, sampled=2, rounds=8)
    alone = simulate(config, linear_model, SOFTMAX_DATA)
    config["federation"] |= {"over_sample": 2.0}
    more = simulate(config, linear_model, SOFTMAX_DATA)
    assert more.parameters.tobytes() == alone.parameters.tobytes()
    assert more.summary["late"] == more.summary["failures"] == 16


class Failing:
    def __init__(self, client: Any) -> None:
        self._client = client

    def fit(self, parameters: Any, config: dict[str, Any]) -> Any:
        return [], 0, {"error": "out of order"}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def test_who_fails_makes_room_for_the_next_in_the_drawn_order() -> None:
    config = softmax_config("fedavg", sampled=2, rounds=6)
    config["federation"] |= {"over_sample": 1.5}
    wrap: Callable[[Any], Any] = lambda c: Failing(c) if c.client_id == 3 else c  # noqa: E731
    for record in open_run(config, SOFTMAX_DATA, wrap=wrap).records:
        order = [i for i in sample_uniform(range(6), 0, record.round)[:3] if i != 3]
        assert record.clients == sorted(order[:2])


@pytest.mark.parametrize(
    ("federation", "text"),
    [
        ({"over_sample": 0.5}, "federation.over_sample: got 0.5"),
        ({"over_sample": 1.6}, "more than num_clients .6. would be asked for 4.*1 and 1.5"),
        ({"over_sample": 1.2, "sampler": "adaptive"}, "over_sample: got 1.2 beside sampler"),
    ],
)
def test_what_cannot_be_asked_is_refused(federation: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        RunConfig(federation={"num_clients": 6, "clients_per_round": 4, **federation})


def test_how_many_are_asked_is_rounded_up_but_not_by_the_last_bit() -> None:
    numbers = {"num_clients": 30, "clients_per_round": 10}
    asked = [RunConfig(federation=numbers | {"over_sample": f}) for f in (1.0, 1.1, 1.11, 1.3)]
    assert [config.federation.num_asked for config in asked] == [10, 11, 12, 13]


class Slow:
    """Trains only once a test lets it."""

    def __init__(self, client: Any, may: threading.Event) -> None:
        self._client, self._may = client, may
        self.rounds: list[int] = []

    def fit(self, parameters: Any, config: dict[str, Any]) -> Any:
        self.rounds.append(config["fedopt.round"])
        if config["fedopt.phase"] == "train":
            assert self._may.wait(60)
        return self._client.fit(parameters, config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


@pytest.mark.parametrize("rule", RULES)
def test_one_slow_client_does_not_set_the_pace_over_grpc(rule: str, tmp_path: Path) -> None:
    """It is at work from its first round to the last, and is asked nothing meanwhile."""
    may, slow = threading.Event(), []

    def on_round(record: Any) -> None:
        if record.round == 8:
            may.set()

    def wrap(client: Any) -> Any:
        slow.append(Slow(client, may))
        return slow[-1]

    config = make_config(rule, num_clients=4, clients_per_round=3, over_sample=1.3, num_rounds=9)
    with ServerThread(config, on_round=on_round) as server:
        host = ClientHost(server.config, range(4))
        clients = [ClientThread(server, i, tmp_path, host=host) for i in range(3)]
        clients.append(ClientThread(server, 3, tmp_path, host=host, wrap=wrap))
        result = server.result()
    for client in clients:
        client.join()
    trained = [number for number in slow[0].rounds if number]
    assert trained[0] == 1
    for record in result.rounds:
        if record.round in range(1, 9):
            assert record.clients == [0, 1, 2], record
    late = [record for record in result.rounds if record.num_late]
    assert [record.round for record in late][:1] == [1]
    assert [e["client"] for e in late[0].errors] == [3]
    assert result.summary["diverged_at"] is None


def test_over_grpc_a_round_waits_for_as_many_replies_as_count(tmp_path: Path) -> None:
    """With every client free and quick, S of them count in each round."""
    config = make_config("scaffold_m", num_clients=4, clients_per_round=2, over_sample=2.0)
    result = served(config, tmp_path)
    assert [len(r.clients) for r in result.rounds if r.round] == [2] * 3


@pytest.mark.parametrize("rule", ["FedAvg", "ScaffoldM", "PAdaMFed"])
def test_in_ones_own_app_the_first_of_the_drawn_order_count(rule: str) -> None:
    sizes = {"num_clients": 6, "clients_per_round": 2, "num_rounds": 5}
    found = []
    for factor in (1.0, 2.0):
        strategy = getattr(strategies, rule)(linear_model(), **sizes, over_sample=factor)
        kind = getattr(clients, f"{rule}Client")
        members = [
            kind(linear_model(), data, client_id=i, device="cpu")
            for i, data in enumerate(SOFTMAX_DATA)
        ]
        run_pair(strategy, [member.to_client() for member in members], 5)
        found.append((strategy.model.vector.numpy().tobytes(), strategy.rounds[-1]))
    assert found[0][0] == found[1][0]
    assert (found[0][1].failures, found[1][1].num_late) == (0, 2)


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    found = []
    for cut in (False, True):
        folder = tmp_path / str(cut)
        config = checkpointed(folder)
        config["federation"] |= {"over_sample": 1.5}
        if cut:
            with pytest.raises(KeyboardInterrupt):
                simulate(config, listener=At(6, interrupt))
        found.append(resume(folder) if cut else simulate(config))
    assert found[0].parameters.tobytes() == found[1].parameters.tobytes()
    assert found[0].summary["late"] == found[1].summary["late"] == 2 * 9


def interrupt() -> None:
    raise KeyboardInterrupt


class Poisoned:
    """Answers at once, with numbers that are not finite."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def fit(self, parameters: Any, config: dict[str, Any]) -> Any:
        arrays, count, report = self._client.fit(parameters, config)
        if config["fedopt.phase"] == "train":
            arrays = [np.full_like(array, np.nan) for array in arrays]
        return arrays, count, report

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class Late(Poisoned):
    """Takes a moment longer than the others."""

    def fit(self, parameters: Any, config: dict[str, Any]) -> Any:
        time.sleep(0.2)
        return self._client.fit(parameters, config)


@pytest.mark.filterwarnings(r"ignore:client \d. failed in:fedopt_flwr.errors.FedoptWarning")
def test_replies_that_are_of_no_use_close_no_round(tmp_path: Path) -> None:
    config = make_config("scaffold_m", num_clients=4, clients_per_round=2, over_sample=2.0)
    with ServerThread(config) as server:
        host = ClientHost(server.config, range(4))
        clients = [
            ClientThread(server, i, tmp_path, host=host, wrap=Poisoned if i < 2 else Late)
            for i in range(4)
        ]
        result = server.result()
    for client in clients:
        client.join()
    assert [r.clients for r in result.rounds if r.round] == [[2, 3]] * 3


def test_a_round_waits_for_enough_that_are_free() -> None:
    """Two of three are at work for an earlier round, and one of them comes back."""
    members = Members(RunConfig(federation=SIZES_OF_3), lambda: waited.append(free()), {})
    proxies: dict[int, Any] = {i: SimpleNamespace(cid=str(i), is_busy=i > 0) for i in range(3)}
    here = dict(proxies)
    manager: Any = SimpleNamespace(all=lambda: {proxy.cid: proxy for proxy in here.values()})
    members._ids = {proxy.cid: i for i, proxy in proxies.items()}
    members.refresh(manager)
    waited: list[None] = []

    def free() -> None:
        if len(waited) == 2:
            proxies[1].is_busy = False

    members.await_free(manager, 2)
    assert len(waited) == 3
    assert [members.is_free(i) for i in range(4)] == [True, True, False, False]
    members.await_free(manager, 1)
    assert len(waited) == 3
    proxies[1].is_busy = True
    del here[2]
    members.refresh(manager)  # one is lost, while another is at work
    facts = {"client_id": 2, "num_examples": 5}
    told = SimpleNamespace(status=SimpleNamespace(code=Code.OK), properties=facts)
    here[2] = SimpleNamespace(cid="2", is_busy=False, get_properties=lambda *_, **__: told)
    members.await_free(manager, 2)
    assert len(waited) == 4


SIZES_OF_3 = {"num_clients": 3, "clients_per_round": 2}


def test_the_first_ranks_are_those_of_the_first_drawn() -> None:
    """So that as many of those that count have a role of few, such as S̃ of S."""
    federation = RunConfig(
        federation={"num_clients": 6, "clients_per_round": 2, "over_sample": 2.0}
    ).federation
    ones = dict.fromkeys(range(6), 1)
    plan = Plan(6, 2, 20, ones, ones, dict.fromkeys(range(6), 1 / 6))
    participation = Participation(FedAvg(), federation, plan)
    for number in range(1, 20):
        state = ServerState(plan, {})
        chosen = participation.choose(state, number, lambda i: True)
        first = sample_uniform(range(6), 0, number)[:2]
        ranks = {i: participation.rank(i) for i in chosen}
        assert {i for i, rank in ranks.items() if rank < 2} == set(first)
        assert sorted(ranks.values()) == [0, 1, 2, 3]

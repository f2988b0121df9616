"""Samplers are unbiased, E[w_i] = p_i, by enumeration and by many draws; and work in runs."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
import torch
from helpers import OpenRun, as_datasets, linear_model, open_run, softmax_clients

from fedopt_flwr import RunConfig, simulate
from fedopt_flwr.algorithms import FedAvg, FedMoS
from fedopt_flwr.flower import FederatedClient
from fedopt_flwr.rounds.participation import CLUSTERS, Participation, make_plan
from fedopt_flwr.rounds.record import Upload
from fedopt_flwr.rounds.sampling import by_cluster, by_share, cluster, fill_slots, reply_weights

SIZES = [30, 5, 12, 50, 8, 20]
SHARES = dict(enumerate(SIZES))
TOTAL = sum(SIZES)
IMPORTANCE = {i: n / TOTAL for i, n in SHARES.items()}
ORDERS = {
    "adaptive": by_share(SHARES, SHARES),
    "clustered": by_cluster(list(SHARES), [0, 1, 0, 1, 2, 2], SHARES),
}


def test_orders_follow_the_descending_importance_of_clients_and_clusters() -> None:
    assert ORDERS["adaptive"] == [3, 0, 5, 2, 4, 1]
    assert ORDERS["clustered"] == [3, 1, 0, 2, 5, 4]  # clusters of 55, 42 and 28 examples


@pytest.mark.parametrize("draws", [1, 2, 3, 5])
@pytest.mark.parametrize("order", ORDERS)
def test_slots_give_each_client_its_share_exactly(order: str, draws: int) -> None:
    slots = fill_slots(ORDERS[order], SHARES, draws)
    assert [sum(slot.values()) for slot in slots] == [TOTAL] * draws
    for client, size in SHARES.items():
        assert sum(slot.get(client, 0) for slot in slots) == draws * size


def test_slots_by_hand() -> None:
    # M = 2 draws of capacity 10; 12, 6 and 2 units in this order
    assert fill_slots(["a", "b", "c"], {"a": 6, "b": 3, "c": 1}, 2) == [
        {"a": 10},
        {"a": 2, "b": 6, "c": 2},
    ]


@pytest.mark.parametrize("kind", ["multinomial", *ORDERS])
def test_weights_are_unbiased_by_enumeration(kind: str) -> None:
    draws = 2
    slots = [SHARES] * draws if kind == "multinomial" else fill_slots(ORDERS[kind], SHARES, draws)
    expected = dict.fromkeys(SHARES, Fraction(0))
    for outcome in product(*(slot.items() for slot in slots)):
        chance = Fraction(1)
        for _, units in outcome:
            chance *= Fraction(units, TOTAL)
        counts = Counter(client for client, _ in outcome)
        for client, weight in reply_weights(counts, IMPORTANCE, kind, False).items():
            expected[client] += chance * Fraction(weight)
    assert expected == {i: Fraction(n, TOTAL) for i, n in SHARES.items()}


def test_uniform_weights_are_unbiased_by_enumeration() -> None:
    subsets = list(combinations(SHARES, 3))
    mean = dict.fromkeys(SHARES, 0.0)
    for subset in subsets:
        weights = reply_weights(dict.fromkeys(subset, 1), IMPORTANCE, "uniform", True)
        for client, weight in weights.items():
            mean[client] += weight / len(subsets)
    assert mean == pytest.approx(IMPORTANCE)


def participation(sampler: str) -> tuple[Participation, object]:
    config = RunConfig(federation={"num_clients": 6, "clients_per_round": 3, "sampler": sampler})
    rule = FedMoS()
    plan = make_plan(rule, config, SHARES)
    state = rule.init_server(torch.zeros(1), plan)
    labels = torch.tensor([0.0, 1.0, 0.0, 1.0, 2.0, 2.0])
    return Participation(rule, config.federation, plan), state.replace(**{CLUSTERS: labels})


@pytest.mark.parametrize("sampler", ["uniform", "multinomial", "adaptive", "clustered"])
def test_weights_are_unbiased_over_20000_draws(sampler: str) -> None:
    who, state = participation(sampler)
    draws = np.zeros((20_000, 6))
    for row, number in enumerate(range(5, 20_005)):  # after the warm-up of 4 rounds
        chosen = who.choose(state, number, lambda client: True)
        for reply in who.weigh(dict.fromkeys(chosen, Upload({}, 0.0, 0.0))):
            draws[row, reply.client_id] = reply.weight
    error = draws.std(axis=0) / np.sqrt(len(draws))
    assert (np.abs(draws.mean(axis=0) - list(IMPORTANCE.values())) < 4 * error + 1e-12).all()
    assert draws.std() > 0.01


def test_adaptive_selection_varies_less_than_multinomial() -> None:
    spread = {}
    for sampler in ("multinomial", "adaptive"):
        who, state = participation(sampler)
        weights = np.zeros((4000, 6))
        for row in range(4000):
            chosen = who.choose(state, row + 5, lambda client: True)
            for reply in who.weigh(dict.fromkeys(chosen, Upload({}, 0.0, 0.0))):
                weights[row, reply.client_id] = reply.weight
        spread[sampler] = weights.var(axis=0).sum()
    assert spread["adaptive"] < 0.7 * spread["multinomial"]


def test_a_failed_client_is_as_if_it_had_not_been_drawn() -> None:
    counts = {0: 2, 3: 1}
    assert reply_weights(counts, IMPORTANCE, "multinomial", False) == {0: 2 / 3, 3: 1 / 3}
    unbiased = reply_weights({3: 1}, IMPORTANCE, "uniform", True)
    assert unbiased == pytest.approx({3: 6 * 50 / TOTAL})


def test_clusters_are_directions_not_lengths() -> None:
    vectors = [[1.0, 0.1], [5.0, 0.4], [0.0, 1.0], [0.1, 9.0], [-1.0, 0.0]]
    labels = cluster([torch.tensor(v) for v in vectors], 3)
    assert labels[0] == labels[1]
    assert labels[2] == labels[3]
    assert len(set(labels)) == 3


def config(sampler: str, rule: str = "scaffold_m", rounds: int = 8) -> dict:
    return {
        "algorithm": {"name": rule},
        "federation": {
            "num_clients": 6,
            "clients_per_round": 3,
            "num_rounds": rounds,
            "sampler": sampler,
            "weighting": "examples",
            "warmup_rounds": 2,
        },
        "training": {"local_steps": 3, "batch_size": 4},
    }


@pytest.mark.parametrize("sampler", ["multinomial", "adaptive", "clustered"])
@pytest.mark.parametrize("rule", ["scaffold_m", "padamfed", "fedmos"])
def test_samplers_work_with_every_kind_of_rule_and_c_stays_the_mean(
    sampler: str, rule: str
) -> None:
    gaps: list[float] = []

    def compare(run: OpenRun) -> None:
        if "control_variate" in run.strategy.state.vectors:
            c = run.strategy.state["control_variate"]
            gaps.append(float((run.mean_control_variate() - c).abs().max()))

    data = as_datasets(softmax_clients(SIZES))
    run = open_run(config(sampler, rule), data, on_round=compare)
    assert max(gaps, default=0.0) < 1e-6
    taken = [record.clients for record in run.records if record.round > 0]
    assert all(record.failures == 0 for record in run.records)
    if sampler == "clustered":
        assert [len(clients) for clients in taken[:2]] == [6, 6]  # the warm-up
        taken = taken[2:]
    assert {len(clients) for clients in taken} <= {1, 2, 3}
    assert any(len(clients) < 3 for clients in taken) or sampler != "multinomial"


def test_a_client_drawn_twice_trains_once_and_counts_twice() -> None:
    """Its movement enters x with weight 2/3, its control variate enters c with p_i."""
    who, state = participation("multinomial")
    replies = []
    for number in range(5, 105):
        chosen = who.choose(state, number, lambda client: True)
        replies += who.weigh(dict.fromkeys(chosen, Upload({}, 0.0, 0.0)))
    assert {round(3 * reply.weight) for reply in replies} == {1, 2, 3}
    assert all(reply.importance == IMPORTANCE[reply.client_id] for reply in replies)
    data = as_datasets(softmax_clients(SIZES))
    fits: list[int] = []

    class Counting(FederatedClient):
        def fit(self, parameters, config):  # type: ignore[no-untyped-def]
            fits.append(self.client_id)
            return super().fit(parameters, config)

    def wrap(client: FederatedClient) -> FederatedClient:
        client.__class__ = Counting
        return client

    run = open_run(config("multinomial", "fedavg", 12), data, wrap=wrap)
    per_round = [len(record.clients) for record in run.records if record.round > 0]
    assert len(fits) == sum(per_round)
    assert min(per_round) < 3


def test_the_gradients_for_clustering_are_counted_in_their_round() -> None:
    data = as_datasets(softmax_clients(SIZES))
    run = open_run(config("clustered", "fedavg"), data)
    vectors = {r.round: (r.uplink_vectors, len(r.clients)) for r in run.records}
    assert vectors[3][0] == vectors[3][1] + 6
    assert vectors[4][0] == vectors[4][1]
    labels = run.strategy.state[CLUSTERS]
    assert labels.shape == (6,)
    assert len(labels.unique()) == 3


def test_the_warm_up_goes_on_while_gradients_are_missing() -> None:
    data = as_datasets(softmax_clients(SIZES))

    class Mute(FederatedClient):
        def fit(self, parameters, config):  # type: ignore[no-untyped-def]
            if config["fedopt.phase"] == "gradient" and config["fedopt.round"] == 3:
                return [], 0, {"error": "no gradient today"}
            return super().fit(parameters, config)

    def wrap(client: FederatedClient) -> FederatedClient:
        client.__class__ = Mute
        return client

    run = open_run(config("clustered", "fedavg"), data, wrap=wrap)
    taken = {record.round: len(record.clients) for record in run.records}
    assert [taken[r] for r in (1, 2, 3)] == [6, 6, 6]
    assert max(taken[r] for r in (4, 5, 6, 7, 8)) <= 3
    assert {e["error"] for r in run.records if r.round == 3 for e in r.errors} == {
        "no gradient today"
    }


def test_weighting_is_the_rules_own_unless_the_configuration_names_one() -> None:
    federation = {"num_clients": 6, "clients_per_round": 3}
    config = RunConfig(federation=federation)
    assert make_plan(FedAvg(), config, SHARES).importance[0] == pytest.approx(1 / 6)
    assert make_plan(FedMoS(), config, SHARES).importance[0] == pytest.approx(30 / TOTAL)
    uniform = RunConfig(federation=federation | {"weighting": "uniform"})
    assert make_plan(FedMoS(), uniform, SHARES).importance[0] == pytest.approx(1 / 6)


def test_a_clustered_run_resumes_with_the_same_groups(tmp_path) -> None:  # type: ignore[no-untyped-def]
    from fedopt_flwr import resume

    def settings(name: str, rounds: int) -> dict:
        made = config("clustered", "padamfed", 8)
        return {
            **made,
            "algorithm": {"name": "scaffold"},
            "output": {"directory": str(tmp_path / name), "checkpoint_every": rounds},
        }

    data = as_datasets(softmax_clients(SIZES))
    whole = simulate(settings("whole", 8), model=linear_model, client_data=data)
    again = simulate(settings("again", 5), model=linear_model, client_data=data)
    assert again.parameters.tobytes() == whole.parameters.tobytes()
    resumed = resume(tmp_path / "again", model=linear_model, client_data=data)
    assert [record.round for record in resumed.rounds] == list(range(9))
    assert resumed.parameters.tobytes() == whole.parameters.tobytes()


@pytest.mark.parametrize("sampler", ["clustered", "adaptive"])
def test_the_summary_says_how_many_rounds_were_warm_up(sampler: str) -> None:
    data = as_datasets(softmax_clients(SIZES))
    result = simulate(config(sampler, "fedmos"), linear_model, data)
    asked = [record.num_asked for record in result.rounds if record.round]
    assert result.summary.get("warmup_rounds") == (2 if sampler == "clustered" else None)
    assert (asked[:3] == [6, 6, asked[2]]) == (sampler == "clustered")
    assert asked[2] < 6

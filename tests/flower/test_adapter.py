"""Messages, failures and state across both halves, through Flower's own loop."""

from __future__ import annotations

import ast
import time
from typing import Any

import numpy as np
import pytest
import torch
from flwr.common import Parameters, ndarrays_to_parameters
from flwr.common.serde import parameters_from_proto, parameters_to_proto
from flwr.server import SimpleClientManager
from flwr.server.strategy import FedAvg as FlowersFedAvg
from helpers import (
    OpenRun,
    as_datasets,
    linear_model,
    open_run,
    small_config,
    softmax_clients,
    three_datasets,
)
from torch import nn
from torch.utils.data import TensorDataset

from fedopt_flwr import RunConfig
from fedopt_flwr.engines.common import LeanServer, quiet
from fedopt_flwr.errors import ConfigError, MessageError, RunError
from fedopt_flwr.flower import FederatedClient, MemoryStates
from fedopt_flwr.flower.instruction import Instruction
from fedopt_flwr.flower.messages import ROUND, decode, encode, encoded_bytes, to_arrays
from fedopt_flwr.problems import foreign_text
from fedopt_flwr.rounds.sampling import sample_uniform, sorted_ids
from fedopt_flwr.training.flat_model import Layout

CLIENTS = as_datasets(softmax_clients([20, 6, 12, 30, 9]))


def config(name: str = "fedavg", sampled: int = 5, rounds: int = 4, **federation: Any) -> dict:
    return {
        "algorithm": {"name": name},
        "federation": {
            "num_clients": 5,
            "clients_per_round": sampled,
            "num_rounds": rounds,
            **federation,
        },
        "training": {"local_steps": 3, "batch_size": 4},
    }


class Faulty(FederatedClient):
    """A client whose answers are spoilt in chosen rounds."""

    def __init__(self, inner: FederatedClient, rounds: set[int], spoil: Any) -> None:
        self.__dict__.update(inner.__dict__)
        self._bad_rounds, self._spoil = rounds, spoil

    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        answer = super().fit(parameters, config)
        return self._spoil(*answer) if config[ROUND] in self._bad_rounds else answer


def spoilt(client_id: int, rounds: set[int], spoil: Any) -> Any:
    return lambda client: Faulty(client, rounds, spoil) if client.client_id == client_id else client


def with_value(value: float) -> Any:
    def spoil(arrays: list[np.ndarray], count: int, report: dict[str, Any]) -> Any:
        arrays = [array.copy() for array in arrays]
        arrays[0][3] = value
        return arrays, count, report

    return spoil


def raising(*_: Any) -> Any:
    raise RuntimeError("the disk of this client is full")


FAULTS = {
    "NaN": (with_value(np.nan), "'delta' is not finite: 1 NaN"),
    "infinity": (with_value(np.inf), "is not finite: 0 NaN and 1 infinite"),
    "shape": (lambda a, n, r: ([a[0][:-1], *a[1:]], n, r), r"shape \(14,\)"),
    "matrix": (lambda a, n, r: ([a[0].reshape(3, 5), *a[1:]], n, r), r"shape \(3, 5\)"),
    "dtype": (lambda a, n, r: ([a[0].astype(np.float64), *a[1:]], n, r), "dtype float64"),
    "too many": (lambda a, n, r: ([*a, a[0]], n, r), "sent 2 arrays"),
    "too few": (lambda a, n, r: ([], n, r), "sent 0 arrays"),
    "name": (lambda a, n, r: (a, n, {**r, "arrays": "model"}), r"named \['model'\]"),
    "no report": (lambda a, n, r: (a, n, {"arrays": "delta"}), "for run None"),
    "no loss": (lambda a, n, r: (a, n, {**r, "loss": None}), "report: loss: got None; should be"),
    "another run": (lambda a, n, r: (a, n, {**r, "run": "0" * 32}), "for run '000"),
    "another round": (lambda a, n, r: (a, n, {**r, "round": 1}), "for round 1, asked was 2"),
    "no whole round": (lambda a, n, r: (a, n, {**r, "round": 2.0}), "for round 2.0, asked was 2"),
    "another phase": (lambda a, n, r: (a, n, {**r, "phase": "start"}), "for phase 'start'"),
    "no steps": (lambda a, n, r: (a, n, {**r, "num_steps": None}), "num_steps: got None"),
    "too few steps": (lambda a, n, r: (a, n, {**r, "num_steps": 1}), "took 1 local steps; with"),
    "exception": (raising, "the disk of this client is full"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_reply_is_one_failure_and_the_run_goes_on(fault: str) -> None:
    spoil, text = FAULTS[fault]
    run = open_run(config(), CLIENTS, wrap=spoilt(3, {2}, spoil))
    record = run.records[1]
    assert (record.round, record.failures, record.clients) == (2, 1, [0, 1, 2, 4])
    assert [item["client"] for item in record.errors] == [3]
    import re

    assert re.search(text, record.errors[0]["error"])
    assert [r.failures for r in run.records] == [0, 1, 0, 0]
    assert bool(torch.isfinite(run.strategy.state["model"]).all())


@pytest.mark.parametrize("name", ["scaffold", "scaffold_m", "padamfed"])
def test_a_lost_reply_leaves_both_sides_at_the_same_control_variate(name: str) -> None:
    gaps = []

    def compare(run: OpenRun) -> None:
        c = run.strategy.state["control_variate"]
        gaps.append(float((run.mean_control_variate() - c).abs().max()))

    run = open_run(
        config(name, rounds=8),
        CLIENTS,
        wrap=spoilt(2, {1, 2, 5}, with_value(np.nan)),
        on_round=compare,
    )
    assert sum(r.failures for r in run.records) == 3
    assert max(gaps) < 1e-6


def test_a_round_with_too_few_replies_moves_nothing() -> None:
    seen: dict[int, dict[str, torch.Tensor]] = {}

    def keep(run: OpenRun) -> None:
        seen[run.records[-1].round] = {k: v.clone() for k, v in run.strategy.state.vectors.items()}

    run = open_run(
        config("scaffold_m", min_replies=5), CLIENTS, wrap=spoilt(0, {2}, raising), on_round=keep
    )
    assert run.records[2].clients == []
    assert run.records[2].failures == 5
    assert "min_replies is 5" in run.records[2].errors[-1]["error"]
    for name, before in seen[1].items():
        assert torch.equal(seen[2][name], before)
        assert not torch.equal(seen[3][name], before)
    c = run.strategy.state["control_variate"]
    assert float((run.mean_control_variate() - c).abs().max()) < 1e-6


def test_a_round_without_any_reply_moves_nothing_and_the_run_ends_well() -> None:
    def all_fail(client: FederatedClient) -> FederatedClient:
        return Faulty(client, {1, 2, 3, 4}, raising)

    run = open_run(config("fedavg_m"), CLIENTS, wrap=all_fail)
    start = torch.cat([p.detach().reshape(-1) for p in linear_model().parameters()])
    assert torch.equal(run.strategy.state["model"], start)
    assert [r.failures for r in run.records] == [5, 5, 5, 5]


def test_a_client_that_fails_the_start_once_is_asked_again() -> None:
    calls = []

    def once(*answer: Any) -> Any:
        calls.append(1)
        return raising() if len(calls) == 1 else answer

    run = open_run(config("padamfed"), CLIENTS, wrap=spoilt(1, {0}, once))
    assert (run.records[0].failures, len(calls)) == (0, 2)
    assert run.records[0].clients == [0, 1, 2, 3, 4]
    assert run.records[0].downlink_vectors == 6
    assert run.records[0].errors == []  # it succeeded later, and nobody is missing


def test_a_client_that_fails_the_start_twice_counts_as_zero_on_both_sides() -> None:
    first: dict[str, torch.Tensor] = {}

    def compare(run: OpenRun) -> None:
        if run.records[-1].round == 0:
            first["mean"] = run.mean_control_variate()
            first["server"] = run.strategy.state["control_variate"]
            assert float(run.client_vector(1, "control_variate").abs().max()) == 0

    run = open_run(config("padamfed"), CLIENTS, wrap=spoilt(1, {0}, raising), on_round=compare)
    assert (run.records[0].failures, run.records[0].clients) == (1, [0, 2, 3, 4])
    assert float((first["mean"] - first["server"]).abs().max()) < 1e-6
    assert float(first["server"].abs().max()) > 1e-2


def test_a_start_that_nobody_finishes_ends_the_run_with_the_reason() -> None:
    def all_fail(client: FederatedClient) -> FederatedClient:
        return Faulty(client, {0}, raising)

    with pytest.raises(RunError, match=r"finished the start pass; client 0: .*disk of this client"):
        open_run(config("scaffold"), CLIENTS, wrap=all_fail)


def test_a_reply_after_the_round_timeout_is_not_counted() -> None:

    def slow(*answer: Any) -> Any:
        time.sleep(2.5)
        return answer

    run = open_run(config(round_timeout=2.0), CLIENTS, wrap=spoilt(4, {2}, slow))
    assert run.records[1].failures == 1
    assert "round_timeout is 2 s" in run.records[1].errors[0]["error"]


def test_a_lost_state_is_an_error_that_names_client_and_round() -> None:
    states = MemoryStates()
    states.save(7, 3, {})
    with pytest.raises(MessageError, match="client 7: state of round 5 is asked for; has"):
        states.load(7, 5)


def test_only_the_counted_version_of_a_state_is_kept() -> None:
    run = open_run(config("padamfed", rounds=6), CLIENTS)
    kept = {i: list(run.states._states[i]) for i in range(5)}
    assert kept == {i: [run.strategy.versions[i]] for i in range(5)}


def test_a_repeated_client_id_is_refused() -> None:
    def same(client: FederatedClient) -> FederatedClient:
        client.client_id = min(client.client_id, 3)
        return client

    with pytest.raises(RunError, match=r"got 5; 4 clients with different ids"):
        open_run(config(), CLIENTS, wrap=same)


def test_numbers_and_names_are_not_mixed() -> None:
    assert sorted_ids([10, 9, 2]) == [2, 9, 10]
    with pytest.raises(RunError, match="numbers and names"):
        sorted_ids([1, "two"])
    with pytest.raises(RunError, match="'a' occurs twice"):
        sorted_ids(["a", "b", "a"])


def test_sampling_depends_on_seed_and_round_only_and_is_fair() -> None:
    ids = list(range(6))
    assert sample_uniform(ids, 1, 2) == sample_uniform(ids, 1, 2)
    assert sample_uniform(ids, 1, 2) != sample_uniform(ids, 2, 2)
    firsts = [sample_uniform(ids, 0, r)[0] for r in range(6000)]
    counts = np.bincount(firsts, minlength=6)
    assert counts.min() > 850  # 1000 expected, deviation 29
    assert counts.max() < 1150


def test_encoding_keeps_names_values_and_counts_bytes() -> None:
    arrays = {"delta": torch.randn(1000), "buffers.int64": torch.arange(3)}
    names, parameters = encode(arrays)
    expected = {"delta": Layout(1000, "float32"), "buffers.int64": Layout(3, "int64")}
    decoded = decode(to_arrays(parameters), names, expected, "client 1")
    assert all(torch.equal(decoded[name], array) for name, array in arrays.items())
    assert all(tensor.data_ptr() % 64 == 0 for tensor in decoded.values())
    assert encoded_bytes(to_arrays(parameters)) == sum(map(len, parameters.tensors))
    assert encode(arrays, in_memory=True)[0] == names


def test_headers_of_arrays_are_read_without_ast(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython 3.11.7 loses a reply when another thread uses it, for a traceback (gh-106905)."""
    parameters = ndarrays_to_parameters([np.arange(6, dtype="<f4").reshape(2, 3).T])

    def refuse(*arguments: object, **options: object) -> None:
        raise SystemError("AST constructor recursion depth mismatch")

    monkeypatch.setattr(ast, "parse", refuse)
    [found] = to_arrays(parameters)
    assert found.tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize(
    "array",
    [np.float32(3), np.zeros((0, 4), "<i8"), np.ones(5, bool), np.ones((2, 3), ">f8"), np.ones(4)],
    ids=["scalar", "empty", "truths", "other bytes first", "float64"],
)
def test_arrays_come_back_as_they_were(array: np.ndarray) -> None:
    [found] = to_arrays(ndarrays_to_parameters([np.asarray(array)]))
    assert found.dtype == np.asarray(array).dtype
    assert found.shape == np.shape(array)
    np.testing.assert_array_equal(found, array)


def npy(header: str, body: bytes = bytes(12)) -> bytes:
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body


@pytest.mark.parametrize(
    "contents",
    [
        b"",
        b"no array",
        npy("{'descr': '|O', 'fortran_order': False, 'shape': (3,), }"),
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4,), }"),
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }"),
        npy("{'descr': '<f3', 'fortran_order': False, 'shape': (4,), }"),
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-3,), }"),
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (3,), 'more': 1}"),
        npy("{'descr': '<f4', 'fortran_order': __import__('os'), 'shape': (3,), }"),
        npy("-" * 2000),
        npy("(" * 5000),
    ],
)
def test_what_is_no_array_is_refused_at_once(contents: bytes) -> None:
    with pytest.raises((ValueError, TypeError)):
        to_arrays(Parameters([contents], "numpy.ndarray"))


def test_no_peer_can_pass_bytes_for_arrays_in_memory() -> None:
    """By the wire's own word, once: it ended the server."""
    sent = parameters_to_proto(Parameters([b"never an array"], "memory"))
    received = parameters_from_proto(type(sent).FromString(sent.SerializeToString()))
    with pytest.raises(ValueError, match="without the header"):
        to_arrays(received)


def test_foreign_text_is_one_short_line() -> None:
    assert foreign_text("a\nb\x1b[2J\ud800") == r"a\nb\x1b[2J\ud800"
    assert foreign_text("Klinik Ä 3") == "Klinik Ä 3"
    assert foreign_text("x" * 10**6) == "x" * 499 + "…"
    assert len(foreign_text("\0" * 10**6)) == 500


@pytest.mark.parametrize("size", [1, 10, 15010, 10**6])
def test_counted_bytes_are_those_of_flowers_encoding(size: int) -> None:
    arrays = [np.zeros(size, np.float32)]
    assert encoded_bytes(arrays) == len(ndarrays_to_parameters(arrays).tensors[0])


def test_records_count_what_travels() -> None:
    run = open_run(config("scaffold_m", sampled=2, rounds=2), CLIENTS)
    start, first, _ = run.records
    size = len(ndarrays_to_parameters([np.zeros(15, np.float32)]).tensors[0])
    assert (start.downlink_vectors, start.uplink_vectors) == (5, 5)
    assert (first.downlink_vectors, first.uplink_vectors) == (4, 2)
    assert (first.downlink_bytes, first.uplink_bytes) == (4 * size, 2 * size)
    assert first.vectors_per_client == 3.0
    assert first.train_loss is not None
    assert first.seconds > 0


class WithBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))


def test_averaged_buffers_are_means_of_floats_and_maxima_of_integers() -> None:
    """One full-batch step each: running mean 0.1·m_i, so the server holds 0.1·mean(m_i)."""
    settings = config("scaffold", rounds=1)
    settings["training"] = {"local_steps": 1, "batch_size": 0}
    run = open_run(settings, CLIENTS, model=WithBatchNorm)
    means = torch.stack([d.tensors[0].mean(dim=0) for d in CLIENTS])
    buffers = dict(run.strategy.model.module.named_buffers())
    torch.testing.assert_close(buffers["norm.running_mean"], 0.1 * means.mean(dim=0))
    assert int(buffers["norm.num_batches_tracked"]) == 1  # the start pass left it alone
    assert run.strategy.state["control_variate"].numel() == 4 + 4 + 12 + 3


@pytest.mark.parametrize("name", ["fedavg", "padamfed"])
def test_local_buffers_stay_with_their_clients(name: str) -> None:
    settings = config(name, rounds=3, buffers="local")
    test = TensorDataset(*(torch.cat([d.tensors[k] for d in CLIENTS]) for k in (0, 1)))
    run = open_run(settings, CLIENTS, model=WithBatchNorm, test_data=test)
    tracked = [int(run.client_vector(i, "buffers.int64")[0]) for i in range(5)]
    assert tracked == [9] * 5  # 3 rounds of 3 steps, none of them from the start pass
    own = torch.stack([run.client_vector(i, "buffers.float32") for i in range(5)])
    assert float(own.std(dim=0).max()) > 1e-2
    server = dict(run.strategy.model.module.named_buffers())
    assert int(server["norm.num_batches_tracked"]) == 0
    assert torch.equal(server["norm.running_mean"], torch.zeros(4))
    assert all(np.isfinite(r.test_loss) for r in run.records)
    down = run.records[-1].downlink_bytes
    assert down % len(ndarrays_to_parameters([np.zeros(23, np.float32)]).tensors[0]) == 0


def test_weight_decay_adds_its_gradient() -> None:
    """Zero data gradient: one example whose loss does not depend on the weights."""
    settings = config("fedavg", rounds=1)
    settings["training"] = {"local_steps": 1, "batch_size": 0, "weight_decay": 0.5}
    settings["algorithm"]["client_learning_rate"] = 0.1
    zero = [TensorDataset(torch.zeros(1, 4), torch.zeros(1, 3))] * 5
    run_config = settings
    from fedopt_flwr import simulate

    result = simulate(
        run_config,
        model=linear_model,
        client_data=zero,
        loss=lambda outputs, targets: (outputs * 0).sum(),
        metric=lambda outputs, targets: 0.0,
    )
    start = torch.cat([p.detach().reshape(-1) for p in linear_model().parameters()])
    np.testing.assert_allclose(result.parameters, start.numpy() * 0.95, atol=1e-6)


def test_local_buffers_start_from_the_models_own_at_every_client() -> None:
    """Whenever it trains first: the store must not have written to what all of them share."""
    counts: dict[int, int] = {}

    def compare(run: OpenRun) -> None:
        record = run.records[-1]
        for client_id in record.clients if record.round else []:
            if client_id not in counts:
                buffers = run.states.load(client_id, record.round)
                counts[client_id] = int(buffers["buffers.int64"][0])

    data = as_datasets(softmax_clients([20] * 6))
    settings = config("scaffold", sampled=2, rounds=12, num_clients=6, buffers="local")
    open_run(settings, data, WithBatchNorm, on_round=compare)
    assert len(counts) == 6
    assert set(counts.values()) == {3}  # batches of one round, three local steps


def test_a_mask_of_infinite_values_may_be_a_buffer() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear_model()
            self.register_buffer("mask", torch.tensor([0.0, float("-inf"), 0.0]))
            self.register_buffer("seen", torch.zeros(1))
            self.poison = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.seen += x.abs().max() * (float("inf") if x.max() > 1e6 else 1.0)
            return self.layer(x) + self.mask.clamp(min=-1.0)

    data = as_datasets(softmax_clients([9, 9, 9]))
    settings = config("fedavg", sampled=3, rounds=2, num_clients=3)
    run = open_run(settings, data, Masked)
    assert [r.failures for r in run.records] == [0, 0]
    assert run.strategy.model.module.mask.tolist() == [0.0, float("-inf"), 0.0]
    data[1] = TensorDataset(torch.full((5, 4), 1e7), torch.zeros(5).long())
    (error, *_) = open_run(settings, data, Masked).records[0].errors
    assert error["client"] == 1
    assert "'buffers.float32' is not finite: 0 NaN and 2 infinite values of 4" in error["error"]


def test_an_instruction_names_as_many_checkpoints_as_may_be_kept() -> None:
    strategy = open_run(small_config(output={"keep": 1500}), three_datasets()).strategy
    for kept in (range(1500), [7] * 1500):
        rounds = [900_000_000 + number for number in kept]
        strategy._kept_versions.extend({0: number} for number in rounds)
        [(_, ins)] = strategy._instruct("train", [0], {"model": strategy.state["model"]})
        found = Instruction.from_config(ins.config)
        assert found.kept_versions - {found.state_version} == {*rounds}
    with pytest.raises(
        ConfigError, match=r"output\.keep: got 1501; should be less than or equal to 15"
    ):
        RunConfig(output={"keep": 1501})


def test_a_client_that_evaluates_before_it_trains_knows_how_large_messages_are() -> None:
    seen: list[FederatedClient] = []

    def wrap(client: FederatedClient) -> FederatedClient:
        seen.append(client)
        return client

    pairs = [(part, part) for part in three_datasets()]
    sizes = {"num_clients": 3, "clients_per_round": 1, "num_rounds": 1}
    own = small_config(federation=sizes, evaluation={"on_clients": True})
    own["algorithm"] = {"name": "fedavg"}
    open_run(own, pairs, wrap=wrap)
    size = linear_model().weight.numel() + linear_model().bias.numel()
    assert [(c.largest_instruction or 0) > 4 * size for c in seen] == [True] * 3


class NobodyHere(FlowersFedAvg):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[int, list[Any], list[Any]]] = []

    def configure_fit(self, *_: Any, **__: Any) -> list[Any]:
        return []

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        self.heard.append((server_round, results, failures))
        return None, {}


def test_a_round_of_which_no_client_is_here_is_one_without_replies() -> None:
    strategy = NobodyHere()
    server = LeanServer(client_manager=SimpleClientManager(), strategy=strategy)
    with quiet():
        assert server.fit_round(3, None) == (None, {}, ([], []))
    assert strategy.heard == [(3, [], [])]

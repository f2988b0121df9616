"""Open federations: who comes, leaves, comes back, weighs more, or has lost its state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.server import SimpleClientManager
from helpers import CLASSES, as_datasets, linear_model, softmax_clients
from torch.utils.data import TensorDataset

from fedopt_flwr import ConfigError, RunConfig, simulate
from fedopt_flwr.algorithm import Plan
from fedopt_flwr.algorithms import ALGORITHMS, FedAvg
from fedopt_flwr.algorithms.scaffold import Scaffold
from fedopt_flwr.engines.pairs import ForeignProxy, run_pair
from fedopt_flwr.errors import FedoptWarning
from fedopt_flwr.flower import BEGINS_ANEW, DiskStates, MemoryStates
from fedopt_flwr.flower.app_client import Client
from fedopt_flwr.flower.open_federation import OpenFederation, make_ledger
from fedopt_flwr.rounds.participation import make_plan
from fedopt_flwr.rounds.record import RoundRecord
from fedopt_flwr.strategies import Strategy

WITH_MEANS = [name for name, rule in ALGORITHMS.items() if rule.client_means]
DATA = as_datasets(softmax_clients([9, 14, 6, 11, 8, 12]))
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*its theory has the same N clients:UserWarning",
    "ignore:.*counts with its .* examples from round:UserWarning",
)


class Room:
    """A strategy and clients that the test lets in and out between rounds."""

    def __init__(self, rule: Any, start: Sequence[int] = (0, 1, 2), **options: Any) -> None:
        sizes: dict[str, Any] = {"num_clients": "open", "clients_per_round": 2, "num_rounds": 20}
        sizes |= {"min_clients": len(start), "local_steps": 3, "batch_size": 4}
        self.strategy = Strategy(rule, linear_model(), **{**sizes, **options})
        self.strategy.set_max_workers(1)
        self.manager = SimpleClientManager()
        self.clients: dict[int, Client] = {}
        self.here: dict[int, ForeignProxy] = {}
        self._number = 0
        for i in start:
            self.come(i)
        self.parameters = self.strategy.initialize_parameters(self.manager)

    def come(self, i: int, data: Any = None, **options: Any) -> None:
        """Let a client in; one that was here before has its state, unless it has other data."""
        if i not in self.clients or data is not None or options:
            client = Client(linear_model(), data or DATA[i], client_id=i, device="cpu", **options)
            if i in self.clients:
                client._states = self.clients[i]._states
            self.clients[i] = client
        self._number += 1
        self.here[i] = ForeignProxy(f"{i}, {self._number}", self.clients[i].to_client())
        self.manager.register(self.here[i])

    def leave(self, i: int) -> None:
        self.manager.unregister(self.here.pop(i))

    def round(self) -> dict[str, list[Any]]:
        """Run one; return what changed before it."""
        number = len([r for r in self.strategy.rounds if r.round]) + 1
        asked = self.strategy.configure_fit(number, self.parameters, self.manager)
        results = [(proxy, proxy.fit(ins)) for proxy, ins in asked]
        self.strategy.aggregate_fit(number, results, [])
        self.strategy.evaluate(number, self.parameters)
        return self.strategy.rounds[-1].members

    def require_means(self) -> None:
        """The server's means are Σ p_i of what the clients themselves keep."""
        strategy = self.strategy
        for vector, name in (strategy.rule.client_means or {}).items():
            mean = np.zeros(strategy.model.size)
            for i, share in strategy.state.plan.importance.items():
                if i in strategy.versions:
                    state = self.clients[i]._states.load(i, strategy.versions[i])
                    mean += share * state[name].double().numpy()
            found = strategy.state[vector].numpy()
            np.testing.assert_allclose(found, mean, atol=1e-6)
            assert np.abs(found).max() > 1e-5


def rule_of(name: str) -> Any:
    return ALGORITHMS[name]()


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize("name", WITH_MEANS)
def test_means_are_of_the_clients_known_whoever_comes_and_leaves(name: str, weighting: Any) -> None:
    room = Room(rule_of(name), weighting=weighting, forget_after=2)
    changes = []

    def play(*moves: Any) -> None:
        for move, *arguments in moves:
            move(*arguments)
        changes.append(room.round())
        room.require_means()

    play()
    play((room.come, 3), (room.come, 5))
    play((room.leave, 1))
    play((room.come, 4))
    play()  # 1 has been away for two rounds
    play((room.come, 1))
    play((room.leave, 0), (room.leave, 3))
    with pytest.warns(FedoptWarning, match=r"client 0: holds 14 examples and held 9; its new"):
        play((room.come, 0, DATA[1]))
    play((room.come, 3))
    first = [{}, {"joined": [3, 5]}, {}, {"joined": [4]}, {"forgotten": [1]}, {"joined": [1]}]
    assert changes == [*first, {}, {"resized": [0]}, {}]
    shares = room.strategy.state.plan.importance
    assert list(shares) == [0, 1, 2, 3, 4, 5]
    sizes = {0: 14, 1: 14, 2: 6, 3: 11, 4: 8, 5: 12}
    if weighting == "examples":
        assert shares == pytest.approx({i: n / 65 for i, n in sizes.items()})
    else:
        assert set(shares.values()) == {1 / 6}
    assert not [r.errors for r in room.strategy.rounds if r.errors]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_with_the_same_clients_throughout_bits_are_those_of_a_fixed_number(name: str) -> None:
    found = []
    for number in (3, "open"):
        sizes = {"clients_per_round": 2, "num_rounds": 4, "local_steps": 3, "batch_size": 4}
        options = {"min_clients": 3} if number == "open" else {}
        strategy = Strategy(rule_of(name), linear_model(), num_clients=number, **sizes, **options)
        own = [Client(linear_model(), DATA[i], client_id=i, device="cpu") for i in range(3)]
        run_pair(strategy, [client.to_client() for client in own], 4)
        found.append({n: v.numpy().tobytes() for n, v in strategy.state.vectors.items()})
    assert found[0] == found[1]


@pytest.mark.parametrize("sampler", ["multinomial", "adaptive", "clustered"])
@pytest.mark.parametrize("name", ["scaffold_m", "fedmos"])
def test_samplers_draw_from_the_clients_known(name: str, sampler: Any) -> None:
    room = Room(rule_of(name), sampler=sampler, warmup_rounds=2, forget_after=1)
    counted: set[Any] = set()
    for number in range(1, 16):
        if number == 5:
            room.come(4)
            room.come(5)
        if number == 8:
            room.leave(0)
        room.round()
        if name == "scaffold_m":
            room.require_means()
        record = room.strategy.rounds[-1]
        if number >= 10:  # 0 is forgotten: nobody draws it, and weights are those of the others
            assert record.failures == 0
            counted |= {*record.clients}
            assert ("clusters" in room.strategy.state.vectors) is (sampler == "clustered")
    assert counted == {1, 2, 4, 5}
    if sampler == "clustered":
        assert room.strategy.state["clusters"].numel() == 4


def test_with_over_sampling_only_those_that_count_move_the_means() -> None:
    room = Room(rule_of("scaffold_m"), over_sample=1.5, forget_after=1)
    for number in range(1, 9):
        if number == 3:
            room.come(3)
            room.come(4)
        if number == 6:
            room.leave(1)
        room.round()
        room.require_means()
        assert len(room.strategy.rounds[-1].clients) == 2
        assert room.strategy.rounds[-1].num_late == 1


def test_a_client_that_starts_at_zero_dilutes_c_and_one_that_leaves_takes_its_part_along() -> None:
    room = Room(Scaffold(control_variate_start="zero"), clients_per_round=3, forget_after=1)
    room.round()
    c = room.strategy.state["control_variate"].clone()
    own = {i: room.clients[i]._states.load(i, 1)["control_variate"].clone() for i in range(3)}
    room.come(3)
    strategy = room.strategy
    strategy.configure_fit(2, room.parameters, room.manager)
    torch.testing.assert_close(strategy.state["control_variate"], c * 3 / 4)
    strategy._finish_round({})  # which counted nobody
    room.leave(0)
    strategy.configure_fit(3, room.parameters, room.manager)
    strategy._finish_round({})
    room.leave(1)
    strategy.configure_fit(4, room.parameters, room.manager)
    assert strategy.record.members == {"forgotten": [0]}
    torch.testing.assert_close(strategy.state["control_variate"], (own[1] + own[2]) / 3)


def test_a_new_client_starts_at_its_gradient_at_the_current_model() -> None:
    room = Room(Scaffold(), clients_per_round=3)
    for _ in range(3):
        room.round()
    room.come(3)
    strategy, x = room.strategy, room.strategy.state["model"].clone()
    strategy.configure_fit(4, room.parameters, room.manager)
    own = room.clients[3]._states.load(3, 3)["control_variate"]  # of the round before
    inputs, targets = zip(*DATA[3], strict=True)
    model = linear_model()
    torch.nn.utils.vector_to_parameters(x, model.parameters())
    whole = torch.nn.functional.cross_entropy(model(torch.stack(inputs)), torch.tensor(targets))
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(whole, model.parameters())])
    # a mean over three minibatches of 4 of its 11 examples is near the gradient over all
    assert float(torch.cosine_similarity(own, gradient, dim=0)) > 0.9
    assert strategy.record.errors == []


def lose_state(room: Room, i: int) -> None:
    room.clients[i]._states = MemoryStates()


def test_a_client_that_lost_its_state_begins_anew_if_it_may() -> None:
    room = Room(rule_of("padamfed"), start=(0, 1, 2), clients_per_round=3)
    room.leave(1)
    room.come(1, state_lost="restart")
    room.round()
    room.require_means()
    lose_state(room, 1)
    assert room.round() == {}
    (error,) = room.strategy.rounds[-1].errors
    assert "lost its state of round 1; it begins anew in the next round" in error["error"]
    assert room.round() == {"restarted": [1]}
    room.require_means()
    assert room.strategy.rounds[-1].clients == [0, 1, 2]
    lose_state(room, 2)  # which did not say that it would
    for _ in range(2):
        assert room.round() == {}
        assert [e["client"] for e in room.strategy.rounds[-1].errors] == [2]


def test_in_a_fixed_federation_nobody_begins_anew() -> None:
    sizes = {"num_clients": 2, "clients_per_round": 2, "num_rounds": 4, "local_steps": 2}
    strategy = Strategy(rule_of("scaffold"), linear_model(), **sizes)
    own = [
        Client(linear_model(), DATA[i], client_id=i, device="cpu", state_lost="restart")
        for i in range(2)
    ]
    strategy._also_on_round = lambda record: setattr(own[1], "_states", MemoryStates())
    run_pair(strategy, [client.to_client() for client in own], 4, may_fail=True)
    assert [[e["client"] for e in r.errors] for r in strategy.rounds] == [[], *[[1]] * 4]
    text = strategy.rounds[1].errors[0]["error"]
    assert "where the server has federation.num_clients = 'open'" in text


def test_a_start_pass_that_fails_counts_as_zero_and_so_does_the_client() -> None:
    class Broken(TensorDataset):
        fails = True

        def __getitem__(self, index: int) -> Any:
            if self.fails:
                raise OSError("the disk is away")
            return super().__getitem__(index)

    broken = Broken(torch.randn(8, 4), torch.arange(8) % CLASSES)
    broken.fails = False
    room = Room(rule_of("scaffold_m"), clients_per_round=4)
    room.come(3, broken)
    broken.fails = True
    room.round()
    errors = {(e["phase"], e["client"]) for e in room.strategy.rounds[-1].errors}
    assert errors == {("start", 3), ("train", 3)}
    room.require_means()
    broken.fails = False
    room.round()
    assert room.strategy.rounds[-1].clients == [0, 1, 2, 3]
    room.require_means()


def test_a_round_that_is_taken_back_leaves_every_copy_as_it_was() -> None:
    room = Room(rule_of("scaffold"), clients_per_round=3)
    room.round()
    strategy = room.strategy
    asked = strategy.configure_fit(2, room.parameters, room.manager)
    results = [(proxy, proxy.fit(ins)) for proxy, ins in asked]
    strategy._rule_of_round = Spoiling(strategy._rule_of_round)  # type: ignore[assignment]
    strategy.aggregate_fit(2, results, [])
    strategy.evaluate(2, room.parameters)
    assert strategy.rounds[-1].taken_back
    room.require_means()
    room.come(3)
    room.round()
    room.require_means()


class Spoiling:
    """A rule whose server's half overflows once."""

    def __init__(self, rule: Any) -> None:
        self._rule = rule

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def server_update(self, state: Any, replies: Any) -> Any:
        state = self._rule.server_update(state, replies)
        return state.replace(model=state["model"] * float("inf"))


class Kept(FedAvg):
    """A rule of one's own whose clients keep something."""

    name: ClassVar[str] = "kept"
    client_state: ClassVar[tuple[str, ...]] = ("last_delta",)

    def client_update(self, received: Any, client_state: Any, objective: Any) -> Any:
        upload, _ = super().client_update(received, client_state, objective)
        return upload, {"last_delta": upload["delta"]}


def test_an_own_rule_whose_clients_keep_state_must_say_what_is_a_mean_of_it() -> None:
    class Said(Kept):
        name: ClassVar[str] = "said"
        client_means: ClassVar[dict[str, str]] = {}

    options: dict[str, Any] = {"num_clients": "open", "clients_per_round": 2, "num_rounds": 2}
    try:
        with pytest.raises(ConfigError, match=r"'kept' keep \['last_delta'\].*client_means"):
            Strategy(Kept(), linear_model(), **options)
        room = Room(Said())
        room.come(3)
        assert room.round() == {"joined": [3]}
        assert len(room.strategy.state.plan.importance) == 4
    finally:
        ALGORITHMS.pop("kept", None)
        ALGORITHMS.pop("said", None)


def test_what_cannot_work_is_refused() -> None:
    def problem(**federation: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            RunConfig(federation=federation)
        return str(caught.value)

    assert "federation.num_clients: got 'many'; must be a whole number between 1" in problem(
        num_clients="many"
    )
    assert "federation.min_clients: got 3 beside num_clients = 20" in problem(min_clients=3)
    assert "federation.forget_after: got 3 beside num_clients = 20" in problem(forget_after=3)
    text = problem(num_clients="open", min_replies=3, min_clients=2)
    assert "federation.min_clients: got 2; must be between min_replies (3) and 1024" in text
    assert "min_clients: got 2000" in problem(num_clients="open", min_clients=2000)
    text = problem(num_clients="open", clients_per_round=3000)
    assert "what an open federation has room for (1024)" in text
    few = {"num_clients": "open", "clients_per_round": 5}
    with pytest.raises(ConfigError, match=r"min_clients: got 5 .*client_data holds 3 data sets"):
        simulate({"federation": few, "algorithm": {"name": "fedavg"}}, linear_model, DATA[:3])
    with pytest.raises(ConfigError, match=r"got 'open'; who divides data must know"):
        simulate(RunConfig(federation={"num_clients": "open"}))
    with pytest.raises(ConfigError, match=r"state_lost: got 'again'; must be 'fail' or 'restart'"):
        Client(linear_model(), DATA[0], client_id=0, state_lost="again")  # type: ignore[arg-type]


def test_in_one_process_with_data_of_ones_own_all_are_there_from_the_start() -> None:
    found = []
    for number in (3, "open"):
        config = {
            "algorithm": {"name": "scaffold_m"},
            "federation": {"num_clients": number, "clients_per_round": 2, "num_rounds": 3},
            "training": {"local_steps": 3, "device": "cpu"},
        }
        result = simulate(config, linear_model, DATA[:3], DATA[3])
        found.append(result.parameters.tobytes())
    assert found[0] == found[1]


def test_what_a_joining_client_sends_that_would_spoil_the_means_counts_as_zero() -> None:
    class Huge(Client):
        def fit(self, parameters: Any, config: dict[str, Any]) -> Any:
            arrays, count, report = super().fit(parameters, config)
            if config["fedopt.phase"] == "start":
                arrays = [array * 0 + np.float32(1e36) for array in arrays]
            return arrays, count, report

    room = Room(rule_of("scaffold"), clients_per_round=4)
    room.clients[3] = Huge(linear_model(), DATA[3], client_id=3, device="cpu")
    room.come(3)
    room.round()
    (error,) = [e for e in room.strategy.rounds[-1].errors if e["phase"] == "start"]
    assert error["client"] == 3
    assert "holds values of 1e+30 or more, or not finite ones" in error["error"]
    assert room.strategy.rounds[-1].clients == [0, 1, 2, 3]
    room.require_means()


def test_a_stranger_whose_id_is_of_another_kind_stays_outside() -> None:
    room = Room(rule_of("scaffold_m"))
    stranger = Client(linear_model(), DATA[3], client_id="mallory", device="cpu")
    room.manager.register(ForeignProxy("stranger", stranger.to_client()))
    with pytest.warns(
        FedoptWarning, match=r"it calls itself 'mallory'; the run's clients are 0 and"
    ):
        assert room.round() == {}
    room.require_means()


def test_only_a_reply_that_did_not_count_is_a_reason_to_begin_anew() -> None:
    opened = OpenFederation(RunConfig(federation={"num_clients": "open"}).federation, {})
    plan = Plan(2, 2, 9, {0: 5, 1: 5}, {0: 1, 1: 1}, {0: 0.5, 1: 0.5})
    here = SimpleNamespace(here=[0, 1], num_examples={0: 5, 1: 5})
    lost = [{"client": i, "phase": "train", "error": BEGINS_ANEW} for i in (0, 1)]
    opened.hear(RoundRecord(3, clients=[0], errors=lost))
    assert opened.changes(4, here, plan) == {"restarted": [1]}  # type: ignore[arg-type]
    opened.hear(RoundRecord(4, errors=[{**error, "phase": "evaluate"} for error in lost]))
    assert opened.changes(5, here, plan) == {}  # type: ignore[arg-type]


class KeptSum(Scaffold):
    """A rule whose c_i start elsewhere than at zero."""

    name: ClassVar[str] = "kept_sum"

    def init_client(self, size: int) -> dict[str, torch.Tensor]:
        return {"control_variate": torch.full((size,), 0.25)}


def test_a_client_that_was_never_counted_has_the_state_that_its_rule_begins_with() -> None:
    try:
        room = Room(KeptSum(control_variate_start="zero"), clients_per_round=1)
        room.round()
        room.come(3)
        room.strategy.configure_fit(2, room.parameters, room.manager)
        ((counted, version),) = room.strategy.versions.items()
        own = room.clients[int(counted)]._states.load(counted, version)["control_variate"]
        found = room.strategy.state["control_variate"]
        torch.testing.assert_close(found, (own + 3 * 0.25) / 4)
    finally:
        ALGORITHMS.pop("kept_sum", None)


@pytest.mark.parametrize(
    ("means", "text"),
    [
        ({"control_variat": "control_variate"}, r"names server vectors \['control_variat'\]"),
        ({"control_variate": "c_i"}, r"names client states \['c_i'\]"),
    ],
)
def test_means_of_what_a_rule_does_not_have_are_refused(means: dict[str, str], text: str) -> None:
    class Wrong(Scaffold):
        name: ClassVar[str] = "wrong_means"
        client_means: ClassVar[dict[str, str]] = means

    with pytest.raises(ConfigError, match=f"wrong_means: its client_means {text}"):
        make_ledger(Wrong(), None)


def test_with_other_numbers_of_steps_to_come_nothing_is_derived_from_equal_ones() -> None:
    def plan(**training: Any) -> Plan:
        federation = {"num_clients": "open", "clients_per_round": 2}
        config = RunConfig(federation=federation, training=training)
        return make_plan(FedAvg(), config, {0: 64, 1: 64})

    rule = ALGORITHMS["fedavg_m_vr"]()
    assert rule.resolve(plan(local_steps=4)).previous_model == "recovered"
    assert rule.resolve(plan(local_epochs=1)).previous_model == "sent"
    with pytest.raises(ConfigError, match=r"algorithm.previous_model: got 'recovered'"):
        ALGORITHMS["fedavg_m_vr"](previous_model="recovered").resolve(plan(local_epochs=1))
    small = Scaffold(client_learning_rate=0.006)  # ηK is 0.012 with two steps, 0.006 with one
    assert small.resolve(plan(local_steps=2)).lean_uplink is True
    assert small.resolve(plan(local_epochs=1)).lean_uplink is False


def test_copies_that_nothing_counts_on_are_dropped(tmp_path: Path) -> None:
    for states in (MemoryStates(), DiskStates(tmp_path)):
        for i, version in ((0, 1), (0, 2), ("ward 3/5", 2), (7, 1)):
            states.save(i, version, {"control_variate": torch.ones(3)})
        states.keep_only({(0, 2), ("ward 3/5", 2), (8, 1)})
        assert [states._versions(i) for i in (0, "ward 3/5", 7)] == [[2], [2], []]
    assert len(list(tmp_path.iterdir())) == 2  # and the folder of 7 is gone

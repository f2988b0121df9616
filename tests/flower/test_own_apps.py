"""Our strategies and clients in a user's own Flower app."""

from __future__ import annotations

import inspect
import pydoc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from flwr.server import Server, SimpleClientManager
from flwr.server.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    Strategy,
)
from helpers import CLASSES, FEATURES, as_datasets, linear_model, softmax_clients
from torch import nn
from torch.utils.data import Subset

from fedopt_flwr import ConfigError, ModelError, RunConfig, RunError, clients, simulate, strategies
from fedopt_flwr.algorithms import ALGORITHMS, FedAvg
from fedopt_flwr.data import as_client_data, from_datasets
from fedopt_flwr.engines.in_process import run_in_process
from fedopt_flwr.engines.pairs import ForeignProxy, run_pair
from fedopt_flwr.errors import FedoptWarning
from fedopt_flwr.flower import FederatedStrategy, MemoryStates
from fedopt_flwr.flower.app_client import Client
from fedopt_flwr.rounds.record import RoundRecord
from fedopt_flwr.run.experiment import Experiment

DATA = as_datasets(softmax_clients([9, 14, 6]))
SIZES = {"num_clients": 3, "clients_per_round": 2, "num_rounds": 4}
SIZES_OF_1 = dict.fromkeys(SIZES, 1)
NAMES = {rule.__name__: name for name, rule in ALGORITHMS.items()}


def contexts() -> list[Any]:
    return [SimpleNamespace(node_config={"partition-id": i}, state=RecordDict()) for i in range(3)]


def make_clients(kind: type[Client], nodes: list[Any]) -> list[Client]:
    return [
        kind(linear_model(), data, context=node, device="cpu")
        for data, node in zip(DATA, nodes, strict=True)
    ]


def run(strategy: Strategy, members: list[Any], rounds: int = 4) -> None:
    run_in_process(strategy, members, MemoryStates(), num_rounds=rounds)  # type: ignore[arg-type]


def test_every_rule_has_a_strategy_and_a_client() -> None:
    for module, base in ((strategies, strategies.RuleStrategy), (clients, clients.Client)):
        kinds = {
            v.kind
            for v in vars(module).values()
            if isinstance(v, type) and v is not base and issubclass(v, base)
        }
        assert kinds == set(ALGORITHMS.values())
    for name, rule in NAMES.items():
        assert getattr(clients, f"{name}Client").kind is ALGORITHMS[rule]
        assert getattr(strategies, name).kind is ALGORITHMS[rule]


@pytest.mark.parametrize("name", NAMES)
def test_help_and_completion_show_a_rules_own_arguments_with_their_defaults(name: str) -> None:
    kind = getattr(strategies, name)
    parameters = inspect.signature(kind).parameters
    fields = ALGORITHMS[NAMES[name]].model_fields
    assert next(iter(parameters)) == "model"
    assert {key: parameters[key].default for key in fields} == {
        key: field.default for key, field in fields.items()
    }
    assert parameters["num_clients"].default is inspect.Parameter.empty
    assert parameters["batch_size"].default == 32
    assert parameters.keys() == {"model", *fields, *strategies.StrategyOptions.__annotations__}
    text = pydoc.plain(pydoc.render_doc(kind))
    assert "num_clients" in text
    assert all(f"{key}=" in text for key in fields)
    assert ALGORITHMS[NAMES[name]].__doc__.splitlines()[0] in text


def test_a_rule_of_your_own_has_a_strategy_and_a_client_in_two_lines_each() -> None:
    class Halved(FedAvg):
        name: ClassVar[str] = "halved"

        def server_update(self, state: Any, replies: Any) -> Any:
            moved = super().server_update(state, replies)["model"]
            return state.replace(model=(state["model"] + moved) / 2)

    class HalvedStrategy(strategies.RuleStrategy):
        kind = Halved

    class HalvedClient(clients.Client):
        kind = Halved

    found = []
    try:
        for strategy, kind in (
            (HalvedStrategy(linear_model(), **SIZES, client_learning_rate=0.1), HalvedClient),
            (strategies.Strategy(Halved(client_learning_rate=0.1), linear_model(), **SIZES), None),
        ):
            run(strategy, make_clients(kind or clients.Client, contexts()))
            assert strategy.rounds[-1].failures == 0
            found.append(strategy.model.vector.numpy().tobytes())
    finally:
        ALGORITHMS.pop("halved", None)
    whole = strategies.FedAvg(linear_model(), **SIZES, client_learning_rate=0.1)
    run(whole, make_clients(clients.Client, contexts()))
    assert found[0] == found[1] != whole.model.vector.numpy().tobytes()


@pytest.mark.parametrize("shares_with_server", [False, True])
def test_clients_on_one_shared_module_train_as_if_each_had_its_own(
    shares_with_server: bool,
) -> None:
    found = []
    for is_shared in (False, True):
        one = linear_model()
        modules = [one] * 3 if is_shared else [linear_model() for _ in range(3)]
        servers = one if is_shared and shares_with_server else linear_model()
        strategy = strategies.FedAvg(servers, **SIZES)
        pairs = zip(modules, DATA, strict=True)
        members = [
            clients.FedAvgClient(m, d, client_id=i, device="cpu") for i, (m, d) in enumerate(pairs)
        ]
        arrays = run_pair(strategy, [member.to_client() for member in members], 3)
        assert [r.failures for r in strategy.rounds] == [0, 0, 0]
        np.testing.assert_array_equal(arrays[0], strategy.state["model"][:12].view(3, 4).numpy())
        found.append(strategy.model.vector.numpy().tobytes())
    assert found[0] == found[1]


def test_a_client_with_its_own_module_refuses_a_server_that_names_a_model() -> None:
    config = RunConfig(federation=SIZES, algorithm={"name": "padamfed"})
    experiment = Experiment(config, model=linear_model, data=from_datasets(DATA, None, config))
    strategy = FederatedStrategy(
        experiment.rule, experiment.model, config, template=experiment.template()
    )
    with pytest.raises(RunError, match="asks for model 'mlp' and loss 'cross_entropy', PAdaMFed"):
        run(strategy, make_clients(clients.PAdaMFedClient, contexts()))


@pytest.mark.parametrize("name", NAMES)
def test_own_apps_give_the_same_bits_as_a_simulation(name: str) -> None:
    strategy = getattr(strategies, name)(
        linear_model(), **SIZES, local_steps=3, batch_size=4, seed=5
    )
    run(strategy, make_clients(getattr(clients, f"{name}Client"), contexts()))
    config = {
        "algorithm": {"name": NAMES[name]},
        "federation": SIZES | {"seed": 5},
        "training": {"local_steps": 3, "batch_size": 4, "device": "cpu"},
    }
    expected = simulate(config, model=linear_model, client_data=DATA)
    assert strategy.model.vector.numpy().tobytes() == expected.parameters.tobytes()
    assert [r.train_loss for r in strategy.rounds] == [r.train_loss for r in expected.rounds]


def test_state_lives_in_the_context_and_new_client_objects_find_it() -> None:
    """Simulation and SuperNodes make a new client object for every message."""
    nodes = contexts()

    class Fresh(clients.ScaffoldMClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            place = self._context.node_config["partition-id"]
            again = clients.ScaffoldMClient(
                linear_model(), DATA[place], context=nodes[place], device="cpu"
            )
            return again.fit(parameters, config)

    results = []
    for kind in (Fresh, clients.ScaffoldMClient):
        nodes[:] = contexts()
        strategy = strategies.ScaffoldM(linear_model(), **SIZES)
        run(strategy, make_clients(kind, nodes))
        results.append(strategy.model.vector.clone())
        assert strategy.rounds[-1].failures == 0
    assert torch.equal(*results)


def test_flowers_three_functions_work_as_in_its_own_strategies() -> None:
    seen: dict[str, list[Any]] = {"evaluate": [], "config": [], "metrics": []}

    def evaluate(server_round: int, arrays: list[np.ndarray], config: Any) -> Any:
        seen["evaluate"].append((server_round, [a.shape for a in arrays]))
        return 0.5, {"accuracy": 0.25}

    class Curious(clients.FedAvgClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            seen["config"].append(config["temperature"])
            arrays, count, report = super().fit(parameters, config)
            return arrays, count, {**report, "humidity": 2.0 * self.client_id}

    def aggregate(metrics: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
        seen["metrics"].append([(n, m["humidity"]) for n, m in metrics])
        return {"humidity": 1.0}

    strategy = strategies.FedAvg(
        linear_model(),
        **SIZES | {"clients_per_round": 3, "num_rounds": 2},
        evaluate_fn=evaluate,
        on_fit_config_fn=lambda server_round: {"temperature": 10 * server_round},
        fit_metrics_aggregation_fn=aggregate,
    )
    run(strategy, make_clients(Curious, contexts()), rounds=2)
    assert seen["evaluate"] == [(r, [(3, 4), (3,)]) for r in (0, 1, 2)]
    assert seen["config"] == [10] * 3 + [20] * 3
    assert seen["metrics"] == [[(9, 0.0), (14, 2.0), (6, 4.0)]] * 2
    assert [r.test_accuracy for r in strategy.rounds] == [0.25, 0.25]


def test_the_client_of_another_rule_is_told_so() -> None:
    strategy = strategies.FedAvg(linear_model(), **SIZES)
    run(strategy, make_clients(clients.FedProxClient, contexts()), rounds=1)
    errors = [e["error"] for e in strategy.rounds[0].errors]
    assert (
        errors
        == ["the strategy runs 'fedavg', FedProxClient 'fedprox'; take the client of that rule"] * 2
    )


class KeepsWhatItComputed(nn.Linear):
    def __init__(self) -> None:
        super().__init__(FEATURES, CLASSES)
        self.last = self.weight * 2


def test_a_module_that_cannot_be_copied_is_refused_with_the_remedy() -> None:
    for make in (
        lambda: strategies.FedAvg(KeepsWhatItComputed(), **SIZES),
        lambda: clients.FedAvgClient(KeepsWhatItComputed(), DATA[0], client_id=0),
    ):
        with pytest.raises(ModelError, match=r"type KeepsWhatItComputed cannot be copied: .*keep"):
            make()


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ConfigError, match=r"padamfed\.momentum: got 1\.5"):
        strategies.PAdaMFed(linear_model(), **SIZES, momentum=1.5)
    with pytest.raises(ConfigError) as caught:
        strategies.FedAvg(linear_model(), **SIZES | {"num_rounds": 0}, client_learning_rate=-1.0)
    fields = [line.partition(":")[0] for line in caught.value.problems]
    assert fields == ["fedavg.client_learning_rate", "federation.num_rounds"]
    with pytest.raises(ConfigError, match=r"federation\.clients_per_round: got 9"):
        strategies.FedAvg(linear_model(), **SIZES | {"clients_per_round": 9})
    with pytest.raises(TypeError, match="FedAvg: unknown argument 'rounds'"):
        strategies.FedAvg(linear_model(), **SIZES, rounds=3)
    with pytest.raises(ConfigError, match="neither client-id nor partition-id"):
        clients.FedAvgClient(linear_model(), DATA[0])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: DifferentialPrivacyServerSideFixedClipping(s, 1.0, 1.0, 2),
        lambda s: DifferentialPrivacyServerSideAdaptiveClipping(s, 0.01, 2),
        lambda s: DifferentialPrivacyClientSideFixedClipping(s, 1.0, 1.0, 2),
        lambda s: DifferentialPrivacyClientSideAdaptiveClipping(s, 0.01, 2),
    ],
)
def test_flowers_privacy_wrappers_are_refused_before_anything_is_asked(wrap: Any) -> None:
    strategy = strategies.FedAvg(linear_model(), **SIZES)
    wrapped = wrap(strategy)
    for name in ("members", "versions", "asked", "set_max_workers"):
        setattr(wrapped, name, getattr(strategy, name))
    with pytest.raises(RunError, match=r"DifferentialPrivacy.*noise would be dropped"):
        run(wrapped, make_clients(clients.FedAvgClient, contexts()))
    assert strategy.rounds == []


def test_a_wrapper_that_leaves_the_arrays_alone_works() -> None:
    class Logging:
        def __init__(self, inner: Strategy) -> None:
            self.inner, self.calls = inner, []

        def __getattr__(self, name: str) -> Any:
            self.calls.append(name)
            return getattr(self.inner, name)

    strategy = strategies.FedAvg(linear_model(), **SIZES)
    wrapped = Logging(strategy)
    run(wrapped, make_clients(clients.FedAvgClient, contexts()))  # type: ignore[arg-type]
    assert wrapped.calls.count("aggregate_fit") == 4
    assert len(strategy.rounds) == 4


def test_clients_that_share_a_module_do_not_begin_with_each_others_buffers() -> None:
    """As with a model at the top of an app's module, which simulation gives to every client."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, 2), nn.BatchNorm1d(2), nn.Linear(2, CLASSES))

    class Fresh(clients.FedAvgClient):
        make: ClassVar[Callable[[], nn.Module]]

        def fit(self, parameters: Any, config: Any) -> Any:
            again = clients.FedAvgClient(
                type(self).make(), DATA[self.client_id], context=self._context, device="cpu"
            )
            return again.fit(parameters, config)

    found, one = [], model()
    for make in (model, lambda: one):
        nodes, Fresh.make = contexts(), staticmethod(make)
        sizes = SIZES | {"clients_per_round": 3, "num_rounds": 1}
        strategy = strategies.FedAvg(model(), **sizes, buffers="local")
        pairs = zip(DATA, nodes, strict=True)
        run(strategy, [Fresh(make(), d, context=n, device="cpu") for d, n in pairs], rounds=1)
        records = [next(iter(node.state.array_records.values())) for node in nodes]
        found.append([record["buffers.float32"].numpy().tolist() for record in records])
    assert found[0] == found[1]


def test_buffers_that_the_user_puts_into_a_module_are_where_a_client_begins() -> None:
    net = nn.Sequential(nn.Linear(FEATURES, 2), nn.BatchNorm1d(2), nn.Linear(2, CLASSES))
    left = []
    for mean in (0.0, 7.0):
        net[1].running_mean.fill_(mean)
        node = contexts()[0]
        client = clients.FedAvgClient(net, DATA[0], context=node, device="cpu")
        strategy = strategies.FedAvg(net, **SIZES_OF_1, buffers="local", batch_size=0)
        run(strategy, [client], rounds=1)
        (record,) = node.state.array_records.values()
        left.append(record["buffers.float32"].numpy()[:2])
    # each of 10 steps keeps nine tenths of the running mean
    np.testing.assert_allclose(left[1] - left[0], 7 * 0.9**10, rtol=1e-5)


def test_a_client_with_other_data_than_at_the_start_is_not_counted_and_c_stays_the_mean() -> None:
    """Under local epochs K_i follows from n_i, and the server's c_i from K_i."""
    nodes = contexts()
    members = make_clients(clients.ScaffoldClient, nodes)
    whole, few = members[0].data, as_client_data(Subset(DATA[0], range(3)))

    def swap(record: RoundRecord) -> None:
        members[0].data = few if record.round == 2 else whole

    strategy = strategies.Scaffold(
        linear_model(),
        **SIZES | {"clients_per_round": 3, "num_rounds": 5},
        local_epochs=1,
        batch_size=3,
        on_round=swap,
    )
    run(strategy, members, rounds=5)
    errors = [(r.round, e["client"], e["error"]) for r in strategy.rounds for e in r.errors]
    text = "took 1 local steps; with the examples that it had at the start it takes 3; give it"
    assert [(number, client) for number, client, _ in errors] == [(3, 0)]
    assert text in errors[0][2]
    own = []
    for client, node in enumerate(nodes):
        version = strategy.versions[client]
        (key,) = [k for k in node.state.array_records if k.endswith(f"/{client}/{version}")]
        own.append(node.state.array_records[key]["control_variate"].numpy())
    c = strategy.state["control_variate"].numpy()
    np.testing.assert_allclose(c, np.mean(own, axis=0), atol=1e-6)


class Mute(ForeignProxy):
    """A connection that never says who it is, and hears how long it is waited for."""

    def __init__(self) -> None:
        super().__init__("mute", None)  # type: ignore[arg-type]
        self.patience: list[float | None] = []

    def get_properties(self, ins: Any, timeout: float | None, group_id: int | None) -> NoReturn:
        self.patience.append(timeout)
        raise RuntimeError("the node went away")


@pytest.mark.filterwarnings("ignore:connection mute")
def test_a_connection_that_does_not_introduce_itself_counts_as_away() -> None:
    manager, mute = SimpleClientManager(), Mute()
    for number, member in enumerate(make_clients(clients.FedAvgClient, contexts())):
        manager.register(ForeignProxy(str(number), member.to_client()))

    def join(record: RoundRecord) -> None:
        if record.round == 2:
            manager.register(mute)

    sizes = SIZES | {"num_rounds": 5}
    strategy = strategies.FedAvg(linear_model(), **sizes, start_timeout=7.0, on_round=join)
    server = Server(client_manager=manager, strategy=strategy)
    server.set_max_workers(1)
    server.fit(5, None)
    assert [(r.round, r.failures) for r in strategy.rounds] == [(i, 0) for i in range(1, 6)]
    assert set(mute.patience) == {7.0}

    again = SimpleClientManager()
    again.register(mute)
    strategy = strategies.FedAvg(linear_model(), **SIZES_OF_1, start_timeout=1.0)
    server = Server(client_manager=again, strategy=strategy)
    with (
        pytest.warns(FedoptWarning, match="did not tell its client id: the node went away; it"),
        pytest.raises(RunError, match=r"only 0 of 1 clients were connected .* missing 0; start"),
    ):
        server.fit(1, None)

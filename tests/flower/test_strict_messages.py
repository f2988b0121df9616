"""Instructions and reports hold values of their own types and ranges; states are as written."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.common import Code, FitRes, Parameters, Status, ndarrays_to_parameters
from flwr.server import Server, SimpleClientManager
from helpers import OpenRun, as_datasets, linear_model, make_plan, open_run, softmax_clients
from safetensors.torch import load_file, save_file

from fedopt_flwr import RunConfig, clients, strategies
from fedopt_flwr.config.client_ids import is_client_id
from fedopt_flwr.engines.pairs import ForeignProxy
from fedopt_flwr.errors import FedoptWarning, MessageError
from fedopt_flwr.flower import DiskStates, Instruction
from fedopt_flwr.flower.instruction import Report
from fedopt_flwr.flower.messages import ArraysInMemory, encoded_size
from fedopt_flwr.flower.replies import accept
from fedopt_flwr.rounds.participation import make_plan as plan_of
from fedopt_flwr.rounds.participation import warn_of_one_weight
from fedopt_flwr.rounds.record import RoundRecord
from fedopt_flwr.training.flat_model import FlatModel, Layout

TEMPLATE = Instruction.for_run(RunConfig(), FlatModel(linear_model()), (1, 8, 8), 10)
SAID = {"arrays": "delta", "loss": 0.5, "num_steps": 2, "client_seconds": 0.1}
ASKED = {"run": "0" * 32, "round": 1, "phase": "train"}


def test_an_instruction_comes_back_as_it_was() -> None:
    assert Instruction.from_config(TEMPLATE.to_config() | {"own": 3.5}) == TEMPLATE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run", "A" * 32),
        ("run", "0" * 33),
        ("model", 5),
        ("model", "m" * 300),
        ("model_options", "[]"),
        ("model_options", '{"x": ' + "[" * 5000),
        ("model_options", '{"x": "' + "y" * 20_000 + '"}'),
        ("input_shape", "8"),
        ("input_shape", "[1e9]"),
        ("input_shape", "[" + "1, " * 9 + "1]"),
        ("num_classes", -5),
        ("seed", "x"),
        ("seed", 2**63),
        ("threads", 0),
        ("threads", "2"),
        ("threads", True),
        ("local_steps", -5),
        ("batch_size", 2**40),
        ("weight_decay", float("nan")),
        ("weight_decay", "1"),
        ("clip_norm", float("inf")),
        ("gradient_momentum", 1.0),
        ("buffers", "evil"),
        ("phase", "x"),
        ("round", 1.0),
        ("arrays", "," * 10**6),
        ("hyperparameters", "NaN"),
    ],
)
def test_an_instruction_beyond_its_ranges_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(MessageError) as caught:
        Instruction.from_config(TEMPLATE.to_config() | {f"fedopt.{field}": value})
    assert str(caught.value).startswith(f"instruction: {field}: got {value!r}"[:60])
    assert len(str(caught.value)) <= 500


def test_an_instruction_says_either_steps_or_epochs() -> None:
    for steps, epochs in ((0, 0), (1, 1)):
        own = {"fedopt.local_steps": steps, "fedopt.local_epochs": epochs}
        with pytest.raises(MessageError, match="one of them must be 0, the other not"):
            Instruction.from_config(TEMPLATE.to_config() | own)


def test_a_report_lets_a_users_own_values_pass_but_no_long_ones() -> None:
    assert Report.from_metrics(SAID | {"humidity": 2.0, "note": b"x"}, "client 1").num_steps == 2
    for wrong, text in (
        ({"loss": "0.5"}, "report: loss: got '0.5'"),
        ({"loss": float("nan")}, "reported loss nan .* not finite"),
        ({"num_steps": -1}, "report: num_steps: got -1"),
        ({"num_steps": True}, "report: num_steps: got True"),
        ({"client_seconds": None}, "report: client_seconds: got None"),
        ({"arrays": "," * 5000}, "report: arrays: got ',,,"),
        ({"own": b"x" * 20_000}, "holds a text of 20000 characters; must be at most 16384"),
        ({"x" * 20_000: 1}, "holds a text of 20000 characters; must be at most 16384"),
    ):
        with pytest.raises(MessageError, match=text):
            Report.from_metrics(SAID | wrong, "client 1")


@pytest.mark.parametrize(
    "parameters",
    [ArraysInMemory([b"no array"]), Parameters(None, ""), None],  # type: ignore[list-item, arg-type]
    ids=["bytes in memory", "no tensors", "nothing"],
)
def test_whatever_a_reply_raises_is_its_clients_failure(parameters: Any) -> None:
    good = ndarrays_to_parameters([np.ones(3, np.float32)])
    answers = {
        0: FitRes(Status(Code.OK, ""), parameters, 1, SAID | ASKED),
        1: FitRes(Status(Code.OK, ""), good, 1, SAID | ASKED),
    }
    record = RoundRecord(1)
    layout = {"delta": Layout(3, "float32")}
    expected = {0: layout, 1: layout}
    assert list(accept([0, 1], answers, expected, record, ASKED)) == [1]
    assert [(e["client"], e["phase"]) for e in record.errors] == [(0, "train")]


def test_sizes_are_computed_and_no_memory_is_taken_for_them() -> None:
    assert encoded_size((10**15,), "<f4") == 4 * 10**15 + 128


def test_ids_are_told_by_their_type() -> None:
    assert all(map(is_client_id, [0, 7, "ward-3", "Ä 1"]))
    wrong = [True, 1.0, -1, 10**30, "", "1", "0-3", "a\n", "x" * 65, "\ud800", None, b"a", ["a"]]
    assert not any(map(is_client_id, wrong))


def test_a_bad_connection_before_the_start_is_absent_and_the_run_goes_on_without_it() -> None:
    class Late(SimpleClientManager):
        """A third client comes after the server looked for the first time."""

        def num_available(self) -> int:
            count = super().num_available()
            if count == 3 and "late" not in self.clients:
                looks.append(count)
                if len(looks) == 3:
                    self.register(proxies["late"])
            return count

    class Odd(clients.FedAvgClient):
        def get_properties(self, config: Any) -> Any:
            return {"client_id": 1.0, "num_examples": 5}

    looks: list[int] = []
    kinds = {"0": clients.FedAvgClient, "odd": Odd, "2": clients.FedAvgClient}
    kinds["late"] = clients.FedAvgClient
    data = as_datasets(softmax_clients([9, 9, 9, 9]))
    proxies = {
        cid: ForeignProxy(cid, kind(linear_model(), own, client_id=number).to_client())
        for number, ((cid, kind), own) in enumerate(zip(kinds.items(), data, strict=True))
    }
    manager = Late()
    for cid in ("0", "odd", "2"):
        manager.register(proxies[cid])
    strategy = strategies.FedAvg(
        linear_model(), num_clients=3, clients_per_round=3, num_rounds=1, start_timeout=30.0
    )
    server = Server(client_manager=manager, strategy=strategy)
    with pytest.warns(FedoptWarning, match=r"connection odd: .* client_id 1.0; .* counts as away"):
        server.fit(1, None)
    assert strategy.rounds[0].clients == [0, 2, 3]


def test_one_client_with_nearly_all_weight_is_named_at_the_start() -> None:
    config = RunConfig(
        algorithm={"name": "fedavg"},
        federation={"num_clients": 2, "clients_per_round": 2, "weighting": "examples"},
    )
    with pytest.warns(FedoptWarning, match=r"client 1: holds 95.0% of all weight, with 95 examp"):
        warn_of_one_weight(plan_of(config.make_rule(), config, {0: 5, 1: 95}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_one_weight(plan_of(config.make_rule(), config, {0: 10, 1: 90}))
        warn_of_one_weight(make_plan(1, [2]))


C = {"control_variate": torch.ones(650)}


def rewritten(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    def rewrite(path: Path) -> None:
        state = load_file(path)
        change(state)
        save_file(state, path)

    return rewrite


def flipped(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[-7] ^= 4
    path.write_bytes(contents)


@pytest.mark.parametrize(
    "edit",
    [
        flipped,
        lambda p: p.write_bytes(p.read_bytes()[:-5]),
        lambda p: p.write_bytes(b""),
        rewritten(lambda s: s.update(control_variate=torch.ones(1))),
        rewritten(lambda s: s.update(more=torch.ones(1))),
        lambda p: p.write_bytes((p.parent / "round-2.safetensors").read_bytes()),
        lambda p: p.write_bytes((p.parents[1] / "client-1" / p.name).read_bytes()),
    ],
    ids=["a bit", "cut", "empty", "shape", "more", "another round's", "another client's"],
)
def test_a_state_that_is_not_as_it_was_written_is_refused(tmp_path: Path, edit: Any) -> None:
    states = DiskStates(tmp_path)
    for client, version in ((0, 2), (0, 3), (1, 3)):
        states.save(client, version, C)
    edit(tmp_path / "client-0" / "round-3.safetensors")
    with pytest.raises(MessageError, match=r"client 0: state of round 3 in .* is broken"):
        states.load(0, 3)
    assert torch.equal(states.load(0, 2)["control_variate"], C["control_variate"])


def test_other_files_in_a_state_folder_are_left_alone_and_rests_of_saves_removed(
    tmp_path: Path,
) -> None:
    states = DiskStates(tmp_path)
    states.save(0, 3, C)
    folder = tmp_path / "client-0"
    for name in ("round-3 (copy).safetensors", "round-03.safetensors", "round-x.safetensors"):
        (folder / name).write_bytes(b"x")
    for name in [f"round-{n}.safetensors.{n:016x}.unfinished" for n in (1, 2)]:
        (folder / name).write_bytes(b"x")
    states.prune(0, {3})
    with pytest.raises(MessageError, match=r"has \[3\]; the client lost"):
        states.load(0, 4)
    states.save(0, 4, C)
    assert sorted(p.name for p in folder.iterdir()) == [
        "round-03.safetensors",
        "round-3 (copy).safetensors",
        "round-3.safetensors",
        "round-4.safetensors",
        "round-x.safetensors",
    ]


def test_states_are_the_users_alone_and_stay_in_their_folder(tmp_path: Path) -> None:
    home = tmp_path / "state" / "run-0"
    states = DiskStates(home)
    before = os.umask(0)
    try:
        states.save("ward/3", 1, C)
    finally:
        os.umask(before)
    (file,) = home.rglob("*.safetensors")
    assert file.stat().st_mode & 0o777 == 0o600
    assert [p.stat().st_mode & 0o777 for p in file.parents[:3]] == [0o700] * 3
    wrong: list[Any] = [(0, "../x"), (0, True), (0, -1), (1.0, 1), ("a\n", 1), (True, 1)]
    for client_id, version in wrong:
        with pytest.raises(MessageError, match="must be an id and a round's number"):
            states.save(client_id, version, C)
    (home / "client-5").symlink_to(tmp_path)
    for use in (lambda: states.save(5, 1, C), lambda: states.load(5, 1)):
        with pytest.raises(MessageError, match=r"outside of .*; remove that link"):
            use()
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_a_state_of_another_model_is_refused() -> None:
    def spoil(run: OpenRun) -> None:
        if run.records[-1].round == 1:
            version = run.strategy.versions[1]
            run.states._states[1][version] = {"control_variate": torch.ones(1)}

    data = as_datasets(softmax_clients([9, 9]))
    config = {
        "algorithm": {"name": "scaffold_m"},
        "federation": {"num_clients": 2, "clients_per_round": 2, "num_rounds": 2},
        "training": {"local_steps": 2, "batch_size": 4},
    }
    run = open_run(config, data, on_round=spoil)
    (error,) = run.records[-1].errors
    assert error["client"] == 1
    assert "torch.float32, [1]" in error["error"]
    assert "expected {'control_variate': 'torch.float32, [15]'}" in error["error"]

"""Runs of this package's own ServerApp and ClientApp, by messages, without a SuperLink."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from rooms import Room

from fedopt_flwr import RunConfig, RunError, simulate
from fedopt_flwr.engines.grid import make_client_app
from fedopt_flwr.errors import FedoptWarning
from fedopt_flwr.run.directory import RunDirectory
from fedopt_flwr.run.flower_apps import client_of_node, serve_on_grid
from fedopt_flwr.run.result import Result
from fedopt_flwr.run.run import Silent

SIZES = {"num_clients": 3, "clients_per_round": 2, "num_rounds": 2}
# unlike in what travels; all of them on Ray, in test_flower_runtimes
RULES = ("fedavg", "scaffold_m", "padamfed", "fadamgc", "mb_storm")
SERVERS = {"aggregation_seconds", "evaluation_seconds"}
UNLIKE = {"seconds", "client_seconds", "seconds_by_client", *SERVERS}  # in two runs that are alike


def config_of(folder: Path | None = None, rule: str = "fedavg", **sections: Any) -> RunConfig:
    return RunConfig(
        **{
            "algorithm": {"name": rule},
            "training": {"local_steps": 3, "device": "cpu", **sections.pop("training", {})},
            "output": {"directory": folder, **sections.pop("output", {})},
            "federation": {**SIZES, **sections.pop("federation", {})},
            **sections,
        }
    )


def room_of(config: RunConfig) -> Room:
    count = config.federation.num_clients
    assert isinstance(count, int)
    return Room(make_client_app(lambda context: client_of_node(config, context)), count)


def run(config: RunConfig, room: Room | None = None) -> Result:
    return serve_on_grid(config, Silent(), room or room_of(config))


def records_of(result: Result) -> list[dict[str, Any]]:
    return [{k: v for k, v in asdict(r).items() if k not in UNLIKE} for r in result.rounds]


def require_the_same(rule: str = "fedavg", **sections: Any) -> list[dict[str, Any]]:
    """Run over messages and in process; records and model must be alike."""
    config = config_of(None, rule, **sections)
    there, here = run(config), simulate(config)
    assert records_of(there) == records_of(here)
    assert there.parameters.tobytes() == here.parameters.tobytes()
    for own, other in zip(
        there.model.state_dict().values(), here.model.state_dict().values(), strict=True
    ):
        assert torch.equal(own, other)
    return records_of(there)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rules_have_the_records_and_bits_of_one_process(rule: str) -> None:
    records = require_the_same(rule)
    assert [r["failures"] for r in records if r["round"]] == [0, 0]


def test_clients_evaluate_as_the_configuration_says() -> None:
    records = require_the_same(
        "scaffold_m",
        data={"holdout": 0.2},
        evaluation={"on_clients": True, "every": 2, "clients": 2},
        federation={"num_rounds": 3},
    )
    found = {r["round"]: r["on_clients"] for r in records}
    assert [n for n, told in found.items() if told] == [0, 2, 3]
    assert found[2]["asked"] == len(found[2]["clients"]) == 2
    assert found[2]["spread"]["accuracy"]["mean"] > 0


@pytest.mark.parametrize("rule", ["fedavg", "scaffold"])
def test_diagnostics_are_those_of_one_process(rule: str) -> None:
    records = require_the_same(
        rule, output={"diagnostics": True}, training={"local_steps": 2, "weight_decay": 0.1}
    )
    assert all(r["gradient_norm"] > 0 and r["global_train_loss"] > 0 for r in records)
    last = records[-1]
    assert last["drift"] > 0
    assert -1 < last["gradient_cosine"] < 1
    assert ("control_norm" in last["each_client"]["0"]) == (rule == "scaffold")


def test_evaluations_travel_as_messages_to_evaluate() -> None:
    config = config_of(data={"holdout": 0.2}, evaluation={"on_clients": True})
    room = room_of(config)
    run(config, room)
    phases = {
        m.metadata.message_type: m.content["config"]["fedopt.phase"]
        for m in room.seen
        if "arrays" in m.content
    }
    assert phases == {"train": "train", "evaluate": "evaluate"}


def test_more_may_be_asked_than_count() -> None:
    records = require_the_same(federation={"num_clients": 6, "over_sample": 2.0, "num_rounds": 3})
    assert [(len(r["clients"]), r["failures"]) for r in records] == [(2, 2)] * 3


def test_parts_that_stay_with_clients_are_kept_between_messages() -> None:
    records = require_the_same(
        "scaffold",
        data={"holdout": 0.2},
        federation={"local_parameters": ["*bias"]},
        evaluation={"on_clients": True},
    )
    assert records[-1]["on_clients"]["own_spread"]["accuracy"]["mean"] > 0


def test_a_run_that_stops_ends_there() -> None:
    records = require_the_same(
        stop={"metric": "test_loss", "target": 100.0},
        federation={"num_rounds": 9},
        output={"evaluate_every": 2},
    )
    assert [r["round"] for r in records] == [1, 2]


def test_checkpoints_name_the_versions_that_nodes_keep(tmp_path: Path) -> None:
    config = config_of(
        tmp_path / "run",
        rule="scaffold",
        output={"checkpoint_every": 1, "keep": 2},
        federation={"num_rounds": 4, "clients_per_round": 3},
    )
    room = room_of(config)
    run(config, room)
    checkpoint = RunDirectory(tmp_path / "run").read_checkpoint()
    assert checkpoint.clients_keep_state
    assert checkpoint.server.versions == {0: 4, 1: 4, 2: 4}
    for number in range(3):
        kept = {int(key.rpartition("/")[2]) for key in room.contexts[100 + number].state}
        assert kept >= {3, 4}  # of the last two checkpoints
        assert 0 not in kept


def test_failures_carry_their_reasons() -> None:
    config = config_of(federation={"num_rounds": 3, "clients_per_round": 3})
    broken: set[int] = set()

    def client_for(context: Any) -> Any:
        if context.node_config["partition-id"] in broken:
            raise OSError("no disk today")
        return client_of_node(config, context)

    class Breaking(Silent):
        def on_round(self, record: Any) -> None:
            broken.update({1} if record.round == 1 else ())
            room.gone = {102} if record.round == 1 else set()

    room = Room(make_client_app(client_for), 3)
    with pytest.warns(FedoptWarning, match="client 1: failed in 2 of the 3 rounds"):
        result = serve_on_grid(config, Breaking(), room)
    assert [r.clients for r in result.rounds] == [[0, 1, 2], [0], [0, 2]]
    errors = {e["client"]: e["error"] for e in result.rounds[1].errors}
    assert errors == {1: "it failed: OSError: no disk today", 2: "it failed: Node Unavailable"}


def test_what_fails_at_the_start_is_raised_in_the_caller(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", federation={"start_timeout": 0.1})
    room = room_of(config)
    del room.contexts[101]
    with pytest.raises(RunError, match=r"only 2 of 3 clients were connected .* missing 1"):
        run(config, room)


def test_a_rounds_replies_are_let_go_when_it_ends() -> None:
    """Flower's loop would hold them until those of the next round are there, twice the memory."""
    kept: list[list[weakref.ref[Message]]] = []

    class Watched(Room):
        def send_and_receive(
            self, messages: Iterable[Message], *, timeout: float | None = None
        ) -> list[Message]:
            if kept:
                assert [ref for ref in kept[-1] if ref() is not None] == []
            replies = super().send_and_receive(messages, timeout=timeout)
            if any(reply.metadata.message_type == "train" for reply in replies):
                kept.append([weakref.ref(reply) for reply in replies])
            return replies

    config = config_of(federation={"num_rounds": 3})
    run(config, Watched(room_of(config).app, 3))
    assert [len(replies) for replies in kept] == [2, 2, 2]

"""Runs of one configuration are one curve; what differs between the others names them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from helpers import write_run_at_work

from fedopt_flwr import RunConfig
from fedopt_flwr.errors import ConfigError
from fedopt_flwr.rounds.record import RoundRecord
from fedopt_flwr.run.grouping import curves_of
from fedopt_flwr.run.plots.subject import subject_of
from fedopt_flwr.run.reading import RecordedRun, read_so_far


def run(**sections: dict[str, Any]) -> RecordedRun:
    rounds = [RoundRecord(1, test_loss=1.0)]
    return RecordedRun(Path("run"), RunConfig(**sections), rounds, None, True)


def names(*runs: RecordedRun) -> list[str]:
    return [curve.name for curve in curves_of(runs)]


def test_runs_that_differ_in_seed_place_and_speed_are_one_curve() -> None:
    runs = [
        run(federation={"seed": 3}, output={"directory": "a"}),
        run(federation={"seed": 4}, output={"directory": "b", "checkpoint_every": 5}),
        run(federation={"seed": 5}, training={"device": "cpu"}, data={"path": "/elsewhere"}),
        run(rules={"fedavg": {"client_learning_rate": 0.3}}),  # another rule's
    ]
    (curve,) = curves_of(runs)
    assert curve.name == "autofed"
    assert [trace.rounds for trace in curve.traces] == [run.rounds for run in runs]


def test_rules_have_their_names_and_variants_what_differs() -> None:
    assert names(
        run(algorithm={"name": "fedavg"}),
        run(algorithm={"name": "scaffold_m", "client_learning_rate": 0.2}),
    ) == ["fedavg", "scaffold_m"]
    assert names(
        run(algorithm={"name": "fedavg", "client_learning_rate": 0.5}),
        run(algorithm={"name": "fedavg"}, rules={"fedavg": {"client_learning_rate": 0.2}}),
        run(algorithm={"name": "scaffold"}),
    ) == ["fedavg, client_learning_rate=0.5", "fedavg, client_learning_rate=0.2", "scaffold"]


def test_a_default_that_is_written_out_is_no_difference() -> None:
    written = {"name": "fedavg", "server_learning_rate": 1.0}
    assert names(run(algorithm={"name": "fedavg"}), run(algorithm=written)) == ["fedavg"]


def test_other_settings_name_curves_of_one_rule_without_it_and_of_several_with_it() -> None:
    short, long = {"local_steps": 5}, {"local_steps": 20}
    assert names(run(training=short), run(training=long)) == ["local_steps=5", "local_steps=20"]
    assert names(
        run(training=short), run(training=long, algorithm={"name": "fedavg"}), run(training=long)
    ) == ["autofed, local_steps=5", "fedavg, local_steps=20", "autofed, local_steps=20"]
    cnn = {"name": "cnn"}
    assert names(run(), run(model=cnn), run(data={"name": "mnist"})) == [
        "digits, mlp",
        "digits, cnn",
        "mnist, mlp",
    ]


def test_a_whole_number_is_the_same_setting_however_it_is_written() -> None:
    synthetic = {"name": "synthetic"}
    runs = [run(data=synthetic | {"options": {"model_spread": v}}) for v in (1, 1.0, 0.5)]
    assert names(*runs) == ["model_spread=1", "model_spread=0.5"]


def test_every_curve_has_a_name_of_its_own() -> None:
    close = [run(algorithm={"name": "fedavg", "client_learning_rate": v}) for v in (0.1, 0.1000001)]
    assert names(*close) == ["client_learning_rate=0.1", "client_learning_rate=0.1000001"]
    alike = [run(data={"name": "own:load", "options": {"size": v}}) for v in (1, "1", True)]
    assert names(*alike) == ["size=1", "size=1 (2)", "size=True"]


def test_a_rule_of_ones_own_is_told_by_its_settings_without_importing_it() -> None:
    name = "no_such_module:Rule"
    assert names(run(algorithm={"name": name, "strength": 1.5}), run(algorithm={"name": name})) == [
        "strength=1.5",
        name,
    ]


def test_titles_say_what_all_runs_share() -> None:
    mnist = run(data={"name": "mnist"}, federation={"num_clients": 30, "seed": 1})
    subject = subject_of([run().config, mnist.config])
    assert subject.data == "digits and mnist"
    assert subject.setting == "mlp, 5 a round, 50 rounds, seeds 0 and 1"


def test_a_run_at_work_is_read_up_to_the_line_that_is_being_written(tmp_path: Path) -> None:
    file = write_run_at_work(tmp_path, *(RoundRecord(n, [1], test_loss=1.0 / n) for n in (1, 2, 3)))
    whole = file.read_bytes()
    for cut in (1, 2, 40):
        file.write_bytes(whole[:-cut])
        found = read_so_far(tmp_path)
        assert [record.round for record in found.rounds] == [1, 2]
        assert found.rounds[1].test_loss == 0.5
        assert not found.is_finished
    file.write_bytes(b"")
    assert read_so_far(tmp_path).rounds == []


def test_a_run_at_work_that_has_diverged_is_seen_as_such(tmp_path: Path) -> None:
    losses = enumerate([2.0, 1.0, 900.0], 1)
    write_run_at_work(tmp_path, *(RoundRecord(n, [1], test_loss=loss) for n, loss in losses))
    assert read_so_far(tmp_path).diverged_at == 3


def test_a_loss_that_was_not_finite_is_so_again(tmp_path: Path) -> None:
    """JSON has no NaN; where a metric was measured, there was a loss."""
    lost = RoundRecord(2, [1], test_loss=math.nan, test_metric=0.1)
    write_run_at_work(tmp_path, RoundRecord(1, [1], test_loss=2.0), lost)
    found = read_so_far(tmp_path)
    assert math.isnan(found.rounds[1].test_loss or 0.0)
    assert found.diverged_at == 2


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    file = write_run_at_work(tmp_path, RoundRecord(1), RoundRecord(2), RoundRecord(3))
    lines = file.read_text().splitlines()
    bad = {"{": "line 2", json.dumps({"round": "two"}): "round: Input should be a valid integer"}
    for text, reason in bad.items():
        file.write_text("\n".join([lines[0], text, lines[2]]) + "\n")
        with pytest.raises(ConfigError, match=r"line 2 of .*rounds\.jsonl") as caught:
            read_so_far(tmp_path)
        assert reason in str(caught.value)


def test_a_configuration_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write_run_at_work(tmp_path, RoundRecord(1))
    (tmp_path / "config.toml").write_text("[federation]\nnum_rounds = -1\n")
    with pytest.raises(ConfigError, match=r"RUN: .*federation\.num_rounds"):
        read_so_far(tmp_path)
    (tmp_path / "config.toml").unlink()
    with pytest.raises(ConfigError, match=r"RUN: .*config\.toml"):
        read_so_far(tmp_path)

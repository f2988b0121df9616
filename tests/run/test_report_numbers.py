"""The page's numbers and words are those of the records, whatever state the runs are in."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import (
    as_datasets,
    linear_model,
    small_config,
    softmax_clients,
    write_run_at_work,
)
from pydantic import TypeAdapter

from fedopt_flwr import RunConfig, simulate
from fedopt_flwr.data import load_federated_data
from fedopt_flwr.errors import ConfigError
from fedopt_flwr.rounds.record import NOT_COUNTED, TOO_LATE, RoundRecord
from fedopt_flwr.run import reading
from fedopt_flwr.run.reading import run_folders
from fedopt_flwr.run.report.clients import MOST_ROWS
from fedopt_flwr.run.report.curves import MOST_POINTS, kept_places
from fedopt_flwr.run.report.page import MARK, Report

SMALL = {"num_clients": 4, "clients_per_round": 2, "num_rounds": 20}


def measured(number: int, accuracy: float, **values: Any) -> RoundRecord:
    return RoundRecord(
        number,
        values.pop("clients", [0, 1]),
        test_loss=values.pop("test_loss", 1 - accuracy),
        test_metric=accuracy,
        test_accuracy=accuracy,
        test_metrics={"accuracy": accuracy},
        uplink_bytes=10,
        downlink_bytes=30,
        seconds=0.5,
        **values,
    )


def failed(client: int | str, text: str, phase: str = "train") -> dict[str, Any]:
    return {"client": client, "phase": phase, "error": text}


def run_with(folder: Path, *records: RoundRecord, **sections: dict[str, Any]) -> Path:
    federation = SMALL | sections.pop("federation", {})
    write_run_at_work(folder, *records, federation=federation, **sections)
    return folder


def add_to_lines(folder: Path, *more: dict[str, Any]) -> None:
    """Put further keys into the lines of a run."""
    place = folder / "rounds.jsonl"
    lines = [json.loads(line) for line in place.read_text().splitlines()]
    texts = [json.dumps(line | own) + "\n" for line, own in zip(lines, more, strict=True)]
    place.write_text("".join(texts))


def report_of(*folders: Path) -> Report:
    return Report(run_folders(folders), folders)


def curve(report: Report, name: str, place: int = 0) -> dict[str, Any]:
    (found,) = [m for m in report.numbers["measures"] if m["name"] == name]
    points: dict[str, Any] = found["curves"][place]
    return points


def rows_by_client(report: Report) -> dict[Any, dict[str, Any]]:
    table = report.numbers["runs"][0]["table"]
    found = [dict(zip(table["headings"], row, strict=True)) for row in table["rows"]]
    return {row["client"]: row for row in found}


def test_a_curve_is_the_mean_of_its_seeds_over_rounds_bytes_and_seconds(tmp_path: Path) -> None:
    run_with(tmp_path / "a", measured(1, 0.5), measured(2, 0.7))
    run_with(tmp_path / "b", measured(1, 0.3), measured(2, 0.9), federation={"seed": 1})
    report = report_of(tmp_path)
    points = curve(report, "test_accuracy")
    assert points["x"] == {"rounds": [1, 2], "bytes": [40, 80], "seconds": [0.5, 1.0]}
    assert points["mean"] == pytest.approx([0.6, 0.2])  # errors
    assert points["low"] == pytest.approx([0.5, 0.1])
    assert points["high"] == pytest.approx([0.7, 0.3])
    assert len(report.numbers["curves"]) == 1
    assert "2 seeds, 2 of 2 not finished" in str(report.words["results"]["rows"][0][0].text)


def test_the_best_comes_first_and_a_sentence_says_so(tmp_path: Path) -> None:
    run_with(tmp_path / "a", measured(1, 0.5), algorithm={"name": "fedavg"})
    run_with(tmp_path / "b", measured(1, 0.8), algorithm={"name": "scaffold"})
    run_with(tmp_path / "c", algorithm={"name": "fedprox"})
    report = report_of(tmp_path)
    assert report.numbers["curves"] == ["scaffold", "fedavg", "fedprox"]
    assert (
        "scaffold has the lowest test error, 20.0 %; fedavg follows, 50.0 %."
        in (report.words["summary"])
    )
    assert "c: no round is over yet." in report.words["summary"]
    rows = report.words["results"]["rows"]
    assert [row[1].text for row in rows] == ["20.0 %", "50.0 %", "–"]
    assert [row[1].value for row in rows] == [pytest.approx(0.2), 0.5, None]


def test_thinning_keeps_the_ends_and_every_spike() -> None:
    values = np.zeros(100_000)
    values[[777, 50_123]] = 9.0, -3.0
    values[31] = math.nan
    places = kept_places(values, 1000)
    assert len(places) <= 1000
    assert {0, 777, 50_123, 99_999} <= set(places.tolist())
    assert (np.diff(places) > 0).all()
    assert kept_places(values[:1000], 1000).tolist() == list(range(1000))


def test_a_long_curve_is_thinned_and_the_page_knows_it(tmp_path: Path) -> None:
    records = [measured(n, 0.5) for n in range(1, 2501)]
    run_with(tmp_path / "a", *records, federation={"num_rounds": 2500})
    report = report_of(tmp_path / "a")
    (found,) = [m for m in report.numbers["measures"] if m["name"] == "test_accuracy"]
    assert found["thinned"] == [MOST_POINTS, 2500]
    assert len(found["curves"][0]["mean"]) <= MOST_POINTS


def test_failing_clients_are_told_with_their_reason(tmp_path: Path) -> None:
    text = "client 3, round {}: reported loss nan: not finite"
    records = [
        measured(n, 0.5, clients=[0], failures=1, errors=[failed(3, text.format(n))])
        for n in range(1, 13)
    ]
    records[0].errors.append(failed(2, TOO_LATE))
    records[1].errors.append(failed(3, "evaluation went wrong", phase="evaluate"))
    records[2].errors[0]["error"] = "out of memory"
    run_with(tmp_path / "a", *records)
    report = report_of(tmp_path / "a")
    summary = report.words["summary"]
    assert "Client 3 failed 12 times, most often: reported loss nan: not finite." in summary
    assert "3 of 4 clients have not been counted in any round, so the model knows nothing of " in (
        " ".join(summary)
    )
    rows = rows_by_client(report)
    assert (rows[3]["failed"], rows[3]["rounds counted"]) == (12, 0)
    reason = rows[3]["most frequent reason of failures"]
    assert reason == "11 times: reported loss nan: not finite"
    assert (rows[2]["failed"], rows[2]["late"]) == (0, 1)
    assert (rows[0]["failed"], rows[0]["rounds counted"]) == (0, 12)
    picture = report.numbers["runs"][0]["participation"]
    assert picture["counted"][0] == [1] * 12
    assert picture["failed"] == [[3, column, 1] for column in range(12)]


def test_failures_outside_of_training_are_told_by_what_was_not_done(tmp_path: Path) -> None:
    away = "away; f and its gradient have no value"
    records = [measured(n, 0.5, errors=[failed(2, away, "diagnose")]) for n in range(41)]
    records[0].errors += [failed(3, "no memory", "start")]
    records[5].errors += [failed(1, "no test data", "evaluate"), failed(0, "lost", "evaluate")]
    records[6].errors += [failed(1, "no test data", "evaluate"), failed(1, "late", "gradient")]
    run_with(tmp_path / "a", *records)
    summary = report_of(tmp_path / "a").words["summary"]
    assert summary[-6:-1] == [
        "Client 3 did not take part in the start pass once: no memory.",
        "Client 1 did not tell the gradient by which clients are grouped once: late.",
        "Client 1 did not evaluate the model 2 times: no test data.",
        "1 more client did not evaluate the model, once in all.",
        f"Client 2 did not tell loss and gradient for the diagnostics 41 times: {away}.",
    ]


def test_who_did_not_count_for_another_reason_has_not_failed(tmp_path: Path) -> None:
    """In a round that is taken back only the client of the largest reply is suspect."""
    errors = [
        failed(0, f"{NOT_COUNTED}the model would be not finite; client 1 sent the largest"),
        failed(1, "its reply is the largest"),
    ]
    lost = RoundRecord(1, [], failures=2, taken_back=True, errors=errors)
    run_with(tmp_path / "a", lost, measured(2, 0.5))
    report = report_of(tmp_path / "a")
    told = [line for line in report.words["summary"] if " failed " in line]
    assert told == ["Client 1 failed once: its reply is the largest."]
    rows = rows_by_client(report)
    assert [rows[client]["failed"] for client in (0, 1)] == [0, 1]
    assert report.numbers["runs"][0]["participation"]["failed"] == [[1, 0, 1]]
    assert report.words["results"]["rows"][0][-1].value == 1


def test_a_start_pass_that_all_were_in_tells_the_model_of_their_data(tmp_path: Path) -> None:
    run_with(tmp_path / "a", RoundRecord(0, [0, 1, 2, 3]), measured(1, 0.5, clients=[0, 1, 2]))
    last = report_of(tmp_path / "a").words["summary"][-1]
    assert last == "1 of 4 clients has not been counted in any round after the start pass."


def test_a_run_that_diverged_is_not_ranked(tmp_path: Path) -> None:
    run_with(tmp_path / "a", measured(1, 0.5), algorithm={"name": "fedavg"})
    run_with(tmp_path / "b", measured(1, 0.6), algorithm={"name": "fedprox"})
    lost = measured(1, 0.5), measured(2, 0.9, test_loss=math.nan)
    run_with(tmp_path / "c", *lost, algorithm={"name": "scaffold"})
    summary = report_of(tmp_path).words["summary"]
    assert "fedprox has the lowest test error of those that did not diverge, 40.0 %; fedavg " in (
        " ".join(summary)
    )
    assert "Diverged: scaffold." in summary


def test_what_clients_found_on_their_own_examples_is_drawn(tmp_path: Path) -> None:
    spread = {"accuracy": {"worst": 0.25, "deviation": 0.125}}
    found = {"spread": spread, "own_spread": {}}
    run_with(tmp_path / "a", measured(1, 0.5, on_clients=found), measured(2, 0.5))
    report = report_of(tmp_path / "a")
    assert curve(report, "worst_test_accuracy")["mean"] == [0.25]
    assert curve(report, "client_accuracy_std")["mean"] == [0.125]


def test_standstill_rounds_taken_back_and_divergence_are_told(tmp_path: Path) -> None:
    still = [measured(n, min(n, 6) / 10) for n in range(1, 15)]
    still[9].taken_back = True
    run_with(tmp_path / "a", *still)
    summary = report_of(tmp_path / "a").words["summary"]
    assert "Accuracy has not risen since round 6." in summary
    assert any(line.startswith("1 round was taken back") and "10" in line for line in summary)
    risen = [measured(n, n / 20) for n in range(1, 15)]
    run_with(tmp_path / "b", *risen)
    assert "not risen" not in " ".join(report_of(tmp_path / "b").words["summary"])
    lost = [measured(1, 0.5), measured(2, 0.4), measured(3, 0.1, test_loss=math.nan)]
    run_with(tmp_path / "c", *lost)
    report = report_of(tmp_path / "c")
    assert any(line.startswith("It diverged in round 3") for line in report.words["summary"])
    assert curve(report, "test_loss")["mean"][-1] is None
    (mark,) = curve(report, "test_loss")["diverged"]
    assert (mark["x"]["rounds"], mark["y"]) == (3, pytest.approx(0.6))  # the last finite one
    (found,) = [m for m in report.numbers["measures"] if m["name"] == "test_loss"]
    assert found["range"] == pytest.approx([0.5, 0.6])


def test_what_lines_hold_of_single_clients_is_shown(tmp_path: Path) -> None:
    run_with(tmp_path / "a", measured(1, 0.5), measured(2, 0.6))
    one = {"update_norm": 1.0, "drift": 0.5, "control_norm": 2.0, "rounds_away": 3}
    add_to_lines(
        tmp_path / "a",
        {"drift": 0.25, "gradient_cosine": None, "each_client": {"0": one, "1": {"drift": 7.0}}},
        {"drift": 0.75, "each_client": {"0": one | {"drift": 1.5, "control_norm": 4.0}}},
    )
    report = report_of(tmp_path / "a")
    assert curve(report, "drift")["mean"] == [0.25, 0.75]
    assert "gradient_cosine" not in [m["name"] for m in report.numbers["measures"]]
    rows = rows_by_client(report)
    assert rows[0]["drift ‖Δ_i − Δ̄‖, mean"] == 1.0
    assert rows[0]["‖c_i‖, last"] == 4.0
    assert rows[0]["rounds away, most"] == 3
    assert rows[1]["‖c_i‖, last"] is None
    values = {value["key"]: value["z"] for value in report.numbers["runs"][0]["values"]}
    assert values["drift"] == [[0.5, 1.5], [7.0, None], [None, None], [None, None]]
    assert "test_loss" not in values


def test_numbers_of_clients_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    own = {"0": {"test_loss": math.nan, "drift": 1.0}, "1": {"test_loss": math.inf}}
    run_with(tmp_path / "a", RoundRecord(1, clients=[0, 1], each_client=own))
    report = report_of(tmp_path / "a")
    assert [value["key"] for value in report.numbers["runs"][0]["values"]] == ["drift"]
    assert "test loss, last" not in rows_by_client(report)[0]


def test_seconds_and_examples_of_each_client_are_in_the_table(tmp_path: Path) -> None:
    first = {"seconds_by_client": {"0": 0.5, "1": 2.0}, "examples_by_client": {"0": 7, "1": 123457}}
    run_with(
        tmp_path / "a",
        RoundRecord(1, clients=[0, 1], **first),
        RoundRecord(2, clients=[0], seconds_by_client={"0": 1.0}, examples_by_client={"0": 9}),
        data={"name": "own:data"},
    )
    rows = rows_by_client(report_of(tmp_path / "a"))
    assert [rows[i]["seconds, mean"] for i in (0, 1, 2)] == [0.75, 2.0, None]
    assert [rows[i]["examples"] for i in (0, 1, 2)] == [9, 123457, None]


def test_versions_are_those_that_the_runs_began_with(tmp_path: Path) -> None:
    for name, text in {"a": "1.39.0", "b": "1.42.0"}.items():
        run_with(tmp_path / name, measured(1, 0.5))
        (tmp_path / name / "versions.json").write_text(json.dumps({"flwr": text}))
    assert report_of(tmp_path / "a", tmp_path / "b").words["versions"] == [
        ("flwr", "1.39.0, 1.42.0")
    ]
    for wrong in ("", "[]", "{"):
        (tmp_path / "a" / "versions.json").write_text(wrong)
        assert report_of(tmp_path / "a").words["versions"] == [("Python", "not recorded")]


def test_what_differs_between_runs_is_marked(tmp_path: Path) -> None:
    run_with(tmp_path / "a", measured(1, 0.5), training={"batch_size": 8})
    run_with(tmp_path / "b", measured(1, 0.6), training={"batch_size": 16})
    report = report_of(tmp_path)
    rows = {row["key"]: row for row in report.words["settings"]}
    assert rows["training.batch_size"]["differs"]
    assert "output.directory" not in rows
    assert sorted(rows["training.batch_size"]["values"]) == ["16", "8"]
    assert rows["federation.num_clients"] == {
        "key": "federation.num_clients",
        "values": ["4"],
        "differs": False,
    }
    first = [row["differs"] for row in report.words["settings"]]
    assert first == sorted(first, reverse=True)
    (rule,) = report.words["rules"]
    assert rule["name"] == "autofed"
    assert rule["formula"]
    assert "WACV 2017" in rule["source"]


def test_what_differs_between_the_runs_of_one_curve_is_marked_too(tmp_path: Path) -> None:
    run_with(tmp_path / "a", measured(1, 0.5), training={"device": "cpu"})
    run_with(tmp_path / "b", measured(1, 0.6), training={"device": "cuda"})
    rows = {row["key"]: row for row in report_of(tmp_path).words["settings"]}
    (row,) = (row for row in rows.values() if row["differs"])
    assert row == {"key": "training.device", "values": ["cpu, cuda"], "differs": True}


def test_different_data_is_said_to_be_no_comparison(tmp_path: Path) -> None:
    run_with(tmp_path / "a", measured(1, 0.5))
    run_with(tmp_path / "b", measured(1, 0.6), data={"name": "synthetic"})
    lost = measured(1, 0.5, test_loss=math.nan)
    run_with(tmp_path / "c", lost, algorithm={"name": "fedavg"})
    summary = report_of(tmp_path).words["summary"]
    (line,) = [x for x in summary if "different data" in x]
    assert "digits and synthetic" in line
    assert "the lowest test error" not in " ".join(summary)
    assert "Diverged: fedavg, digits." in summary


def test_labels_are_those_of_the_configuration(tmp_path: Path) -> None:
    run_with(tmp_path / "a", measured(1, 0.5))
    report = report_of(tmp_path / "a")
    config = RunConfig(federation=SMALL)
    counts = load_federated_data(config).label_counts()
    assert report.numbers["runs"][0]["labels"]["counts"] == counts.tolist()
    rows = rows_by_client(report)
    assert [rows[client]["examples"] for client in range(4)] == counts.sum(axis=1).tolist()


def test_labels_that_cannot_be_counted_have_a_reason_and_own_code_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_data.py").write_text("open('was_run', 'w')\ndef load(**_): ...\n")
    run_with(tmp_path / "a", measured(1, 0.5), data={"name": "own_data:load"})
    run_with(tmp_path / "b", measured(1, 0.5), data={"name": "mnist", "path": str(tmp_path)})
    run_with(tmp_path / "c", measured(1, 0.5), federation={"num_clients": "open"})
    run_with(tmp_path / "d", measured(1, 0.5), algorithm={"name": "own_data:Rule"})
    report = report_of(*(tmp_path / name for name in "abcd"))
    why = [run["why_no_labels"] for run in report.numbers["runs"]]
    assert why[0] == "own_data:load is code of your own, which a report does not run"
    assert why[1].startswith("the data cannot be read here: data.name: the training files of MNIST")
    assert why[2] == "the federation is open: each client has data of its own"
    assert why[3] == ""
    assert not (tmp_path / "was_run").exists()


def test_a_run_of_another_machine_whose_data_path_is_not_here_has_a_page(tmp_path: Path) -> None:
    run_with(tmp_path / "a", measured(1, 0.5), data={"path": "/no/such/place"})
    run_with(tmp_path / "b", measured(1, 0.5), data={"name": "mnist", "path": "/no/such/place"})
    runs = report_of(tmp_path / "a", tmp_path / "b").numbers["runs"]
    assert runs[0]["labels"] is not None  # the digits need no path
    assert runs[1]["why_no_labels"].startswith(
        "the data cannot be read here: data.path: '/no/such/place' is not a folder"
    )


def test_data_of_which_files_are_missing_are_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchvision.datasets

    asked = []
    monkeypatch.setattr(torchvision.datasets.MNIST, "download", lambda self: asked.append(self))
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    (tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte").write_bytes(b"half")
    run_with(tmp_path / "a", measured(1, 0.5), data={"name": "mnist", "path": str(tmp_path)})
    why = report_of(tmp_path / "a").numbers["runs"][0]["why_no_labels"]
    assert "files of MNIST are not, or not whole, in" in why
    assert "and nothing is downloaded here; put MNIST/raw/" in why
    assert asked == []


def test_a_billion_clients_of_which_few_took_part_are_these_few(tmp_path: Path) -> None:
    run_with(tmp_path / "a", measured(1, 0.5, clients=[7, 10**8]))
    config = tmp_path / "a" / "config.toml"
    config.write_text(config.read_text().replace("num_clients = 4", "num_clients = 1000000000"))
    own = report_of(tmp_path / "a").numbers["runs"][0]
    assert [row[0] for row in own["table"]["rows"]] == [7, 10**8]
    assert own["why_no_labels"] == (
        "1,000,000,000 clients are too many for a picture of their labels"
    )


def test_no_target_is_an_accuracy_of_zero(tmp_path: Path) -> None:
    run_with(tmp_path / "a", measured(1, 0.05), algorithm={"name": "fedavg"})
    run_with(tmp_path / "b", measured(1, 0.08), algorithm={"name": "scaffold"})
    headings = report_of(tmp_path).words["results"]["headings"]
    assert [heading for heading in headings if "rounds to" in heading] == []


def test_an_error_of_zero_leaves_the_axis_logarithmic(tmp_path: Path) -> None:
    run_with(tmp_path / "a", measured(1, 0.5), measured(2, 0.75), measured(3, 1.0))
    measures = {m["name"]: m for m in report_of(tmp_path / "a").numbers["measures"]}
    found = measures["test_accuracy"]
    assert (found["log"], found["log_range"], found["range"]) == (True, [0.25, 0.5], None)
    lost = measured(1, 1.0, test_loss=2.0), measured(2, 0.75, test_loss=math.nan)
    run_with(tmp_path / "b", measured(0, 0.5), *lost)
    measures = {m["name"]: m for m in report_of(tmp_path / "b").numbers["measures"]}
    found = measures["test_accuracy"]
    assert (found["range"], found["log_range"]) == ([0.0, 0.5], [0.5, 0.5])


def test_of_thousands_of_clients_those_that_failed_have_rows(tmp_path: Path) -> None:
    records = [
        measured(n, 0.5, clients=[n], failures=1, errors=[failed(4999, "gone")])
        for n in range(1, 6)
    ]
    run_with(tmp_path / "a", *records, federation={"num_clients": 5000}, data={"name": "own:load"})
    own = report_of(tmp_path / "a").numbers["runs"][0]
    assert len(own["table"]["rows"]) == MOST_ROWS
    assert own["table"]["omitted"] == 5000 - MOST_ROWS
    assert [row[0] for row in own["table"]["rows"][:6]] == [4999, 1, 2, 3, 4, 5]
    assert len(own["participation"]["counted"]) <= 100
    assert np.sum(own["participation"]["counted"]) == 5
    assert own["participation"]["clients"][-1] == "4950 to 4999"


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    run_with(tmp_path / "a", measured(1, 0.5), measured(2, 0.6))
    with (tmp_path / "a" / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3, "clie')
    assert curve(report_of(tmp_path / "a"), "test_accuracy")["x"]["rounds"] == [1, 2]


def test_a_run_without_a_round_is_a_page_that_says_so(tmp_path: Path) -> None:
    run_with(tmp_path / "a")
    report = report_of(tmp_path / "a")
    assert report.words["summary"] == ["no round is over yet."]
    assert report.numbers["measures"] == []
    assert report.numbers["runs"][0]["participation"] is None
    assert b"no round is over yet." in report.html()


def test_what_could_not_be_run_in_a_comparison_is_told(tmp_path: Path) -> None:
    run_with(tmp_path / "fedavg-seed0", measured(1, 0.5))
    rows = [{"algorithm": "fedavg", "error": None}, {"algorithm": "stem", "error": "no memory"}]
    (tmp_path / "comparison.json").write_text(json.dumps(rows))
    assert "stem could not be run: no memory" in report_of(tmp_path).words["summary"]


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    run_with(tmp_path / "a", measured(1, 0.5), measured(2, 0.6))
    page = report_of(tmp_path / "a").html()
    assert page.startswith(MARK)
    assert page == report_of(tmp_path / "a").html()


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    run_with(tmp_path / "a", measured(1, 0.5))
    with (tmp_path / "a" / "rounds.jsonl").open("a") as file:
        file.write("half\n")
    with pytest.raises(ConfigError, match=r"line 2 of .* is no record of a round"):
        report_of(tmp_path / "a")


def test_each_line_is_parsed_once_while_a_run_is_watched_and_when_it_has_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching = pytest.importorskip("fedopt_flwr.run.report.watching")
    parsed: list[str] = []

    class Counting(TypeAdapter[RoundRecord]):
        def validate_json(self, text: Any, **more: Any) -> RoundRecord:
            parsed.append(text)
            return super().validate_json(text, **more)

    monkeypatch.setattr(reading, "_RECORD", Counting(RoundRecord))
    first = [measured(1, 0.5), measured(2, 0.6)]
    run_with(tmp_path / "a", *first)
    watched = watching.Watched([tmp_path / "a"])
    for records in ([*first, measured(3, 0.7)], [measured(1, 0.25)]):  # goes on; begins anew
        run_with(tmp_path / "a", *records)
        _, report = watched.newest()
        errors = [1 - (record.test_accuracy or 0.0) for record in records]
        assert curve(report, "test_accuracy")["mean"] == pytest.approx(errors)
    assert len(parsed) == 4
    (tmp_path / "a" / "summary.json").write_text('{"diverged_at": null, "best_round": 1}')
    report_of(tmp_path / "a")
    assert len(parsed) == 5


def test_why_a_run_stopped_is_told(tmp_path: Path) -> None:
    simulate(
        small_config(
            stop={"metric": "train_loss", "target": 100.0},
            output={"directory": str(tmp_path / "a")},
        ),
        linear_model,
        as_datasets(softmax_clients([20] * 3)),
    )
    (first, *_) = report_of(tmp_path / "a").words["summary"]
    assert first.startswith("Stopped after round 1: train_loss is ")

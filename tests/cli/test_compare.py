"""`fedopt compare` as a user runs it: what it prints, draws, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import QUICK, InProcess, fedopt, refused


def test_compare_ends_with_a_table_and_curves(tmp_path: Path, in_process: InProcess) -> None:
    arguments = ["--algorithms", "padamfed,fedavg", "--set", "output.directory=out", *QUICK]
    step = ["--set", "fedavg.client_learning_rate=0.2"]
    goals = ["--targets", "0.1,0.10", "--loss-targets", "2.3"]
    result = fedopt("compare", *arguments, *step, *goals, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    table = result.stdout[result.stdout.index("algorithm") :]
    assert table.count("rounds to 10 %") == 1
    assert "rounds to loss 2.3" in table
    rows = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [row["algorithm"] for row in rows] == ["padamfed", "fedavg"]
    assert rows[1]["hyperparameters"]["client_learning_rate"] == 0.2
    assert rows[0]["hyperparameters"]["client_learning_rate"] == pytest.approx(0.05)
    for row in rows:
        assert f"{row['final_test_accuracy']:.4f}" in table
        summary = json.loads((tmp_path / "out" / row["algorithm"] / "summary.json").read_text())
        assert summary["final_test_accuracy"] == row["final_test_accuracy"]
        assert row["rounds_to"].keys() == row["holds_from"].keys() == {"0.1", "loss 2.3"}
        lines = (tmp_path / "out" / row["algorithm"] / "rounds.jsonl").read_text().splitlines()
        losses = {r["round"]: r["test_loss"] for r in map(json.loads, lines)}
        assert row["rounds_to"]["loss 2.3"] == min(n for n, v in losses.items() if v <= 2.3)
        above = [n for n, loss in losses.items() if loss > 2.3]
        assert row["holds_from"]["loss 2.3"] == min(n for n in losses if n > max(above, default=-1))
    assert (tmp_path / "out" / "curves.png").is_file()
    other = in_process("compare", *arguments)
    refused(other, "output.directory: 'out/fedavg' holds a run of another configuration")


@pytest.mark.slow
def test_compare_over_seeds_and_variants_with_rates_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        "[federation]\nnum_rounds = 2\n[model]\noptions = {hidden = [4]}\n"
        "[rules]\nfedavg = {client_learning_rate = 0.3}\nfedprox = {proximal_strength = 0.4}\n"
        '[output]\ndirectory = "out"\n'
    )
    labels = "fedavg,fedavg:server_learning_rate=0.5:client_learning_rate=0.1,fedprox"
    result = fedopt("compare", "run.toml", "--algorithms", labels, "--seeds", "3,4", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    rows = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [row["algorithm"] for row in rows] == labels.split(",")
    assert [row["seeds"] for row in rows] == [2, 2, 2]
    used = [row["hyperparameters"] for row in rows]
    assert [h["client_learning_rate"] for h in used] == [0.3, 0.1, 0.05]
    assert [h["server_learning_rate"] for h in used] == [1.0, 0.5, 1.0]
    assert used[2]["proximal_strength"] == 0.4
    finals = [
        json.loads((tmp_path / "out" / f"fedavg-seed{seed}" / "summary.json").read_text())[
            "final_test_accuracy"
        ]
        for seed in (3, 4)
    ]
    assert rows[0]["final_test_accuracy"] == pytest.approx(sum(finals) / 2)
    deviation = abs(finals[0] - finals[1]) / 2**0.5
    assert rows[0]["accuracy_deviation"] == pytest.approx(deviation)
    assert f"± {deviation:.4f}" in result.stdout
    refused(fedopt("compare", "--seeds", "0,x", cwd=tmp_path), "--seeds: got '0,x'")
    wrong = fedopt("simulate", "--set", "rules.fedagv.momentum=1", cwd=tmp_path)
    refused(wrong, "rules: unknown 'fedagv'; did you mean 'fedavg'?")


@pytest.mark.slow
def test_compare_gives_shared_hyperparameters_only_to_rules_that_have_them(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[algorithm]\nname = "fedprox"\nproximal_strength = 0.5\n'
        "[federation]\nnum_rounds = 1\n[model]\noptions = {hidden = [4]}\n"
    )
    arguments = [
        "run.toml",
        "--algorithms",
        "fedavg,fedprox,fedavg_m",
        "--set",
        "output.directory=out",
    ]
    result = fedopt("compare", *arguments, "--set", "algorithm.momentum=0.7", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    rows = {
        r["algorithm"]: r["hyperparameters"]
        for r in json.loads((tmp_path / "out" / "comparison.json").read_text())
    }
    assert rows["fedavg_m"]["momentum"] == 0.7
    assert rows["fedprox"]["proximal_strength"] == 0.5
    assert "momentum" not in rows["fedavg"]
    for bad, text in (
        (["--algorithms", "fedavg,fedavk"], "did you mean 'fedavg'?"),
        (["--algorithms", "fedavg,fedavg"], "name each rule once"),
        (["--algorithms", "fedavg", "--set", "algorithm.momentum=0.7"], "none of fedavg has this"),
        (["--algorithms", "fedavg:client_learning_rate"], "a variant is NAME:KEY=VALUE"),
        (["--algorithms", "fedavg:client_learning_rate=1:x"], "a variant is NAME:KEY=VALUE"),
        (["--targets", "90"], "--targets: got '90'"),
        (["--seeds", "9" * 30], "must be whole numbers from 0 to 9223372036854775807"),
        (
            ["--algorithms", "padamfed", "--set", "scaffold.momentum=1"],
            "--set scaffold.…: scaffold is not among --algorithms (padamfed)",
        ),
    ):
        refused(fedopt("compare", *bad, cwd=tmp_path), text)


@pytest.mark.slow
def test_a_metric_of_ones_own_is_shown(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def error(outputs, targets):\n    return 0.125\n")
    own = ["--set", "model.metric=own:error", "--algorithms", "fedavg", *QUICK]
    result = fedopt("compare", *own, "--set", "output.directory=out", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "metric 0.1250  ETA" in result.stdout
    header, row = (
        [cell.strip() for cell in line.strip("┃│").replace("┃", "│").split("│")]
        for line in result.stdout.splitlines()
        if "algorithm" in line or "│ fedavg" in line
    )
    assert (header[1], row[1]) == ("metric", "0.1250")


def test_accuracy_beside_another_metric_is_not_taken_for_it(
    tmp_path: Path, in_process: InProcess
) -> None:
    settings = ["model.metric=f1", "evaluation.metrics=['accuracy']", "output.directory=out"]
    own = [part for setting in settings for part in ("--set", setting)]
    result = in_process("compare", "--algorithms", "fedavg", *own, *QUICK)
    assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "out" / "fedavg" / "summary.json").read_text())
    f1, accuracy = (f"{summary['final_test_metrics'][name]:.4f}" for name in ("f1", "accuracy"))
    assert f1 != accuracy
    assert f"metric {f1}  ETA" in result.stdout
    header, row = (
        [cell.strip() for cell in line.strip("┃│").replace("┃", "│").split("│")]
        for line in result.stdout.splitlines()
        if "algorithm" in line or "│ fedavg" in line
    )
    shown = dict(zip(header, row, strict=True))
    assert (shown["metric"], shown["accuracy"]) == (f1, accuracy)


def test_help_shows_sections_in_brackets(tmp_path: Path) -> None:
    shown = " ".join(fedopt("compare", "--help", cwd=tmp_path).stdout.split())
    assert "the file's [algorithm] belong to the rule that it names" in shown
    assert "those in [rules.NAME] to the rule NAME" in shown


def test_metrics_clients_and_stops_are_in_the_table(tmp_path: Path, in_process: InProcess) -> None:
    settings = ["evaluation.metrics=['f1', 'auroc']", "data.holdout=0.2", "stop.metric=f1"]
    settings += ["evaluation.on_clients=true", "stop.target=0.3", "federation.num_rounds=30"]
    options = [part for setting in settings for part in ("--set", setting)]
    names = ["--algorithms", "fedavg,fedavg:client_learning_rate=1e-9"]
    result = in_process(
        "compare",
        *names,
        "--targets",
        "f1=0.25,auroc=0.6",
        *options,
        "--set",
        "output.directory=out",
    )
    assert result.returncode == 0, result.stderr
    for heading in ("f1", "auroc", "clients", "worst", "best", "rounds"):
        assert heading in result.stdout
    assert "fedavg: stopped after round" in result.stdout
    rows = json.loads((tmp_path / "out" / "comparison.json").read_text())
    trained, still = rows
    assert trained["rounds_to"]["f1 0.25"] <= trained["best_round"]
    assert trained["metrics"]["f1"] >= 0.3 > still["metrics"]["f1"]
    assert trained["on_clients"]["worst"] <= trained["on_clients"]["mean"]
    assert still["stopped"] == [None]
    assert still["rounds_to"]["f1 0.25"] is None
    assert (tmp_path / "out" / "fedavg" / "model_best.safetensors").exists()


def test_targets_may_be_of_drift_and_of_the_worst_clients(
    tmp_path: Path, in_process: InProcess
) -> None:
    settings = ["data.holdout=0.3", "evaluation.on_clients=true", "output.diagnostics=true"]
    settings += ["federation.num_rounds=12", "output.directory=out"]
    options = [part for setting in settings for part in ("--set", setting)]
    goals = ["--targets", "drift=0.5,worst_test_accuracy=0.3,client_accuracy_std=0.2"]
    result = in_process("compare", "--algorithms", "fedavg,scaffold", *goals, *options)
    assert result.returncode == 0, result.stderr
    shown = " ".join(result.stdout.split())
    for word in ("drift", "worst_test", "client_acc"):
        assert word in shown
    reached = set()
    for row in json.loads((tmp_path / "out" / "comparison.json").read_text()):
        lines = (tmp_path / "out" / row["algorithm"] / "rounds.jsonl").read_text().splitlines()
        records = [r for r in map(json.loads, lines) if r["on_clients"]]
        spreads = {r["round"]: r["on_clients"]["spread"]["accuracy"] for r in records}
        first = {
            "drift 0.5": [r["round"] for r in records if (r["drift"] or 9) <= 0.5],
            "worst_test_accuracy 0.3": [n for n, s in spreads.items() if s["worst"] >= 0.3],
            "client_accuracy_std 0.2": [n for n, s in spreads.items() if s["deviation"] <= 0.2],
        }
        assert row["rounds_to"] == {key: min(found, default=None) for key, found in first.items()}
        reached |= {key for key, found in first.items() if found}
    assert reached == set(first)  # else this would test nothing


def test_targets_that_nobody_measures_are_refused(in_process: InProcess) -> None:
    result = in_process("compare", "--algorithms", "fedavg", "--targets", "f1=0.9")
    refused(result, "--targets: got f1, which is not measured; add it to evaluation.metrics")

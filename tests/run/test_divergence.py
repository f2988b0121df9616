"""What counts as divergence, and what a run says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import SOFTMAX_DATA, linear_model, softmax_config

from fedopt_flwr import simulate
from fedopt_flwr.errors import FedoptWarning
from fedopt_flwr.rounds.record import NOT_FINITE, RoundRecord
from fedopt_flwr.run.summary import diverged_at


def test_a_run_that_diverges_says_so_and_leaves_strict_json(tmp_path: Path) -> None:
    settings = {
        **softmax_config("fedavg", 6, 12, client_learning_rate=50.0),
        "training": {"local_steps": 4, "batch_size": 4, "weight_decay": 0.1},
        "output": {"directory": str(tmp_path / "run")},
    }
    with pytest.warns(FedoptWarning, match=r"fedavg: diverged in round \d+: .* lower the learning"):
        result = simulate(settings, model=linear_model, client_data=SOFTMAX_DATA)
    assert result.summary["diverged_at"] is not None

    def refuse(text: str) -> None:
        raise AssertionError(text)

    for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    json.loads((tmp_path / "run" / "summary.json").read_text(), parse_constant=refuse)


def with_losses(*losses: float | None) -> list[RoundRecord]:
    return [RoundRecord(t, test_loss=loss) for t, loss in enumerate(losses, 1)]


def test_what_counts_as_diverged() -> None:
    assert diverged_at(with_losses(2.0, 1.0, 2.1, 0.5)) is None
    assert diverged_at(with_losses(2.0, None, 41.0)) == 3
    assert diverged_at(with_losses(50.0), initial_loss=2.3) == 1
    # back where an untrained model is, after it had learned
    assert diverged_at(with_losses(1.5, 0.6, 1.4, 2.4, 2.2), initial_loss=2.3) == 3
    assert diverged_at(with_losses(1.5, 0.6, 2.4, 0.9), initial_loss=2.3) is None
    assert diverged_at(with_losses(2.2, 2.3, 2.2), initial_loss=2.3) is None  # never learned
    failed = with_losses(None)
    failed[0].errors = [{"client": i, "error": f"'delta' is {NOT_FINITE}: 3"} for i in range(2)]
    assert diverged_at(failed) == 1
    failed[0].clients = [2]
    assert diverged_at(failed) is None


def test_rounds_that_numbers_took_are_divergence_where_no_other_follows() -> None:
    """A single one may be the work of one client, wherever it stands."""

    def run(*lost: int) -> list[RoundRecord]:
        records = with_losses(2.0, 1.5, 1.2, 1.1)
        for record in records:
            record.clients, record.taken_back = [0], record.round in lost
            if record.taken_back:
                record.clients, record.test_loss = [], None
        return records

    assert diverged_at(run(), initial_loss=2.3) is None
    assert diverged_at(run(1), initial_loss=2.3) is None
    assert diverged_at(run(2, 3), initial_loss=2.3) is None
    assert diverged_at(run(4), initial_loss=2.3) is None
    assert diverged_at(run(3, 4), initial_loss=2.3) == 3
    assert diverged_at(run(1, 2, 3, 4), initial_loss=2.3) == 1
    # the same where it is the clients' own numbers that are not finite
    records = run(4)
    records[2].clients = []
    records[2].errors = [{"client": 0, "error": f"'delta' is {NOT_FINITE}: 3"}]
    assert diverged_at(records, initial_loss=2.3) == 3


def with_facts(*facts: tuple[float, float, float | None]) -> list[RoundRecord]:
    """Records of (train loss, test loss, test accuracy)."""
    return [
        RoundRecord(t, train_loss=train, test_loss=test, test_accuracy=accuracy)
        for t, (train, test, accuracy) in enumerate(facts, 1)
    ]


def test_overfitting_is_not_divergence() -> None:
    """The model knows its training data by heart and is sure of its few mistakes."""
    learned = (0.3, 0.3, 0.82)
    assert diverged_at(with_facts(learned, (0.001, 0.9, 0.80)), initial_loss=0.7) is None
    assert diverged_at(with_facts(learned, (0.001, 0.9, None)), initial_loss=0.7) is None
    assert diverged_at(with_facts(learned, (1e-6, 15.0, 0.78)), initial_loss=0.7) is None
    # of ten classes, and without the loss of the untrained model
    many = [(1.2, 2.3, 0.3), (0.2, 0.9, 0.75), (0.001, 2.4, 0.74)]
    assert diverged_at(with_facts(*many)) is None


def test_a_model_that_no_longer_predicts_or_fits_has_diverged_all_the_same() -> None:
    learned = (0.3, 0.3, 0.82)
    # each client fits its own few classes at once; their mean knows none
    assert diverged_at(with_facts(learned, (0.01, 0.9, 0.5)), initial_loss=0.7) == 2
    # it predicts the larger class, as an untrained model does that is biased
    assert diverged_at(with_facts(learned, (0.8, 0.9, 0.8)), initial_loss=0.7) == 2
    assert diverged_at(with_facts(learned, (1e-3, float("inf"), 0.8)), initial_loss=0.7) == 2
    assert diverged_at(with_facts(learned, (9.0, 15.0, 0.8)), initial_loss=0.7) == 2
    ten = [(1.2, 2.3, 0.1), (0.2, 0.9, 0.75), (0.1, 2.4, 0.2)]
    assert diverged_at(with_facts(*ten), initial_loss=2.3) == 3


@pytest.mark.parametrize("eta", [1e6, 1e30])
def test_a_rate_that_is_far_too_large_is_noticed(eta: float) -> None:
    settings = softmax_config("fedavg", 6, 3, client_learning_rate=eta)
    with pytest.warns(FedoptWarning, match=r"fedavg: diverged in round 1: .* lower the learning"):
        simulate(settings, model=linear_model, client_data=SOFTMAX_DATA, test_data=SOFTMAX_DATA[3])


@pytest.mark.slow
def test_padamfed_dog_that_grows_too_far_is_noticed() -> None:
    settings = {"algorithm": {"name": "padamfed_dog"}, "federation": {"num_rounds": 500}}
    with pytest.warns(FedoptWarning, match=r"padamfed_dog: diverged in round \d+"):
        result = simulate(settings)
    assert result.summary["best_test_accuracy"] > 0.85
    assert result.summary["final_test_accuracy"] < 0.2

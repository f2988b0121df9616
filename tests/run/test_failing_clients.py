"""A run says at its end which clients failed most of the time."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from helpers import as_datasets, linear_model, softmax_clients
from torch.utils.data import Dataset

from fedopt_flwr import Result, simulate
from fedopt_flwr.errors import FedoptWarning

SIZES = [6, 6, 6]


class Fragile(Dataset[Any]):
    """Examples that can be read only so often."""

    def __init__(self, reads: int) -> None:
        (self._inner,) = as_datasets(softmax_clients([6]))
        self._left = reads

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, index: int) -> Any:
        self._left -= 1
        if self._left < 0:
            raise OSError("the disk went away")
        return self._inner[index]


def run(
    fragile: int, reads: int, rounds: int = 6, min_replies: int = 1
) -> tuple[Result, list[str]]:
    data: list[Any] = as_datasets(softmax_clients(SIZES))
    for client in range(fragile):
        data[client] = Fragile(reads)
    config = {
        "algorithm": {"name": "fedavg"},
        "federation": {
            "num_clients": 3,
            "clients_per_round": 3,
            "num_rounds": rounds,
            "min_replies": min_replies,
        },
        "training": {"local_steps": 1, "batch_size": 0},
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = simulate(config, model=linear_model, client_data=data)
    return result, [str(w.message) for w in caught if w.category is FedoptWarning]


def failed_rounds(result: Result, client: int) -> int:
    return sum(e["client"] == client for r in result.rounds for e in r.errors)


def test_a_client_that_failed_in_half_of_its_rounds_is_named_at_the_end() -> None:
    torch.manual_seed(0)
    result, texts = run(fragile=1, reads=30)
    number = failed_rounds(result, 0)
    assert 3 <= number < 6
    (text,) = texts
    assert text.startswith(f"client 0: failed in {number} of the 6 rounds in which it was asked")
    assert "the disk went away" in text


def test_a_client_that_failed_less_often_is_not_named() -> None:
    result, texts = run(fragile=1, reads=60, rounds=9)
    assert 0 < failed_rounds(result, 0) < 4
    assert texts == []


def test_a_good_reply_in_a_round_with_too_few_of_them_is_no_failure_of_its_client() -> None:
    torch.manual_seed(0)
    result, texts = run(fragile=1, reads=30, min_replies=3)
    assert len(result.rounds[-1].errors) == 3
    assert result.idle_from is None
    assert [text.partition(":")[0] for text in texts] == ["client 0"]

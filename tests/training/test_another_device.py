"""Training on a device apart from the CPU, as on a GPU: no mixing, the same numbers, few waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import CLASSES, FEATURES, as_datasets, linear_model, softmax_clients
from torch import nn
from torch.utils.data import TensorDataset

from fedopt_flwr import simulate
from fedopt_flwr.algorithms import ALGORITHMS
from fedopt_flwr.data.client_data import TensorData
from fedopt_flwr.flower import MemoryStates
from fedopt_flwr.run.result import Result

if torch.cuda.is_available():  # PyTorch takes one kind of accelerator at a time
    pytest.skip("this machine has a GPU; test_cuda.py uses it", allow_module_level=True)
from fake_device import another_device, waits

DATA = as_datasets(softmax_clients([9, 14, 6, 11]))


class Rows:
    """The same data as no TensorDataset, so that it goes through a DataLoader."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._dataset[index]


def with_buffers() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, CLASSES))
    net[0].bias.requires_grad_(False)
    return net


def train(
    name: str = "fedavg",
    model: Callable[[], nn.Module] = linear_model,
    data: Any = DATA,
    steps: int = 3,
    **sections: Any,
) -> Result:
    settings = {
        "algorithm": {"name": name},
        "federation": {"num_clients": 4, "clients_per_round": 2, "num_rounds": 3}
        | sections.get("federation", {}),
        "training": {"local_steps": steps, "batch_size": 4} | sections.get("training", {}),
    }
    return simulate(settings, model=model, client_data=data, test_data=DATA[0])


def apart(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> Result:
    with monkeypatch.context() as patch, another_device() as device:
        patch.setattr("fedopt_flwr.run.experiment.pick_device", lambda name: device)
        return train(**arguments)


def require_equal(result: Result, expected: Result) -> None:
    np.testing.assert_array_equal(result.parameters, expected.parameters)
    for one, other in zip(result.rounds, expected.rounds, strict=True):
        assert (one.errors, one.clients) == ([], other.clients)
        assert (one.train_loss, one.test_loss) == (other.train_loss, other.test_loss)


def test_the_device_refuses_what_a_gpu_refuses() -> None:
    with another_device() as device:
        there, here = torch.ones(3, device=device), torch.ones(3)
        assert there.device.type == "apart"
        with pytest.raises(RuntimeError, match="same device"):
            there + here
        with pytest.raises(RuntimeError, match="same device"):
            nn.Linear(3, 3).to(device)(here)
        with pytest.raises(TypeError, match="no NumPy array"):
            there.numpy()
        assert (there + 1).cpu().numpy().tolist() == [2, 2, 2]
        assert waits == {"from the device": 1, "to the device": 2}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.filterwarnings("ignore:fedsps. diverged")  # the steps of 1 that its bound allows
def test_every_rule_gives_the_numbers_of_the_cpu(name: str, monkeypatch: Any) -> None:
    require_equal(apart(monkeypatch, name=name), train(name))


CASES: dict[str, dict[str, Any]] = {
    "batch norm, averaged": {"model": with_buffers},
    "batch norm, local": {"model": with_buffers, "federation": {"buffers": "local"}},
    "data loader": {"data": [Rows(d) for d in DATA]},
    "clip and momentum": {
        "training": {"clip_norm": 0.1, "gradient_momentum": 0.9, "weight_decay": 0.1}
    },
    "epochs": {"training": {"local_steps": None, "local_epochs": 2}},
    "full batch": {"training": {"batch_size": 0}},
    "micro-batches": {"training": {"micro_batch_size": 3}},
    "clustered": {"federation": {"sampler": "clustered", "warmup_rounds": 1}},
}


@pytest.mark.parametrize("case", CASES)
def test_every_setting_gives_the_numbers_of_the_cpu(case: str, monkeypatch: Any) -> None:
    require_equal(
        apart(monkeypatch, name="scaffold", **CASES[case]), train("scaffold", **CASES[case])
    )


@pytest.mark.parametrize("name", ["fedavg", "padamfed", "padamfed_vr", "fadamgc"])
def test_a_longer_round_waits_for_the_device_no_more_often(name: str, monkeypatch: Any) -> None:
    """A GPU works ahead of Python only as long as nothing is read from it or copied to it."""
    counts = []
    for steps in (2, 12):
        apart(monkeypatch, name=name, steps=steps)
        counts.append(dict(waits))
    assert counts[0] == counts[1]
    assert counts[0]["to the device"] > 0


def test_a_process_moves_its_own_examples_and_keeps_states_in_host_memory() -> None:
    shared = TensorData(torch.arange(20.0).reshape(10, 2), torch.arange(10))
    own = shared.share(torch.tensor([7, 2, 5]))
    with another_device() as device:
        moved = own.on_device(device)
        assert (moved._inputs.device, len(moved._inputs)) == (device, 3)
        assert moved.targets().tolist() == [7, 2, 5]
        assert moved.on_device(device) is moved
        states = MemoryStates()
        for version in (1, 2, 3):
            states.save(0, version, {"control_variate": torch.ones(4, device=device)})
            states.prune(0, {version})
        kept = states.load(0, 3)["control_variate"]
    assert (kept.device.type, kept.tolist()) == ("cpu", [1.0] * 4)
    assert own.on_device(torch.device("cpu")) is own

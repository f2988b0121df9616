"""What only a CUDA device can show."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedopt_flwr import RunConfig, simulate
from fedopt_flwr.run.experiment import Experiment

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", ["fedavg", "scaffold_m", "padamfed"])
def test_cuda_agrees_with_the_cpu_on_digits(name: str) -> None:
    accuracies = {}
    for device in ("cpu", "cuda"):
        settings = [f"algorithm.name={name}", f"training.device={device}"]
        accuracies[device] = simulate(RunConfig.from_file(None, settings)).rounds[-1].test_accuracy
    assert abs(accuracies["cpu"] - accuracies["cuda"]) < 0.01


def test_auto_takes_cuda_and_each_example_is_moved_once() -> None:
    experiment = Experiment(RunConfig())
    assert experiment.device.type == "cuda"
    assert experiment.model.vector.device.type == "cuda"
    for client in experiment.data.clients:
        assert client._inputs.device.type == "cuda"
        assert len(client._inputs) == client.num_examples


@pytest.mark.parametrize("name", ["fedavg", "padamfed"])
@pytest.mark.slow
def test_mnist_on_cuda_is_within_a_point_of_the_cpu(real_data: Path, name: str) -> None:
    accuracies = {}
    for device in ("cpu", "cuda"):
        settings = [
            f"algorithm.name={name}",
            f"training.device={device}",
            "data.name=mnist",
            "model.name=cnn",
            "output.evaluate_every=50",
        ]
        accuracies[device] = simulate(RunConfig.from_file(None, settings)).rounds[-1].test_accuracy
    assert abs(accuracies["cpu"] - accuracies["cuda"]) < 0.01

"""Micro-batches and bfloat16: the same gradient in less memory, and what is refused."""

from __future__ import annotations

import math
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import CLASSES, FEATURES, linear_model, small_config, three_datasets
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from fedopt_flwr import ConfigError, RunConfig, simulate
from fedopt_flwr.data import as_client_data
from fedopt_flwr.flower import Instruction
from fedopt_flwr.strategies import FedAvg
from fedopt_flwr.training.calling import Loss, mixed
from fedopt_flwr.training.diagnostics import diagnose
from fedopt_flwr.training.evaluation import evaluate
from fedopt_flwr.training.flat_model import FlatModel
from fedopt_flwr.training.objective import ModelObjective

ROWS = torch.arange(30)


def settings(**values: Any) -> dict[str, Any]:
    return small_config(training={"local_steps": 2, "batch_size": 4, **values})


def gradient(
    loss: Loss, targets: Tensor, micro: int, module: nn.Module | None = None
) -> tuple[Tensor, float]:
    """The gradient and the loss of one batch of 30 examples, by this package."""
    inputs = torch.randn(30, 6, generator=torch.Generator().manual_seed(1))
    model = FlatModel(module or nn.Linear(6, 4))
    data = as_client_data(TensorDataset(inputs, targets))
    objective = ModelObjective(model, loss, data, [ROWS], micro_batch_size=micro)
    (batch,) = objective.batches()
    found = objective.gradient(model.vector.clone(), batch).clone()
    return found, objective.mean_loss


def classes(ignored: int = 0) -> Tensor:
    targets = torch.randint(0, 4, (30,), generator=torch.Generator().manual_seed(2))
    targets[:ignored] = -100
    return targets


@pytest.mark.parametrize("micro", [1, 7, 8, 29])
@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (functional.cross_entropy, classes()),
        (functional.cross_entropy, classes(ignored=11)),  # whole micro-batches of them
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.1, 2.0])), classes(ignored=3)),
        (functional.mse_loss, torch.linspace(-1, 1, 120).view(30, 4)),
        (lambda outputs, targets: outputs.square().mean(), classes()),
    ],
    ids=["classes", "ignored", "weighted", "elementwise", "own"],
)
def test_a_gradient_in_micro_batches_is_the_whole_batchs(
    micro: int, loss: Loss, targets: Tensor
) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    inputs = torch.randn(30, 6, generator=torch.Generator().manual_seed(1))
    whole = loss(module(inputs), targets)  # by PyTorch alone
    expected = torch.cat([g.ravel() for g in torch.autograd.grad(whole, module.parameters())])
    found, value = gradient(loss, targets, micro, module)
    assert torch.linalg.vector_norm(found - expected) <= 1e-6 * torch.linalg.vector_norm(expected)
    assert value == pytest.approx(float(whole.detach()), rel=1e-6)


def test_no_more_examples_than_that_are_computed_at_once() -> None:
    sizes: list[int] = []

    class Counting(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            sizes.append(len(inputs))
            return super().forward(inputs)

    config = settings(batch_size=8, micro_batch_size=3)
    data = three_datasets()
    simulate(config, lambda: Counting(FEATURES, CLASSES), data, data[0])
    assert set(sizes) == {2, 3}  # 8 in parts of 3, 3 and 2; 9 to evaluate


def test_rounds_in_micro_batches_end_where_whole_batches_do() -> None:
    whole = simulate(small_config(), linear_model, three_datasets())
    parts = simulate(settings(micro_batch_size=3), linear_model, three_datasets())
    torch.testing.assert_close(
        torch.from_numpy(parts.parameters), torch.from_numpy(whole.parameters), rtol=1e-5, atol=1e-6
    )
    assert parts.parameters.tobytes() != whole.parameters.tobytes()  # it did take parts


def test_the_loss_of_a_test_set_does_not_depend_on_its_parts() -> None:
    """Targets that are ignored count for nothing, however they lie among the parts."""
    inputs = torch.randn(30, 6, generator=torch.Generator().manual_seed(1))
    data = as_client_data(TensorDataset(inputs, classes(ignored=11)))
    torch.manual_seed(0)
    module = nn.Linear(6, 4)
    expected = float(functional.cross_entropy(module(inputs), classes(ignored=11)).detach())
    for micro in (0, 4, 7):
        found = evaluate(
            FlatModel(module), data, functional.cross_entropy, {}, micro_batch_size=micro
        )
        assert found.loss == pytest.approx(expected, rel=1e-6)


def batch_normed() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def test_batch_norm_in_micro_batches_is_refused_unless_it_is_allowed() -> None:
    config = settings(micro_batch_size=3)
    text = r"training.micro_batch_size: got 3, and '2' is batch norm.*micro_batch_norm = true"
    with pytest.raises(ConfigError, match=text):
        simulate(config, batch_normed, three_datasets())
    with pytest.raises(ConfigError, match=text):
        FedAvg(batch_normed(), num_clients=3, clients_per_round=2, num_rounds=1, micro_batch_size=3)
    allowed = settings(micro_batch_size=3, micro_batch_norm=True)
    assert simulate(allowed, batch_normed, three_datasets()).summary["failures"] == 0


def test_a_device_without_bfloat16_is_refused_with_the_option() -> None:
    text = "training.precision: got 'bf16', which PyTorch does not compute on 'meta'; use 'float32'"
    with pytest.raises(ConfigError, match=text):
        mixed(torch.device("meta"), "bf16")


def test_bfloat16_is_of_the_computation_alone() -> None:
    seen: set[torch.dtype] = set()

    class Noting(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            outputs = super().forward(inputs)
            if self.training:
                seen.add(outputs.dtype)
            return outputs

    config = settings(precision="bf16")
    result = simulate(
        config, lambda: Noting(FEATURES, CLASSES), three_datasets(), three_datasets()[0]
    )
    assert seen == {torch.bfloat16}
    assert result.parameters.dtype == "float32"
    plain = simulate(
        small_config(), lambda: Noting(FEATURES, CLASSES), three_datasets(), three_datasets()[0]
    )
    assert result.rounds[-1].train_loss == pytest.approx(plain.rounds[-1].train_loss, rel=0.02)
    assert result.rounds[-1].train_loss != plain.rounds[-1].train_loss


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"micro_batch_size": -1}, "training.micro_batch_size: got -1"),
        ({"precision": "fp16"}, "training.precision: got 'fp16'.*'float32' or 'bf16'"),
        ({"micro_batch_norm": 1}, "training.micro_batch_norm: got 1"),
    ],
)
def test_what_is_none_of_these_is_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        simulate(settings(**values), linear_model, three_datasets())


def test_a_client_is_told_both() -> None:
    config = RunConfig(training={"micro_batch_size": 5, "precision": "bf16"})
    told = Instruction.for_run(config, FlatModel(nn.Linear(2, 1)), (2,), 1).to_config()
    assert (told["fedopt.micro_batch_size"], told["fedopt.precision"]) == (5, "bf16")


PEAK = """
import sys
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset
from fedopt_flwr.data import as_client_data
from fedopt_flwr.models import make_model
from fedopt_flwr.training.flat_model import FlatModel
from fedopt_flwr.training.objective import ModelObjective

def kilobytes(kind):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(kind))

torch.set_num_threads(1)
shape = {"input_shape": (3, 32, 32), "num_classes": 10, "seed": 0}
model = FlatModel(make_model("resnet18", {"norm": "group"}, **shape))
data = as_client_data(TensorDataset(torch.randn(64, 3, 32, 32), torch.arange(64) % 10))
rows = [torch.arange(64)]
size = int(sys.argv[1])
objective = ModelObjective(model, functional.cross_entropy, data, rows, micro_batch_size=size)
(batch,) = objective.batches()
before = kilobytes("VmRSS")
objective.gradient(model.vector, batch)
print(kilobytes("VmHWM") - before)
"""


def peak(micro: int) -> int:
    command = [sys.executable, "-c", PEAK, str(micro)]
    return int(subprocess.run(command, capture_output=True, check=True, timeout=300).stdout)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_a_batch_of_64_in_parts_of_8_takes_less_than_0_4_of_the_memory() -> None:
    """Above what the model itself holds: a ResNet-18 with group norm, on images of 32 x 32."""
    assert peak(8) < 0.4 * peak(0)


@pytest.mark.slow
def test_bfloat16_is_within_a_point_of_float32_on_mnist(real_data: Path) -> None:
    config = RunConfig.from_file(Path(__file__).parents[2] / "examples" / "mnist.toml").to_dict()
    config["algorithm"] = {"name": "fedavg", "client_learning_rate": 0.2}
    config["federation"]["num_rounds"] = 60
    config["output"]["evaluate_every"] = 60
    found = {}
    for precision in ("float32", "bf16"):
        config["training"]["precision"] = precision
        found[precision] = simulate(RunConfig(**config)).rounds[-1].test_accuracy
    assert found["float32"] > 0.9
    assert abs(found["bf16"] - found["float32"]) < 0.01


@pytest.mark.parametrize("micro", [0, 7])
def test_a_batch_without_a_target_that_counts_moves_nothing(micro: int) -> None:
    """PyTorch's mean over no target is NaN, and would end the client."""
    found, value = gradient(functional.cross_entropy, classes(ignored=30), micro)
    assert not found.any()
    assert value == 0.0


@pytest.mark.parametrize("micro", [0, 7])
@pytest.mark.parametrize("options", [{"weight": torch.tensor([1.0, 5.0, 0.1, 2.0])}, {}])
def test_the_start_pass_takes_the_mean_over_all_targets_that_count(
    micro: int, options: dict[str, Tensor]
) -> None:
    """Of more examples than are computed at once, sorted by class, of which many are ignored."""
    numbers = torch.Generator().manual_seed(1)
    inputs = torch.randn(1203, 6, generator=numbers)
    targets = torch.randint(0, 4, (1203,), generator=numbers).sort().values
    targets[:450] = -100
    torch.manual_seed(0)
    module = nn.Linear(6, 4)
    whole = functional.cross_entropy(module(inputs), targets, **options)
    expected = torch.cat([g.ravel() for g in torch.autograd.grad(whole, module.parameters())])
    for loss in (nn.CrossEntropyLoss(**options), partial(functional.cross_entropy, **options)):
        model = FlatModel(module)
        data = as_client_data(TensorDataset(inputs, targets))
        objective = ModelObjective(model, loss, data, [], micro_batch_size=micro)
        found = objective.full_gradient(model.vector.clone())
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
        value, slope = diagnose(model, data, loss, micro_batch_size=micro)
        assert value == pytest.approx(float(whole.detach()), rel=1e-6)
        torch.testing.assert_close(slope, expected, rtol=1e-5, atol=1e-7)


def test_the_loss_of_data_without_a_target_that_counts_has_no_value() -> None:
    data = as_client_data(TensorDataset(torch.randn(30, 6), classes(ignored=30)))
    assert math.isnan(evaluate(FlatModel(nn.Linear(6, 4)), data, functional.cross_entropy, {}).loss)

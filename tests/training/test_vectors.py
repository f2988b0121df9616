"""A module as one vector: views, round trips, and what cannot be one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedopt_flwr.errors import ModelError
from fedopt_flwr.models import make_model
from fedopt_flwr.training.flat_model import FlatModel, average_buffers


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))


def test_parameters_and_gradients_are_views_in_named_order() -> None:
    module = small()
    expected = torch.cat([p.detach().reshape(-1) for _, p in module.named_parameters()])
    model = FlatModel(module)
    assert torch.equal(model.vector, expected)
    assert model.size == 6 + 2 + 2 + 2 + 4 + 2
    model.vector[0] = 7.0
    assert module[0].weight[0, 0].item() == 7.0
    module(torch.randn(4, 3)).sum().backward()
    by_hand = torch.cat([p.grad.reshape(-1) for p in module.parameters()])
    assert torch.equal(model.gradient, by_hand)
    assert float(model.gradient.abs().max()) > 0
    assert module[0].weight.data_ptr() == model.vector.data_ptr()


def test_a_backward_pass_through_the_vector_equals_the_plain_one() -> None:
    torch.manual_seed(0)
    plain, flat = small(), small()
    flat.load_state_dict(plain.state_dict())
    model = FlatModel(flat)
    x = torch.randn(5, 3)
    for module in (plain, flat):
        module(x).square().sum().backward()
    expected = torch.cat([p.grad.reshape(-1) for p in plain.parameters()])
    assert torch.equal(model.gradient, expected)


def test_frozen_parameters_stay_outside() -> None:
    module = small()
    module[0].weight.requires_grad_(False)
    model = FlatModel(module)
    assert model.size == 12


def test_tied_parameters_are_there_once() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    model = FlatModel(module)
    assert model.size == 9 + 3 + 3
    model.vector.fill_(2.0)
    assert module[1].weight.data_ptr() == module[0].weight.data_ptr()
    assert module[1].weight[0, 0].item() == 2.0


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 1000))
def test_round_trip_to_and_from_a_state_dict(hidden: list[int], seed: int) -> None:
    def make(seed: int) -> FlatModel:
        options = {"hidden": hidden}
        return FlatModel(make_model("mlp", options, input_shape=(3,), num_classes=2, seed=seed))

    one, other = make(seed), make(seed + 1)
    assert not torch.equal(one.vector, other.vector)
    other.load_state_arrays(one.state_arrays())
    assert torch.equal(other.vector, one.vector)


def test_buffers_are_read_written_and_grouped_by_dtype() -> None:
    model = FlatModel(small())
    buffers = model.read_buffers()
    assert {name: tuple(array.shape) for name, array in buffers.items()} == {
        "buffers.float32": (4,),
        "buffers.int64": (1,),
    }
    model.write_buffers({"buffers.float32": torch.arange(4.0), "buffers.int64": torch.tensor([9])})
    assert model.module[1].running_var.tolist() == [2.0, 3.0]
    assert model.module[1].num_batches_tracked.item() == 9
    assert model.module[1].num_batches_tracked.shape == ()
    assert len(model.state_arrays()) == len(model.module.state_dict()) == 9


def test_buffers_are_averaged_by_weight_and_integers_by_maximum() -> None:
    one = {"buffers.float32": torch.tensor([1.0, 4.0]), "buffers.int64": torch.tensor([3])}
    other = {"buffers.float32": torch.tensor([3.0, 0.0]), "buffers.int64": torch.tensor([2])}
    mean = average_buffers([(0.1, one), (0.3, other)])
    assert mean["buffers.float32"].tolist() == pytest.approx([2.5, 1.0])
    assert mean["buffers.int64"].tolist() == [3]
    assert one["buffers.float32"].tolist() == [1.0, 4.0]


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


def mixed() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64, torch.uint8]
)
def test_frozen_parameters_may_have_any_dtype_and_travel_in_flowers_layout(
    dtype: torch.dtype,
) -> None:
    class Adapted(nn.Module):
        def __init__(self, fill: float) -> None:
            super().__init__()
            base = torch.full((3, 2), fill).to(dtype)
            self.base, self.adapter = nn.Parameter(base, requires_grad=False), nn.Linear(2, 3)

    one, other = FlatModel(Adapted(3.3)), FlatModel(Adapted(1.0))
    other.load_state_arrays([array.copy() for array in one.state_arrays()])
    assert one.size == 9
    assert other.module.base.dtype == dtype
    assert torch.equal(one.module.base.float(), other.module.base.float())
    assert torch.equal(one.vector, other.vector)


def complex_buffer() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    return module


def uint16_buffer() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("count", torch.zeros(2, dtype=torch.uint16))
    return module


def bfloat16_buffer() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("scale", torch.ones(2, dtype=torch.bfloat16))
    return module


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 1}

    def set_extra_state(self, state: dict[str, int]) -> None: ...


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        (frozen, "no trainable parameter"),
        (nn.ReLU, "no trainable parameter"),
        (mixed, r"'1.weight': dtype torch.float16; .* call .float\(\)"),
        (lambda: nn.Linear(2, 2).double(), "'weight': dtype torch.float64"),
        (lambda: nn.LazyLinear(2), "'weight': is lazy"),
        (complex_buffer, "buffer 'phase': dtype torch.complex64"),
        (
            uint16_buffer,
            "buffer 'count': dtype torch.uint16 .* cannot be aggregated; store it as real",
        ),
        (bfloat16_buffer, "buffer 'scale': dtype torch.bfloat16 has no NumPy equivalent"),
        (lambda: nn.Linear(2, 2, device="meta"), "parameter 'weight': is on device meta"),
        (lambda: WithExtraState(2, 2), r"state '_extra_state': comes from get_extra_state\(\)"),
    ],
)
def test_what_cannot_be_one_vector_is_refused_by_name(factory: object, text: str) -> None:
    with pytest.raises(ModelError, match=text):
        FlatModel(factory())


def test_wrong_state_is_refused_by_name() -> None:
    model = FlatModel(nn.Linear(2, 2))
    with pytest.raises(ModelError, match="got 1 arrays; must be 2"):
        model.load_state_arrays([np.zeros((2, 2))])
    with pytest.raises(ModelError, match=r"shape \(2,\); must be \(2, 2\)"):
        model.load_state_arrays([np.zeros(2), np.zeros(2)])


@pytest.mark.parametrize("name", ["mlp", "cnn", "logistic", "resnet18"])
def test_the_same_seed_gives_the_same_vector(name: str) -> None:
    def make(seed: int) -> torch.Tensor:
        module = make_model(name, {}, input_shape=(1, 28, 28), num_classes=10, seed=seed)
        return FlatModel(module).vector

    state = torch.get_rng_state()
    assert torch.equal(make(3), make(3))
    assert not torch.equal(make(3), make(4))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 8, 8)])
def test_image_models_fit_every_image_size(shape: tuple[int, ...]) -> None:
    for name, options in (("cnn", {}), ("resnet18", {"norm": "group"}), ("resnet18", {})):
        module = make_model(name, options, input_shape=shape, num_classes=7, seed=0)
        assert module(torch.randn(2, *shape)).shape == (2, 7)
        has_statistics = any(isinstance(m, nn.BatchNorm2d) for m in module.modules())
        assert has_statistics == (name == "resnet18" and not options)


def test_cnn_has_80_thousand_parameters_on_mnist() -> None:
    module = make_model("cnn", {}, input_shape=(1, 28, 28), num_classes=10, seed=0)
    convolutions = sum(isinstance(m, nn.Conv2d) for m in module.modules())
    linears = sum(isinstance(m, nn.Linear) for m in module.modules())
    assert (convolutions, linears) == (3, 2)
    assert 75_000 < FlatModel(module).size < 85_000


def test_a_buffer_that_forward_replaces_is_still_the_buffer() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("mean", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = 0.5 * self.mean + 0.5 * x.mean(dim=0)
            return self.layer(x - self.mean)

    model = FlatModel(Centred())
    model.module(torch.ones(3, 2))
    assert model.read_buffers()["buffers.float32"].tolist() == [0.5, 0.5]
    model.write_buffers(model.initial_buffers)
    assert model.module.mean.tolist() == [0.0, 0.0]

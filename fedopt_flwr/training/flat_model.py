"""A model as one float32 vector; its buffers as one more array per dtype."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ..algorithm import weighted_sum
from ..errors import ModelError
from ..models.weights import plain_name

_BUFFER_PREFIX = "buffers."
LOCAL_PARAMETERS = "local_parameters"  # the name of a client's own ones in its state


class Layout(NamedTuple):
    """Size and dtype of an array that travels."""

    size: int
    dtype: str
    infinite: Tensor | None = None  # where a module's own constants are not finite (masks): a mask


class FlatModel:
    """All trainable parameters of `module` in one contiguous float32 vector of shape [size].

    Parameters lie in `named_parameters()` order; each parameter and its `.grad` become views into
    `vector` and `gradient`, so writing to the vector changes the module and `backward()` fills the
    gradient. Frozen parameters stay outside, so they may have any dtype. So do those whose name
    matches one of the patterns `local`: they lie in `local_vector`, and never travel. The module is
    moved to `device` and changed in place.

    Raises ModelError, naming the parameter or buffer, when there is nothing to train, when a
    trainable parameter is not float32, when something has no shape or no memory yet, when a buffer
    is complex or has a dtype that NumPy does not know, and for state that is not a tensor.
    """

    def __init__(
        self,
        module: nn.Module,
        device: str | torch.device = "cpu",
        local: Sequence[str] = (),
    ) -> None:
        if not isinstance(module, nn.Module):
            raise ModelError(f"model: got {module!r}; must be an nn.Module")
        _require_trainable(_trainable(module))
        _require_arrays(module)
        self.module = module.to(device)
        self.device = torch.device(device)
        trainable = _trainable(module)  # moving may make new parameters
        own = _matching(trainable, local)
        self.vector, self.gradient = _flat([p for n, p in trainable.items() if n not in own])
        self.size = self.vector.numel()
        self.local = tuple(local)
        local_parts = _flat([trainable[name] for name in own])
        # which is where they are, but for empty ones
        self.local_vector, self.local_gradient = (part.to(self.device) for part in local_parts)
        self.initial_local = {LOCAL_PARAMETERS: self.local_vector.clone()} if own else {}
        persistent = module.state_dict(keep_vars=True)
        self._buffer_names = [n for n, _ in module.named_buffers() if n in persistent]
        self.initial_buffers = self.read_buffers()
        self.buffer_layout = {name: _layout(a) for name, a in self.initial_buffers.items()}
        self._passing = {n: b.clone() for n, b in module.named_buffers() if n not in persistent}

    def reset_local(self) -> None:
        """Give local parameters, and buffers that no state_dict has, the values that they had when
        this was made; clients that share this model must not see those of each other."""
        for initial in self.initial_local.values():
            self.local_vector.copy_(initial)
        buffers = dict(self.module.named_buffers()) if self._passing else {}
        for name, initial in self._passing.items():
            now = buffers.get(name)
            # some have another size by now, as caches do; unchanged ones may not be writable
            if now is not None and now.shape == initial.shape and not now.equal(initial):
                with torch.no_grad():
                    now.copy_(initial)

    def zero_gradient(self) -> None:
        self.gradient.zero_()
        self.local_gradient.zero_()

    @property
    def has_buffers(self) -> bool:
        """Whether the module keeps persistent buffers, such as batch norm statistics."""
        return bool(self._buffer_names)

    def _buffers(self) -> dict[str, Tensor]:
        """The buffers as they are now: a module may put a new tensor in the place of an old one."""
        return {name: self.module.get_buffer(name) for name in self._buffer_names}

    def read_buffers(self) -> dict[str, Tensor]:
        """Return copies of all persistent buffers: one flat array per dtype, `buffers.<dtype>`."""
        groups: dict[str, list[Tensor]] = {}
        for buffer in self._buffers().values():
            groups.setdefault(_group(buffer), []).append(buffer.detach().reshape(-1))
        return {name: torch.cat(parts) for name, parts in groups.items()}

    def write_buffers(self, arrays: Mapping[str, Tensor]) -> None:
        """Set the persistent buffers from what `read_buffers` returned."""
        offsets = dict.fromkeys(arrays, 0)
        with torch.no_grad():
            for buffer in self._buffers().values():
                name = _group(buffer)
                start = offsets[name]
                offsets[name] = start + buffer.numel()
                buffer.copy_(arrays[name][start : offsets[name]].view(buffer.shape))

    def state_arrays(self) -> list[np.ndarray]:
        """Return the whole state_dict, in its order, as NumPy (Flower's usual layout).

        Frozen parameters of a dtype that NumPy lacks (bfloat16) come as float32. On the CPU the
        other arrays share the module's memory: copy what is to outlive its next change.
        """
        return [_as_numpy(value.detach().cpu()) for value in self.module.state_dict().values()]

    def load_state_arrays(self, arrays: Sequence[np.ndarray]) -> None:
        """Set the whole state_dict from arrays in its order, as `state_arrays` returns them."""
        state = self.module.state_dict()
        if len(arrays) != len(state):
            raise ModelError(f"state_dict: got {len(arrays)} arrays; must be {len(state)}")
        with torch.no_grad():
            for (name, tensor), array in zip(state.items(), arrays, strict=True):
                if tuple(tensor.shape) != array.shape:
                    raise ModelError(
                        f"state_dict[{name!r}]: shape {array.shape}; must be {tuple(tensor.shape)}"
                    )
                tensor.copy_(torch.as_tensor(array))


def copied(module: nn.Module) -> nn.Module:
    """Return a copy of a user's module; ModelError for one that cannot be copied."""
    try:
        return copy.deepcopy(module)
    except Exception as error:
        raise ModelError(
            f"model: a module of type {type(module).__name__} cannot be copied: {error}; keep no "
            "computed tensors as attributes (torch.nn.utils.parametrizations has weight_norm and "
            "others that do not)"
        ) from error


def average_buffers(weighted: list[tuple[float, dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Average floating buffers by weight (normalised to 1), take the maximum of all others."""
    total = sum(weight for weight, _ in weighted)
    result = {}
    for name, first in weighted[0][1].items():
        if first.is_floating_point():
            mean = weighted_sum([(w / total, arrays[name]) for w, arrays in weighted])
            # a mask of the lowest number there is becomes -inf by rounding
            result[name] = mean.where(mean.isfinite(), first)
        else:
            result[name] = torch.stack([arrays[name] for _, arrays in weighted]).amax(dim=0)
    return result


def is_buffer_name(name: str) -> bool:
    """Whether a named array holds buffers rather than a model-sized vector."""
    return name.startswith(_BUFFER_PREFIX)


def _layout(array: Tensor) -> Layout:
    finite = array.isfinite().cpu()
    dtype = str(array.dtype).removeprefix("torch.")
    return Layout(array.numel(), dtype, None if bool(finite.all()) else ~finite)


def _group(buffer: Tensor) -> str:
    return _BUFFER_PREFIX + str(buffer.dtype).removeprefix("torch.")


def _flat(parameters: Sequence[nn.Parameter]) -> tuple[Tensor, Tensor]:
    """Return one vector of values and one of gradients, into which the parameters become views."""
    if not parameters:
        return torch.zeros(0), torch.zeros(0)
    vector = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    gradient = torch.zeros_like(vector)
    sizes = [parameter.numel() for parameter in parameters]
    views = zip(torch.split(vector, sizes), torch.split(gradient, sizes), strict=True)
    for parameter, (values, slopes) in zip(parameters, views, strict=True):
        parameter.data = values.view(parameter.shape)
        parameter.grad = slopes.view(parameter.shape)
    return vector, gradient


def _matching(trainable: Mapping[str, nn.Parameter], patterns: Sequence[str]) -> list[str]:
    """Return the names that match a pattern; ModelError for one that matches none, or if all do."""
    names = ", ".join(trainable)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in trainable):
            raise ModelError(
                f"federation.local_parameters: {pattern!r} matches no trainable parameter; they "
                f"are {names}"
            )
    found = [n for n in trainable if any(fnmatchcase(n, pattern) for pattern in patterns)]
    if len(found) == len(trainable):
        raise ModelError(
            f"federation.local_parameters: {list(patterns)} match all trainable parameters "
            f"({names}), so nothing would be learned together; leave some out"
        )
    return found


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {plain_name(name): p for name, p in module.named_parameters() if p.requires_grad}


def _require_trainable(trainable: dict[str, nn.Parameter]) -> None:
    if not trainable:
        raise ModelError("model: has no trainable parameter; at least one needs requires_grad=True")
    for name, parameter in trainable.items():
        if parameter.dtype != torch.float32:
            raise ModelError(
                f"model parameter {name!r}: dtype {parameter.dtype}; trainable parameters must all "
                "be torch.float32; call .float() on the model or freeze this parameter"
            )


def _require_arrays(module: nn.Module) -> None:
    """Refuse what has no values yet, and buffers that cannot travel as NumPy arrays."""
    buffers = dict(module.named_buffers())
    state = module.state_dict(keep_vars=True)
    for name, value in {**buffers, **state}.items():
        if not isinstance(value, Tensor) or name.endswith("_extra_state"):
            raise ModelError(
                f"model state {name!r}: comes from get_extra_state(), which does not travel; keep "
                "it in a buffer"
            )
        what = f"model {'buffer' if name in buffers else 'parameter'} {name!r}"
        if isinstance(value, (UninitializedParameter, UninitializedBuffer)):
            raise ModelError(
                f"{what}: is lazy and has no shape yet; "
                "run one batch through the model before it is handed over"
            )
        if value.is_meta or value.layout != torch.strided:
            raise ModelError(
                f"{what}: is on device {value.device} with layout {value.layout}; must be dense "
                "and hold values; make the model on the CPU"
            )
        if name in buffers and name in state and not _can_be_aggregated(value.dtype):
            raise ModelError(
                f"{what}: dtype {value.dtype} has no NumPy equivalent or cannot be aggregated; "
                "store it as real buffers of torch.float32, torch.float16 or torch.int64"
            )


def _can_be_aggregated(dtype: torch.dtype) -> bool:
    try:
        torch.zeros(1, dtype=dtype).amax(dim=0).numpy()
    except (RuntimeError, TypeError):  # no maximum, not known to NumPy
        return False
    return True


def _as_numpy(value: Tensor) -> np.ndarray:
    try:
        return value.numpy()
    except TypeError:  # a dtype that NumPy lacks
        return value.to(torch.complex64 if value.is_complex() else torch.float32).numpy()

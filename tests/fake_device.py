"""A device that no machine needs to have: its tensors lie on the CPU, but refuse to meet CPU ones.

It stands in for a GPU where there is none: what would end there with "Expected all tensors to be on
the same device" ends here too, and transfers that would wait for the GPU are counted.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.backend_registration as registration
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

registration._setup_privateuseone_for_python_backend("apart")
APART = torch.device("apart:0")
waits: collections.Counter[str] = collections.Counter()  # transfers, by direction

_aten = torch.ops.aten
_TAKES_BOTH = {_aten.copy_.default, _aten._to_copy.default, _aten.index.Tensor}


class _Apart(Tensor):
    """A tensor on the device; `inner` is the CPU tensor that holds its values."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> _Apart:
        made: _Apart = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=APART,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: _Apart) -> None:
        Tensor.data.__set__(self, value)
        self.inner = value.inner

    def new_tensor(self, values: Any, **kwargs: Any) -> _Apart:
        return _Apart(self.inner.new_tensor(values, **kwargs))

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a tensor of another device has no NumPy array; use .cpu() first")

    __array__ = numpy


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    here = [t for t in tensors if not isinstance(t, _Apart)]
    is_mixed = 0 < len(here) < len(tensors)
    if is_mixed and func not in _TAKES_BOTH and any(t.dim() > 0 for t in here):
        raise RuntimeError(f"Expected all tensors to be on the same device, in {func}")
    wanted = kwargs.get("device")
    stays = len(here) < len(tensors) if wanted is None else torch.device(wanted).type == "apart"
    if func is _aten.copy_.default:
        stays = isinstance(args[0], _Apart)
    _count(func, has_apart=len(here) < len(tensors), stays=stays)
    inside = {**kwargs, "device": torch.device("cpu")} if wanted is not None else kwargs
    result = func(*tree_map(_inner, args), **tree_map(_inner, inside))
    if not stays:
        return result
    wrapped = tree_map(lambda leaf: _Apart(leaf) if isinstance(leaf, Tensor) else leaf, result)
    if len(here) == len(tensors):
        return wrapped
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


def _inner(leaf: Any) -> Any:
    return leaf.inner if isinstance(leaf, _Apart) else leaf


def _count(func: Any, *, has_apart: bool, stays: bool) -> None:
    if func is _aten._local_scalar_dense.default and has_apart:
        waits["number"] += 1
    elif func is _aten._to_copy.default and has_apart != stays:
        waits["to the device" if stays else "from the device"] += 1


class _Factories(TorchDispatchMode):
    """Functions that make tensors from nothing but a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextlib.contextmanager
def another_device() -> Iterator[torch.device]:
    """Make the device known in this thread; `waits` is counted from here."""
    waits.clear()
    with _Factories(), torch.autograd.set_multithreading_enabled(False):
        yield APART

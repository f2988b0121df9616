"""What travels: named arrays in a fixed order, and which instruction a report answers."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence, Sized
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from flwr.common import Parameters, ndarrays_to_parameters
from torch import Tensor

from ..errors import MessageError
from ..problems import foreign_text
from ..rounds.record import NOT_FINITE
from ..training.flat_model import FlatModel, Layout

Scalar = bool | bytes | float | int | str
Phase = Literal["start", "train", "gradient", "evaluate", "diagnose"]

# two keys of an instruction that engines look at
PHASE = "fedopt.phase"
ROUND = "fedopt.round"
_REPEATED = ("run", "round", "phase")  # of an instruction, in its report
PREFIX = "fedopt."
# What np.save writes before a plain array. NumPy's own reader evaluates it with `ast`: strange ones
# take it a second, and CPython before 3.11.8 and 3.12.2 loses a message when two threads use `ast`
# (gh-106905), as one does that prints a traceback.
_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00.."
    rb"\{'descr': '([<>|=][a-z?]\d{1,3})', 'fortran_order': (True|False), "
    rb"'shape': \(((?:\d{1,18}, ?)*(?:\d{1,18})?)\), \} *\n",
    re.DOTALL,
)
_LONGEST_HEADER = 1024  # bytes; plain arrays have 128
NEVER = -1  # state version of a client whose reply was never counted
_MOST_ARRAYS = 64  # of a message; rules have up to 5, buffers one for each dtype
_MOST_VALUES = 256  # of a message, with a user's own


def require_few(arrays: Sized, values: Sized) -> None:
    """Raise MessageError if a message has more parts than any of ours, before each of them becomes
    an object, which takes 25 times the memory."""
    if len(arrays) > _MOST_ARRAYS or len(values) > _MOST_VALUES:
        raise MessageError(
            f"a message of {len(arrays)} arrays and {len(values)} values; must be at most "
            f"{_MOST_ARRAYS} and {_MOST_VALUES}"
        )


class ArraysInMemory(Parameters):
    """Arrays that an engine in one process hands on as they are.

    A type of its own: whatever a peer writes into a message, none can be parsed from bytes.
    """

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        super().__init__(tensors=[], tensor_type="")
        self.arrays = list(arrays)


def encode(arrays: Mapping[str, Tensor], *, in_memory: bool = False) -> tuple[str, Parameters]:
    """Return the joined names and Flower Parameters.

    In memory the Parameters hold the arrays themselves: an engine in one process needs no bytes.
    """
    values = [tensor.detach().cpu().numpy() for tensor in arrays.values()]
    if in_memory:
        return ",".join(arrays), ArraysInMemory(values)
    return ",".join(arrays), ndarrays_to_parameters(values)


def to_arrays(parameters: Parameters) -> list[np.ndarray]:
    """Return the arrays of Parameters, whether they were encoded or not."""
    if isinstance(parameters, ArraysInMemory):
        return parameters.arrays
    return [_to_array(data) for data in parameters.tensors]


def _to_array(data: bytes) -> np.ndarray:
    """Read what `ndarrays_to_parameters` wrote (NumPy's .npy format) without a copy.

    Raises ValueError for anything else, before memory is set aside for what a header promises.
    """
    header = _HEADER.match(data[:_LONGEST_HEADER])
    if header is None:
        raise ValueError(f"{len(data)} bytes without the header of a plain NumPy array")
    dtype = np.dtype(header[1].decode())
    shape = tuple(int(size) for size in header[3].replace(b",", b" ").split())
    body = memoryview(data)[header.end() :]
    if dtype.hasobject or len(body) != dtype.itemsize * math.prod(shape):
        raise ValueError(f"{len(body)} bytes do not hold shape {shape} of {dtype}")
    return np.frombuffer(body, dtype).reshape(shape, order="F" if header[2] == b"True" else "C")


@lru_cache(maxsize=64)
def encoded_size(shape: tuple[int, ...], dtype: str) -> int:
    """Return the size in bytes of one array in Flower's encoding."""
    header = io.BytesIO()
    described = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, described)
    return header.tell() + np.dtype(dtype).itemsize * math.prod(shape)


def encoded_bytes(arrays: Sequence[np.ndarray]) -> int:
    """Return the size in bytes of these arrays in Flower's encoding, without encoding them."""
    return sum(encoded_size(a.shape, a.dtype.str) for a in arrays)


def repeated(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a report repeats of an instruction, so that the server knows which it answers."""
    return {key: config.get(f"{PREFIX}{key}") for key in _REPEATED}


def require_answers(report: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Raise MessageError if a report does not repeat the run, round and phase that were asked."""
    for key, value in asked.items():
        said = report.get(key)
        if type(said) is not type(value) or said != value:
            raise MessageError(
                f"its report is for {key} {foreign_text(repr(said), 80)}, asked was {value!r}; a "
                "reply to another instruction does not count"
            )


def expected_arrays(
    names: tuple[str, ...], model: FlatModel, *, with_buffers: bool
) -> dict[str, Layout]:
    """Return name -> (size, dtype) of model-sized arrays, and of the buffers if they travel."""
    expected = dict.fromkeys(names, Layout(model.size, "float32"))
    return {**expected, **(model.buffer_layout if with_buffers else {})}


def decode(
    arrays: Sequence[np.ndarray], names: str, expected: Mapping[str, Layout], sender: str
) -> dict[str, Tensor]:
    """Return named tensors after checking them against `expected`.

    Raises MessageError that names the sender, the array and what is wrong with it: a missing,
    unknown or repeated name, a wrong count, shape or dtype, a value that is not finite.
    """
    received = names.split(",") if names else []
    if len(received) != len(arrays) or sorted(received) != sorted(expected):
        raise MessageError(
            f"{sender}: sent {len(arrays)} arrays named {foreign_text(received, 200)}; expected "
            f"{list(expected)}"
        )
    return {
        name: _checked(array, name, expected[name], sender)
        for name, array in zip(received, arrays, strict=True)
    }


def _checked(array: np.ndarray, name: str, layout: Layout, sender: str) -> Tensor:
    size, dtype, infinite = layout
    if array.shape != (size,) or array.dtype != np.dtype(dtype):
        raise MessageError(
            f"{sender}: {name!r} has shape {array.shape} and dtype {array.dtype}; "
            f"expected ({size},) and {dtype}"
        )
    if array.ctypes.data % 64 or not (array.flags.c_contiguous and array.flags.writeable):
        tensor = torch.tensor(array)  # bits of dot products depend on alignment
    else:
        tensor = torch.from_numpy(array)
    if tensor.is_floating_point() and size:
        low, high = torch.aminmax(tensor if infinite is None else tensor.where(~infinite, 0.0))
        if not (math.isfinite(low) and math.isfinite(high)):
            nans = int(tensor.isnan().sum())
            infinities = int(tensor.isinf().sum())
            raise MessageError(
                f"{sender}: {name!r} is {NOT_FINITE}: {nans} NaN and {infinities} infinite values "
                f"of {size}"
            )
    return tensor

"""What travels: an instruction as Flower config values, and named arrays in a fixed order."""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from flwr.common import Parameters, ndarrays_to_parameters
from torch import Tensor

from ..config.run_config import RunConfig
from ..errors import MessageError
from ..problems import foreign_text
from ..rounds.record import NOT_FINITE
from ..training.flat_model import FlatModel, Layout

Scalar = bool | bytes | float | int | str
Phase = Literal["start", "train", "gradient"]

# two keys of an instruction that engines look at
PHASE = "fedopt.phase"
ROUND = "fedopt.round"
_REPEATED = ("run", "round", "phase")  # of an instruction, in its report
_PREFIX = "fedopt."
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


@dataclass(frozen=True)
class Instruction:
    """What a client has to do in one round; each field is one Flower config value.

    Keys begin with "fedopt.", so that a user's own values can travel beside them.
    """

    run: str  # the same for a run and its resumption, and for no other run
    model: str
    model_options: str  # JSON
    input_shape: str  # JSON
    num_classes: int
    loss: str
    seed: int
    threads: int
    local_steps: int  # 0: local_epochs count
    local_epochs: int
    batch_size: int
    weight_decay: float
    clip_norm: float
    gradient_momentum: float
    buffers: str
    phase: Phase = "train"  # this and the rest change from round to round
    round: int = 0
    algorithm: str = ""
    hyperparameters: str = "{}"  # JSON
    arrays: str = ""  # names in the order in which they travel, joined by ","
    state_version: int = NEVER  # the round whose client state counts
    oldest_version: int = NEVER  # on which the oldest of the server's checkpoints counts
    middle_versions: str = ""  # on which those since then count, joined by ","

    @classmethod
    def for_run(
        cls, config: RunConfig, model: FlatModel, input_shape: tuple[int, ...], num_classes: int
    ) -> Instruction:
        """Return what stays the same in all rounds, under the name of a new run."""
        federation = config.federation
        training = config.training
        return cls(
            run=uuid.uuid4().hex,
            model=config.model.name,
            model_options=json.dumps(config.model.options),
            input_shape=json.dumps(input_shape),
            num_classes=num_classes,
            loss=config.model.loss,
            seed=federation.seed,
            threads=training.threads,
            local_steps=training.local_steps or 0,
            local_epochs=training.local_epochs or 0,
            batch_size=training.batch_size,
            weight_decay=training.weight_decay,
            clip_norm=training.clip_norm,
            gradient_momentum=training.gradient_momentum,
            buffers=federation.buffers if model.has_buffers else "none",
        )

    @property
    def kept_versions(self) -> set[int]:
        """Versions that the server may still ask for."""
        middle = self.middle_versions.split(",") if self.middle_versions else []
        return {self.state_version, self.oldest_version, *map(int, middle)}

    def to_config(self) -> dict[str, Scalar]:
        return {f"{_PREFIX}{name}": value for name, value in asdict(self).items()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Instruction:
        """Read an instruction; MessageError names the first field that is missing or foreign."""
        known = {f.name for f in fields(cls)}
        own = {
            key.removeprefix(_PREFIX): value
            for key, value in config.items()
            if key.startswith(_PREFIX)
        }
        missing = known - own.keys()
        foreign = own.keys() - known
        if missing or foreign:
            raise MessageError(
                f"instruction: lacks {sorted(missing)}, has unknown {sorted(foreign)}; server and "
                "client must run the same fedopt-flwr version"
            )
        return cls(**own)


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
    return sum(map(len, ndarrays_to_parameters([np.zeros(shape, dtype)]).tensors))


def encoded_bytes(arrays: Sequence[np.ndarray]) -> int:
    """Return the size in bytes of these arrays in Flower's encoding, without encoding them."""
    return sum(encoded_size(a.shape, a.dtype.str) for a in arrays)


def repeated(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a report repeats of an instruction, so that the server knows which it answers."""
    return {key: config.get(f"{_PREFIX}{key}") for key in _REPEATED}


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
            f"{sender}: sent {len(arrays)} arrays named {received}; expected {list(expected)}"
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

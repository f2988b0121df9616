"""Which numbers would spoil the server's state, and whose reply they most likely came from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..algorithm import ClientId, ServerState
from ..training.flat_model import is_buffer_name
from .record import NOT_COUNTED, RoundRecord, Upload

# Beyond this a model's squares overflow float32. What follows gradients grows with the loss, which
# may be 1e25 times as large under a rule that does not see its scale.
_LARGEST_PARAMETER = 1e19
_LARGEST = 1e30


class Before(NamedTuple):
    """What a round changed, as it was, and the replies that changed it."""

    state: ServerState
    buffers: dict[str, Tensor]
    versions: dict[ClientId, int]
    uploads: Mapping[ClientId, Upload]


def spoilt(now: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> str | None:
    """Return the first name of an array that holds NaN or values that are too large, or None.

    Values that were as large before, such as a mask among a module's buffers, do not count.
    """
    for name in sorted(now):
        limit = _LARGEST_PARAMETER if name == "model" else _LARGEST
        if _is_spoilt(now[name], before.get(name), limit):
            return name
    return None


def _is_spoilt(now: Tensor, before: Tensor | None, limit: float) -> bool:
    if before is not None and not _is_sound(now, limit):
        now = now.where(before.abs() < limit, 0)
    return not _is_sound(now, limit)


def _is_sound(array: Tensor, limit: float) -> bool:
    if not array.numel():
        return True
    low, high = torch.aminmax(array.float())
    return bool(low > -limit and high < limit)  # neither is true of NaN


def norm(array: Tensor) -> float:
    """Return the L2 norm of the finite values of any dtype, also where float32 cannot hold it."""
    size = float(torch.linalg.vector_norm(array.float()))
    if math.isfinite(size):
        return size
    return float(torch.linalg.vector_norm(array.double().nan_to_num(0.0, 0.0, 0.0)))


def largest(uploads: Mapping[ClientId, Upload]) -> tuple[ClientId, str, float]:
    """Return the client with the array of the largest norm, that array's name and the norm."""
    norms = [(norm(a), i, n) for i, upload in uploads.items() for n, a in upload.arrays.items()]
    size, client_id, name = max(norms, key=lambda item: item[0])
    return client_id, name, size


def take_back(
    record: RoundRecord, uploads: Mapping[ClientId, Upload], num_asked: int, why: str
) -> None:
    """Record that a round moved nothing, for that reason, and whose reply is suspect."""
    record.taken_back = record.round > 0  # round 0 moves no model, and evaluates it as it was
    record.clients = []
    record.failures = num_asked
    record.train_loss = record.client_seconds = None
    record.seconds_by_client, record.examples_by_client = {}, {}
    record.test_loss = record.test_metric = record.test_accuracy = None
    record.test_metrics = {}
    suspect, name, size = largest(uploads)
    reply = f"with a norm of {size:.4g} in {name!r}"
    other = f"{NOT_COUNTED}{why}; the largest reply is that of client {suspect}, {reply}"
    texts = dict.fromkeys(uploads, other)
    texts[suspect] = f"its reply, {reply}, is the largest, and {why}"
    phase = "train" if record.round else "start"
    record.errors += [{"client": i, "phase": phase, "error": text} for i, text in texts.items()]


def refuse_spoilt(uploads: dict[ClientId, Upload], record: RoundRecord) -> dict[ClientId, Upload]:
    """Return the uploads of start passes whose values are all of a use; the others are errors."""
    kept = {}
    for client_id, upload in uploads.items():
        name = spoilt(upload.arrays, {})
        if name is None:
            kept[client_id] = upload
            continue
        error = f"{name!r} holds values of {_LARGEST:g} or more, or not finite ones"
        record.errors.append({"client": client_id, "phase": "start", "error": error})
    return kept


def refuse_above(
    limit: float | None, uploads: dict[ClientId, Upload], record: RoundRecord, phase: str
) -> dict[ClientId, Upload]:
    """Return the uploads whose vectors all have at most that norm; the others become errors."""
    if limit is None:
        return uploads
    kept = {}
    for client_id, upload in uploads.items():
        vectors = {n: a for n, a in upload.arrays.items() if not is_buffer_name(n)}
        _, name, size = largest({client_id: replace(upload, arrays=vectors)})
        if size <= limit:
            kept[client_id] = upload
            continue
        error = (
            f"client {client_id}, round {record.round}: {name!r} has the norm {size:.4g}; "
            f"federation.max_reply_norm is {limit:g}"
        )
        record.errors.append({"client": client_id, "phase": phase, "error": error})
    return kept

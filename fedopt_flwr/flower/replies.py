"""From Flower's answers to the uploads that a rule may take in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from flwr.common import Code, FitRes

from ..algorithm import ClientId
from ..errors import MessageError
from ..rounds.record import NOT_FINITE, RoundRecord, Upload
from ..training.flat_model import Layout, is_buffer_name
from .messages import decode, encoded_bytes, require_answers, to_arrays


def accept(
    asked: Sequence[ClientId],
    answers: Mapping[ClientId, FitRes | Exception | str],
    expected: Mapping[ClientId, Mapping[str, Layout]],
    record: RoundRecord,
    asked_for: Mapping[str, Any],
    local_steps: Mapping[ClientId, int] | None = None,
) -> dict[ClientId, Upload]:
    """Return the usable uploads in the order of `asked`; `expected` are each client's arrays.

    `asked_for` is the run, round and phase that reports must repeat. An answer that is a text or an
    exception, is missing, carries an error or does not hold the expected arrays becomes an error in
    the record, as does one of other than the planned `local_steps`: weights and c_i follow from
    those. Bytes and vectors that arrived are counted either way.
    """
    uploads = {}
    for client_id in asked:
        answer = answers.get(client_id, "no answer")
        try:
            if not isinstance(answer, FitRes):
                raise MessageError(str(answer))
            upload = _checked(client_id, answer, expected[client_id], record, asked_for)
            _require_steps(answer, (local_steps or {}).get(client_id))
            uploads[client_id] = upload
        except MessageError as error:
            record.errors.append(
                {"client": client_id, "phase": asked_for["phase"], "error": str(error)}
            )
    return uploads


def _checked(
    client_id: ClientId,
    answer: FitRes,
    expected: Mapping[str, Layout],
    record: RoundRecord,
    asked_for: Mapping[str, Any],
) -> Upload:
    report: dict[str, Any] = dict(answer.metrics)
    if answer.status.code != Code.OK or "error" in report:
        raise MessageError(str(report.get("error", answer.status.message)))
    sender = f"client {client_id}, round {record.round}"
    require_answers(report, asked_for)
    try:
        arrays = to_arrays(answer.parameters)
    except Exception as error:  # NumPy raises many kinds for bytes that are no array
        raise MessageError(f"{sender}: sent bytes that are no arrays: {error}") from error
    names = str(report.get("arrays", ""))
    record.uplink_bytes += encoded_bytes(arrays)
    record.uplink_vectors += sum(not is_buffer_name(name) for name in names.split(","))
    tensors = decode(arrays, names, expected, sender)
    try:
        loss = float(report["loss"])
        seconds = float(report["client_seconds"])
    except (KeyError, TypeError, ValueError) as error:
        raise MessageError(f"{sender}: report {report} lacks loss or client_seconds") from error
    if not (math.isfinite(loss) and math.isfinite(seconds)):
        numbers = f"loss {loss} and client_seconds {seconds}"
        raise MessageError(f"{sender}: reported {numbers}: {NOT_FINITE}")
    return Upload(tensors, loss, seconds)


def _require_steps(answer: FitRes, planned: int | None) -> None:
    taken = answer.metrics.get("num_steps")
    if planned is not None and taken is None:
        raise MessageError(f"report {dict(answer.metrics)} lacks num_steps")
    if planned is not None and taken != planned:
        raise MessageError(
            f"took {taken!r} local steps; with the examples that it had at the start it takes "
            f"{planned}; give it that data again"
        )

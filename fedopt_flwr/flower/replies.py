"""From Flower's answers to the uploads that a rule may take in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flwr.common import Code, FitRes
from flwr.server.client_proxy import ClientProxy

from ..algorithm import ClientId
from ..errors import FedoptError, MessageError
from ..own_code import described
from ..problems import foreign_text
from ..rounds.record import RoundRecord, Upload
from ..training.flat_model import Layout, is_buffer_name
from .instruction import Report
from .messages import decode, encoded_bytes, require_answers, require_few, to_arrays

Fit = tuple[ClientProxy, FitRes]
_FEW = 8  # more arrays than expected, that a reply may hold to be told which are wrong


def by_client(
    asked: Sequence[ClientId],
    results: Sequence[Fit],
    failures: Sequence[Fit | BaseException],
    id_of: Callable[[ClientProxy], ClientId],
    missing: str,
) -> dict[ClientId, FitRes | str]:
    """Key the answers of Flower's loop by client id; who has none has the text `missing`. Flower's
    exceptions carry no id, so all share their texts."""
    unnamed = "; ".join(sorted({str(f) for f in failures if isinstance(f, BaseException)}))
    answers: dict[ClientId, FitRes | str] = dict.fromkeys(asked, unnamed or missing)
    named = [*results, *(f for f in failures if not isinstance(f, BaseException))]
    return answers | {id_of(proxy): result for proxy, result in named}


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
            planned = (local_steps or {}).get(client_id)
            uploads[client_id] = _checked(
                client_id, answer, expected[client_id], record, asked_for, planned
            )
        except Exception as error:  # whatever it is, one client's answer ends nothing
            known = isinstance(error, FedoptError)
            text = str(error) if known else f"its reply cannot be read: {described(error)}"
            record.errors.append(
                {"client": client_id, "phase": asked_for["phase"], "error": foreign_text(text)}
            )
    return uploads


def _checked(
    client_id: ClientId,
    answer: FitRes,
    expected: Mapping[str, Layout],
    record: RoundRecord,
    asked_for: Mapping[str, Any],
    planned_steps: int | None,
) -> Upload:
    if answer.status.code != Code.OK or "error" in answer.metrics:
        raise MessageError(str(answer.metrics.get("error", answer.status.message)))
    sender = f"client {client_id}, round {record.round}"
    require_answers(answer.metrics, asked_for)
    _require_few(answer, expected, sender)
    try:
        arrays = to_arrays(answer.parameters)
    except Exception as error:  # NumPy raises many kinds for bytes that are no array
        raise MessageError(f"{sender}: sent bytes that are no arrays: {error}") from error
    record.uplink_bytes += encoded_bytes(arrays)
    report = Report.from_metrics(answer.metrics, sender)
    sent = set(report.arrays.split(","))
    record.uplink_vectors += sum(n in sent and not is_buffer_name(n) for n in expected)
    tensors = decode(arrays, report.arrays, expected, sender)
    if planned_steps is not None and report.num_steps != planned_steps:
        raise MessageError(
            f"took {report.num_steps} local steps; with the examples that it had at the start it "
            f"takes {planned_steps}; give it that data again"
        )
    return Upload(tensors, report.loss, report.client_seconds)


def _require_few(answer: FitRes, expected: Mapping[str, Layout], sender: str) -> None:
    """Refuse many arrays before each of them is read."""
    parameters = answer.parameters
    require_few(parameters.tensors, answer.metrics)
    if len(parameters.tensors) > len(expected) + _FEW:
        raise MessageError(
            f"{sender}: sent {len(parameters.tensors)} arrays; expected {list(expected)}"
        )

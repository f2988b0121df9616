"""Evaluation where the data is: what a client answers, and what is made of all answers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from flwr.common import Code, FitRes
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from ..algorithm import ClientId
from ..config.sections import KNOWN_BETTER
from ..errors import FedoptError, MessageError
from ..own_code import described
from ..problems import foreign_text, validation_problems
from ..rounds.record import RoundRecord
from ..training.evaluation import Evaluation
from .messages import Scalar, require_answers

_LONGEST = 16_384  # characters of an answer
_WORST = 0.1  # share of the clients
LARGEST = 1e30  # of a value: sums of them must stay finite
MOST_VALUES = 64  # by name, of one client
LONGEST_NAME = 256  # printable characters


def _shown(name: str) -> str:
    if not name.isprintable():
        raise ValueError("must be printable")
    return name


_Name = Annotated[str, Field(max_length=LONGEST_NAME), AfterValidator(_shown)]
_Value = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
_Values = Annotated[dict[_Name, _Value], Field(max_length=MOST_VALUES)]


class HeldOut(BaseModel):
    """One client's evaluation of a model on the examples that it held out, as JSON."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    refused: bool = False  # by the client; it then says nothing else
    examples: int = Field(0, ge=0, le=10**9)
    values: _Values = {}  # "loss" and metrics that have a value, of the global model
    own_values: _Values = {}  # of the client's own one, where parts of it stay local

    @classmethod
    def of(cls, examples: int, found: Evaluation, own: Evaluation | None) -> HeldOut:
        return cls(
            examples=examples, values=_values(found), own_values={} if own is None else _values(own)
        )

    @property
    def told(self) -> dict[str, Scalar]:
        """What a client's report says of it."""
        return {"evaluation": self.model_dump_json()}


def _values(found: Evaluation) -> dict[str, float]:
    every = {"loss": found.loss, **found.known}
    return {name: value for name, value in every.items() if abs(value) <= LARGEST}


def record_evaluations(
    asked: Sequence[ClientId],
    answers: Mapping[ClientId, FitRes | Exception],
    asked_for: Mapping[str, Scalar],
    record: RoundRecord,
    most_examples: int,
) -> None:
    """Note in the record what each client found, and the spread of that; failures are errors, and
    so are claims of more than `most_examples`."""
    found: dict[ClientId, HeldOut] = {}
    for client_id in asked:
        try:
            found[client_id] = _checked(answers.get(client_id), asked_for, most_examples)
        except Exception as error:  # whatever it is, one client's answer ends nothing
            known = isinstance(error, FedoptError)
            text = str(error) if known else f"its reply cannot be read: {described(error)}"
            record.errors.append(
                {"client": client_id, "phase": "evaluate", "error": foreign_text(text)}
            )
    told = {i: held for i, held in found.items() if held.examples}
    record.on_clients = {
        "asked": len(asked),
        "refused": sum(held.refused for held in found.values()),
        "without_examples": sum(not held.examples and not held.refused for held in found.values()),
        "clients": [
            {"client": i, **held.model_dump(exclude={"refused"})} for i, held in told.items()
        ],
        "spread": _spreads([(held.examples, held.values) for held in told.values()]),
        "own_spread": _spreads([(held.examples, held.own_values) for held in told.values()]),
    }


def _checked(
    answer: FitRes | Exception | None, asked_for: Mapping[str, Scalar], most_examples: int
) -> HeldOut:
    if not isinstance(answer, FitRes):
        raise MessageError(str(answer or "no answer"))
    if answer.status.code != Code.OK or "error" in answer.metrics:
        raise MessageError(str(answer.metrics.get("error", answer.status.message)))
    require_answers(answer.metrics, asked_for)
    text = answer.metrics.get("evaluation")
    if not isinstance(text, str) or len(text) > _LONGEST:
        raise MessageError(f"its evaluation must be a text of at most {_LONGEST} characters")
    try:
        held = HeldOut.model_validate_json(text)
    except ValidationError as error:
        problems = "; ".join(validation_problems(error, HeldOut))
        raise MessageError(f"its evaluation: {problems}") from None
    if held.examples > most_examples:
        raise MessageError(
            f"its evaluation: examples: got {held.examples}; must be at most limits.examples "
            f"({most_examples})"
        )
    return held


def _spreads(values: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, dict[str, Any]]:
    """Return for each name its spread over the clients that have a value of it."""
    names = dict.fromkeys(name for _, own in values for name in own)
    return {n: _spread(n, [(size, own[n]) for size, own in values if n in own]) for n in names}


def _spread(name: str, values: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """Return mean by examples, plain mean, mean of the worst ⌈n/10⌉, and standard deviation."""
    plain = sorted(value for _, value in values)
    is_lower = name == "loss" or KNOWN_BETTER.get(name) == "lower"
    count = math.ceil(round(_WORST * len(plain), 9))
    worst = plain[-count:] if is_lower else plain[:count]
    return {
        "clients": len(plain),
        "mean": sum(size * value for size, value in values) / sum(size for size, _ in values),
        "unweighted": statistics.fmean(plain),
        "worst": statistics.fmean(worst),
        "deviation": statistics.pstdev(plain),
    }

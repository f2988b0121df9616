"""What server and client tell each other beside arrays: an instruction down, a report up.

Neither believes the other: every value has its type and range, and what is beyond is refused.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json
from torch import nn

from ..algorithm import Algorithm
from ..config.run_config import RunConfig
from ..config.sections import MAX_SEED, Rate, TrainingSection
from ..errors import ConfigError, MessageError
from ..problems import foreign_text, validation_problems
from ..rounds.record import NOT_FINITE
from ..training.flat_model import FlatModel
from .messages import NEVER, PREFIX, Phase, Scalar

_LONGEST_VALUE = 16_384  # characters of one; large enough for a rule's or model's options
_LARGEST_NUMBER = 10**9  # as in the configuration


def _table(text: str) -> str:
    try:
        is_table = isinstance(from_json(text), dict)  # which deep nesting does not make fall over
    except ValueError:
        is_table = False
    if not is_table:
        raise PydanticCustomError("no_table", "must be a table, as JSON")
    return text


_Name = Annotated[str, Field(max_length=256)]
_Names = Annotated[str, Field(max_length=4096)]  # joined by ","
_Table = Annotated[str, Field(max_length=_LONGEST_VALUE), AfterValidator(_table)]  # JSON
_Number = Annotated[int, Field(ge=0, le=_LARGEST_NUMBER)]
_Version = Annotated[int, Field(ge=NEVER, le=_LARGEST_NUMBER)]
_Kind = TypeVar("_Kind", bound=BaseModel)


class _Checked(BaseModel):
    """What a peer says: each value of its own type and within its range."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Instruction(_Checked):
    """What a client has to do in one round; each field is one Flower config value.

    Keys begin with "fedopt.", so that a user's own values can travel beside them. Ranges are those
    of the configuration, or what no run needs more of.
    """

    run: str = Field(pattern="^[0-9a-f]{32}$")  # the same when it is resumed, and for no other run
    model: _Name
    model_options: _Table
    input_shape: str = Field(pattern=r"^\[([0-9]{1,9}(, [0-9]{1,9}){0,7})?\]$")  # JSON
    num_classes: int = Field(ge=0, le=10**6)
    loss: _Name
    metrics: _Names  # for evaluation by the clients
    seed: int = Field(ge=0, le=MAX_SEED)
    threads: int = Field(ge=1, le=1024)
    local_steps: _Number  # 0: local_epochs count
    local_epochs: _Number
    batch_size: _Number
    micro_batch_size: _Number  # 0: a batch is computed at once
    precision: Literal["float32", "bf16"]
    weight_decay: Rate
    clip_norm: Rate
    gradient_momentum: float = Field(ge=0, lt=1)
    buffers: Literal["average", "local", "none"]
    local_parameters: _Names  # patterns, joined by ","
    local_learning_rate: Rate
    weights: str = Field(pattern="^([0-9a-f]{64})?$")  # digest of the file that the model starts at
    phase: Phase = "train"  # this and the rest change from round to round
    round: _Number = 0
    algorithm: _Name = ""
    hyperparameters: _Table = "{}"
    arrays: _Names = ""  # in the order in which they travel
    examples_before: _Number = 0  # with which the client counted until that changed, to tell once
    examples_since: _Number = 0  # the round from which on it counts with those that it has
    state_version: _Version = NEVER  # the round whose client state counts
    oldest_version: _Version = NEVER  # on which the oldest of the server's checkpoints counts
    # on which those since then count, joined by ","
    middle_versions: str = Field(
        "", pattern=r"^(-?[0-9]{1,9}(,-?[0-9]{1,9})*)?$", max_length=_LONGEST_VALUE
    )

    @classmethod
    def for_run(
        cls,
        config: RunConfig,
        model: FlatModel,
        input_shape: tuple[int, ...],
        num_classes: int,
        local_learning_rate: float = 0.0,
        weights: str = "",
    ) -> Instruction:
        """Return what stays the same in all rounds, under the name of a new run.

        ConfigError where batch norm would see micro-batches and nobody said that it may.
        """
        federation = config.federation
        training = config.training
        metrics = dict.fromkeys([config.model.metric, *config.evaluation.metrics])
        values = {
            "run": uuid.uuid4().hex,
            "model": config.model.name,
            "model_options": json.dumps(config.model.options),
            "input_shape": json.dumps(input_shape),
            "num_classes": num_classes,
            "loss": config.model.loss,
            "metrics": ",".join(metrics) if config.evaluation.on_clients else "",
            "seed": federation.seed,
            "threads": training.threads,
            "local_steps": training.local_steps or 0,
            "local_epochs": training.local_epochs or 0,
            "batch_size": training.batch_size,
            "micro_batch_size": _micro_batch_size(training, model),
            "precision": training.precision,
            "weight_decay": training.weight_decay,
            "clip_norm": training.clip_norm,
            "gradient_momentum": training.gradient_momentum,
            "buffers": federation.buffers if model.has_buffers else "none",
            "local_parameters": ",".join(federation.local_parameters),
            "local_learning_rate": local_learning_rate,
            "weights": weights,
        }
        return checked(cls, values, "instruction")

    @property
    def local_patterns(self) -> tuple[str, ...]:
        return tuple(self.local_parameters.split(",")) if self.local_parameters else ()

    @property
    def kept_versions(self) -> set[int]:
        """Versions that the server may still ask for."""
        middle = self.middle_versions.split(",") if self.middle_versions else []
        return {self.state_version, self.oldest_version, *map(int, middle)}

    def to_config(self) -> dict[str, Scalar]:
        return {f"{PREFIX}{name}": value for name, value in self.model_dump().items()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Instruction:
        """Read an instruction; MessageError names each field, its value and what is allowed."""
        own = {
            key.removeprefix(PREFIX): value
            for key, value in config.items()
            if key.startswith(PREFIX)
        }
        missing = cls.model_fields.keys() - own.keys()
        foreign = own.keys() - cls.model_fields.keys()
        if missing or foreign:
            unknown = foreign_text(sorted(foreign), 200)
            raise MessageError(
                f"instruction: lacks {sorted(missing)}, has unknown {unknown}; server and client "
                "must run the same fedopt-flwr version"
            )
        return checked(cls, own, "instruction")

    @model_validator(mode="after")
    def _one_measure_of_work(self) -> Self:
        if (self.local_steps > 0) is (self.local_epochs > 0):
            raise ValueError(
                f"local_steps: got {self.local_steps} beside local_epochs {self.local_epochs}; one "
                "of them must be 0, the other not"
            )
        return self


class Report(_Checked):
    """What a client says beside its arrays; `require_answers` reads its run, round and phase.

    Other keys are a user's own and pass through, as many and as long as `require_few` and
    `_LONGEST_VALUE` let them.
    """

    model_config = ConfigDict(extra="ignore", allow_inf_nan=True)  # which is said in other words

    arrays: _Names
    loss: float
    num_steps: _Number  # of this round
    client_seconds: float

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, Any], sender: str) -> Report:
        """Read a report; MessageError names each field, its value and what is allowed."""
        sizes = [len(v) for kv in metrics.items() for v in kv if isinstance(v, (str, bytes))]
        if max(sizes, default=0) > _LONGEST_VALUE:
            raise MessageError(
                f"{sender}: report: holds a text of {max(sizes)} characters; must be at most "
                f"{_LONGEST_VALUE}; send a client's own data another way"
            )
        report = checked(cls, metrics, f"{sender}: report")
        if not (math.isfinite(report.loss) and math.isfinite(report.client_seconds)):
            numbers = f"loss {report.loss} and client_seconds {report.client_seconds}"
            raise MessageError(f"{sender}: reported {numbers}: {NOT_FINITE}")
        return report


def checked(kind: type[_Kind], values: Mapping[str, Any], what: str) -> _Kind:
    """Return a message's values as their model; MessageError says in `what` something is wrong."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        problems = "; ".join(validation_problems(error, kind))
        raise MessageError(foreign_text(f"{what}: {problems}")) from None


def _micro_batch_size(training: TrainingSection, model: FlatModel) -> int:
    size = training.micro_batch_size
    norms = [
        name
        for name, layer in model.module.named_modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm)
    ]
    if size and norms and not training.micro_batch_norm:
        raise ConfigError(
            f"training.micro_batch_size: got {size}, and {norms[0]!r} is batch norm, whose "
            "statistics would be those of micro-batches; use group norm, leave it out, or allow it "
            "with training.micro_batch_norm = true"
        )
    return size


def local_rate(config: RunConfig, rule: Algorithm) -> float:
    """Return η of the parameters that stay local; ConfigError where the rule derives its own.

    It is the rule's where none is set; a schedule does not change it.
    """
    chosen = config.training.local_learning_rate
    if not config.federation.local_parameters:
        if chosen is not None:
            raise ConfigError(
                f"training.local_learning_rate: got {chosen} without federation.local_parameters; "
                "name some, or leave it out"
            )
        return 0.0
    own: float | None = getattr(rule, "client_learning_rate", None)
    if chosen is None and own is None:
        raise ConfigError(
            f"training.local_learning_rate: none is given, and {rule.name!r} derives its step "
            "sizes, so federation.local_parameters need one; set it, as to 0.05"
        )
    return own if chosen is None else chosen  # type: ignore[return-value]

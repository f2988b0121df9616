"""What can be set in each section of a configuration."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ..errors import ConfigError
from .text import plain, storable

MAX_SEED = 2**63 - 1
Count = Annotated[int, Field(ge=1, le=10**9)]
MOST_IN_OPEN = 1024  # clients that an open federation has room for at the same time
MAX_SECONDS = 10**7  # gRPC and locks overflow on much longer waits
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
Rate = Annotated[float, Field(ge=0)]
_Shape = Annotated[float, Field(ge=1e-6, le=10**6)]  # of a distribution
_Options = Annotated[dict[str, Any], AfterValidator(storable)]


def _named(value: Any) -> Any:
    """Path("") would be the current directory."""
    if value == "":
        raise PydanticCustomError("no_path", "must not be empty; name a path, '.' for this folder")
    return value


_Path = Annotated[Path, BeforeValidator(_named), Field(strict=False)]  # from text


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        strict=True,
        revalidate_instances="always",  # a section may come from model_copy, which checks nothing
        ser_json_inf_nan="constants",  # options of your own code may hold them
    )

    @model_validator(mode="before")
    @classmethod
    def _plain_values(cls, values: Any) -> Any:
        return plain(values)


class AlgorithmSection(_Section):
    """`name` and any hyperparameter of that rule; the rule itself checks the latter."""

    model_config = ConfigDict(extra="allow")

    name: str = "autofed"

    @property
    def hyperparameters(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Facts(_Section):
    """What a client has to know of its federation."""

    num_clients: Count | Literal["open"] = 20  # N; open: clients come and leave as they like
    seed: int = Field(0, ge=0, le=MAX_SEED)

    @property
    def is_open(self) -> bool:
        return self.num_clients == "open"

    @field_validator("num_clients", mode="before")
    @classmethod
    def _number_or_open(cls, value: Any) -> Any:
        if value == "open" or (type(value) is int and 1 <= value <= 10**9):
            return value
        raise ValueError(
            f"federation.num_clients: got {value!r}; must be a whole number between 1 and "
            f"{10**9}, or 'open' where clients may come and leave; change it, or leave it out for "
            "the default, 20"
        )

    def fixed_number(self, who: str, remedy: str = "") -> int:
        """Return N; ConfigError says that `who` must know it, where the federation is open."""
        if self.num_clients == "open":
            remedy = remedy or "give their number, or use `fedopt server` and `fedopt client`"
            raise ConfigError(
                f"federation.num_clients: got 'open'; {who} must know how many clients there are; "
                f"{remedy}"
            )
        return self.num_clients


class FederationSection(Facts):
    clients_per_round: Count = Field(5, validate_default=True)  # S
    num_rounds: Count = 50  # T
    sampler: Literal["uniform", "multinomial", "adaptive", "clustered"] = "uniform"
    warmup_rounds: Count = 4  # of all clients, before `clustered` groups them
    # asked are so many times S clients, counted the first S replies
    over_sample: float = Field(1.0, ge=1, le=1000, validate_default=True)
    weighting: Literal["uniform", "examples"] | None = None  # p_i: 1/N or n_i/Σn; the rule's own
    buffers: Literal["average", "local"] = "average"
    local_parameters: tuple[str, ...] = Field((), strict=False)  # patterns of names; stay at home
    min_replies: Count = Field(1, validate_default=True)
    # of open federations: clients that must be there before round 1 (None: S), and rounds without
    # a client after which it has no part any more (None: it keeps its part)
    min_clients: Count | None = None
    forget_after: Count | None = None
    # for a round's replies, in s; auto (over gRPC): 20 times the slowest so far, at least 600
    round_timeout: float | Literal["auto", "none"] = "auto"
    start_timeout: Seconds = 600  # to wait for all clients before round 1
    client_ids: Literal["numbers", "names"] = "numbers"  # over gRPC: 0 to N-1, or any names
    max_reply_norm: Annotated[float, Field(gt=0)] | None = None  # of each array; others fail

    @property
    def timeout_seconds(self) -> float | None:
        """What a user set for a round's replies; None for "auto" and "none"."""
        return None if isinstance(self.round_timeout, str) else self.round_timeout

    @property
    def clients_to_start(self) -> int:
        """How many clients must be there before round 1."""
        if self.num_clients == "open":
            return self.min_clients or self.clients_per_round
        return self.num_clients

    @property
    def most_clients(self) -> int:
        """How many clients there can be at the same time."""
        return MOST_IN_OPEN if self.num_clients == "open" else self.num_clients

    @property
    def num_asked(self) -> int:
        """How many clients are asked in a round, of which S count."""
        return math.ceil(round(self.over_sample * self.clients_per_round, 9))

    @field_validator("over_sample")
    @classmethod
    def _can_be_asked(cls, factor: float, info: ValidationInfo) -> float:
        sampler = info.data.get("sampler", "uniform")
        if factor > 1 and sampler != "uniform":
            raise ValueError(
                f"federation.over_sample: got {factor} beside sampler = {sampler!r}, whose weights "
                "are those of all that were drawn; set it to 1, or the sampler to 'uniform'"
            )
        count, everyone = info.data.get("clients_per_round"), info.data.get("num_clients")
        if count and isinstance(everyone, int) and math.ceil(round(factor * count, 9)) > everyone:
            raise ValueError(
                f"federation.over_sample: got {factor}, so that more than num_clients ({everyone}) "
                f"would be asked for {count} a round; must be between 1 and {everyone / count:.4g}"
            )
        return factor

    @field_validator("round_timeout", mode="before")
    @classmethod
    def _seconds_or_word(cls, value: Any) -> Any:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value in ("auto", "none") or (is_number and 0 < value <= MAX_SECONDS):
            return value
        raise ValueError(
            f"federation.round_timeout: got {value!r}; must be 'auto', 'none' or seconds > 0 and "
            f"<= {MAX_SECONDS}"
        )

    # of fields, not of the section, so that they speak up beside other problems in it
    @field_validator("clients_per_round", "min_replies")
    @classmethod
    def _within(cls, count: int, info: ValidationInfo) -> int:
        above = "clients_per_round" if info.field_name == "min_replies" else "num_clients"
        most = info.data.get(above, count)
        if most == "open":
            above, most = "what an open federation has room for", MOST_IN_OPEN
        if count > most:
            raise ValueError(
                f"federation.{info.field_name}: got {count}; must be between 1 and {above} "
                f"({most}); lower it or raise {above}"
            )
        return count

    @field_validator("min_clients", "forget_after")
    @classmethod
    def _of_open(cls, count: int | None, info: ValidationInfo) -> int | None:
        everyone = info.data.get("num_clients", "open")
        if count is not None and everyone != "open":
            raise ValueError(
                f"federation.{info.field_name}: got {count} beside num_clients = {everyone}; it is "
                "for num_clients = 'open'; set that, or leave it out"
            )
        needed = info.data.get("min_replies", 1)
        if info.field_name == "min_clients" and not needed <= (count or needed) <= MOST_IN_OPEN:
            raise ValueError(
                f"federation.min_clients: got {count}; must be between min_replies ({needed}) and "
                f"{MOST_IN_OPEN}; change it, or lower min_replies"
            )
        return count


class TrainingSection(_Section):
    local_epochs: Count | None = None
    local_steps: Count | None = Field(None, validate_default=True)  # K; 10 unless by epochs
    batch_size: int = Field(32, ge=0, le=10**9)  # 0: the full local data
    micro_batch_size: int = Field(0, ge=0, le=10**9)  # examples that are computed at once; 0: all
    micro_batch_norm: bool = False  # batch norm may see micro-batches in the place of batches
    precision: Literal["float32", "bf16"] = "float32"  # bf16: outputs and loss; not parameters
    weight_decay: Rate = 0.0  # part of the loss: adds weight_decay · y to ∇F
    clip_norm: Rate = 0.0  # largest norm of the loss's gradient; 0: no limit
    gradient_momentum: float = Field(0.0, ge=0, lt=1)  # within a round, as torch's SGD
    local_learning_rate: Rate | None = None  # of federation.local_parameters; None: the rule's
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:[0-9]{1,3})?)$")
    threads: int = Field(1, ge=1, le=1024)  # intra-op threads of a client and of the server

    @field_validator("local_steps")
    @classmethod
    def _one_measure_of_work(cls, steps: int | None, info: ValidationInfo) -> int | None:
        epochs = info.data.get("local_epochs")
        if steps is not None and epochs is not None:
            raise ValueError(
                f"training.local_epochs: got {epochs} beside local_steps = {steps}; give only one "
                "of them"
            )
        return 10 if steps is epochs is None else steps


class PartitionSection(_Section):
    """How the training data is divided; each field belongs to the kinds in its comment."""

    kind: Literal["iid", "dirichlet", "classes", "subsample", "beta", "natural", "whole"] | None = (
        None  # natural where the data has owners, else dirichlet; whole: `fedopt client` has it all
    )
    concentration: _Shape = 0.3  # dirichlet: α
    classes_per_client: Count = 2  # classes, subsample
    examples_per_client: tuple[Count, Count] = Field((10, 50), strict=False)  # subsample: n_i range
    shape: tuple[_Shape, _Shape] = Field((2.0, 5.0), strict=False)  # beta: both its parameters
    min_examples: int = Field(1, ge=0, le=10**9)  # smallest n_i; 0 allows empty clients

    @field_validator("examples_per_client")
    @classmethod
    def _in_order(cls, limits: tuple[int, int]) -> tuple[int, int]:
        if limits[0] > limits[1]:
            raise ValueError(
                f"data.partition.examples_per_client: got {[*limits]}; must be [low, high] "
                "with 1 <= low <= high"
            )
        return limits


class DataSection(_Section):
    name: str = "digits"
    partition: PartitionSection = PartitionSection()
    path: _Path | None = None  # $FEDOPT_DATA, else the user's cache
    options: _Options = {}  # of `synthetic`, `emnist`, `npz` and of the user's own loader
    collate: str | None = None  # module:function that makes a batch of a list of examples
    loader_workers: int = Field(0, ge=0, le=64)  # processes that read a client's batches; 0: none
    holdout: float = Field(0.0, ge=0, lt=1)  # share of each client's examples kept from training


class ModelSection(_Section):
    name: str = "mlp"
    options: _Options = {}
    loss: str = "cross_entropy"
    metric: str = "accuracy"
    weights: _Path | None = None  # safetensors file of a state_dict: where training starts
    weights_prefix: str = ""  # of the file's names that count, taken off
    weights_strict: bool = True  # file and model must have the same names


class EvaluationSection(_Section):
    metrics: tuple[str, ...] = Field((), strict=False)  # beside model.metric
    on_clients: bool = False  # each client also evaluates the model on what it held out
    every: Count | None = None  # rounds between that; None: as output.evaluate_every
    clients: Count | Literal["all"] = "all"  # how many evaluate, drawn anew each time


KNOWN_BETTER: dict[str, Literal["higher", "lower"]] = {
    "test_accuracy": "higher",
    "accuracy": "higher",
    "balanced_accuracy": "higher",
    "f1": "higher",
    "auroc": "higher",
    "mse": "lower",
    "mae": "lower",
    "perplexity": "lower",
    "train_loss": "lower",
    "test_loss": "lower",
    "global_train_loss": "lower",
    "gradient_norm": "lower",
    "drift": "lower",
    "control_norm": "lower",
    "gradient_cosine": "higher",
    "worst_test_accuracy": "higher",
    "worst_test_loss": "lower",
    "client_accuracy_std": "lower",
    "client_loss_std": "lower",
}
Schedule = Literal["constant", "cosine", "step", "inverse_sqrt"]


class ScheduleSection(_Section):
    """How η and η_g change from round to round: by a factor that is 1 in round 1."""

    client: Schedule = "constant"  # of client_learning_rate
    server: Schedule = "constant"  # of server_learning_rate
    step_rounds: Count = 30  # step: rounds until the next factor
    step_factor: float = Field(0.1, gt=0, le=1)  # step

    @property
    def is_constant(self) -> bool:
        return self.client == self.server == "constant"


class OutputSection(_Section):
    directory: _Path | None = None
    evaluate_every: Count = 1  # rounds; the last one is always evaluated
    checkpoint_every: int = Field(0, ge=0, le=10**9)  # rounds; 0: no checkpoints
    keep: int = Field(3, ge=1, le=1500)  # checkpoints
    diagnostics: bool = False  # drift, ‖c‖, and at evaluations ‖∇f(x)‖: a pass over all data
    # seconds of a client's local work, for the simulated run time alone; None: as measured here
    client_seconds: Rate | None = None
    link_mbps: float = Field(100.0, gt=0, le=10**9)  # Mbit/s, for the simulated run time alone
    trackers: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = Field((), strict=False)

    @field_validator("trackers")
    @classmethod
    def _each_once(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(names)) < len(names):
            raise ValueError(f"output.trackers: got {[*names]}; each must be named once")
        return names


class StopSection(_Section):
    """When a run ends before its last round, and which of its models is kept as the best."""

    metric: str | None = None  # a field of a round's record or a metric's name; its best is kept
    better: Literal["higher", "lower"] | None = None  # for metrics of your own
    patience: Count | None = None  # evaluations in a row without a better value
    target: float | None = None  # of the metric
    max_seconds: Seconds | None = None  # of the whole run, those before it was resumed included
    max_gigabytes: Annotated[float, Field(gt=0)] | None = None  # down and up, of all clients

    @model_validator(mode="after")
    def _measures_something(self) -> Self:
        if self.metric is None:
            for name in ("better", "patience", "target"):
                if (value := getattr(self, name)) is not None:
                    raise ValueError(
                        f"stop.{name}: got {value!r} without stop.metric; name what it is of, such "
                        "as 'test_loss' or 'test_accuracy'"
                    )
        elif self.metric not in KNOWN_BETTER and self.better is None:
            raise ValueError(
                f"stop.better: must be 'higher' or 'lower' for stop.metric = {self.metric!r}, "
                "which this package does not know"
            )
        return self

    @property
    def direction(self) -> Literal["higher", "lower"]:
        return self.better or KNOWN_BETTER[str(self.metric)]


class TransportSection(_Section):
    """What decides how messages travel between processes, and nothing of the result."""

    max_message_mb: int = Field(512, ge=1, le=2047)  # MiB; gRPC itself ends below 2 GiB
    keep_alive_seconds: float = Field(30, ge=2, le=86400)  # a silent connection is dead after this
    # a client's way to a server on another machine
    proxy: str | None = Field(None, pattern=r"^http://([\w.-]+|\[[0-9a-fA-F:]+\]):[0-9]{1,5}$")


class LimitsSection(_Section):
    """What a client lets a server ask of its machine, and the most examples that anyone may claim.

    An instruction beyond is refused, never reduced: the number of threads decides bits.
    """

    threads: Count | None = None  # those of `training.threads`; None: as many as there are cores
    local_steps: Count = 100_000  # in a round
    parameters: Count | None = None  # of the model; None: what half of the memory holds
    examples: Count = 10_000_000  # of one client; the server refuses more, too

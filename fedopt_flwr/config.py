"""The configuration of a run: one object, from TOML, `--set`, Flower's run config or a dict."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from .errors import ConfigError, unknown_name

MAX_SEED = 2**63 - 1


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class AlgorithmSection(_Section):
    """`name` and any hyperparameter of that rule; the rule itself checks the latter."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = "padamfed"

    @property
    def hyperparameters(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class FederationSection(_Section):
    num_clients: int = Field(20, ge=1)  # N
    clients_per_round: int = Field(5, ge=1)  # S
    num_rounds: int = Field(50, ge=1)  # T
    seed: int = Field(0, ge=0, le=MAX_SEED)
    sampler: Literal["uniform", "multinomial", "adaptive", "clustered"] = "uniform"
    warmup_rounds: int = Field(4, ge=1)  # of all clients, before `clustered` groups them
    weighting: Literal["uniform", "examples"] | None = None  # p_i: 1/N or n_i/Σn; the rule's own
    buffers: Literal["average", "local"] = "average"
    min_replies: int = Field(1, ge=1)
    round_timeout: float | None = Field(None, gt=0)  # seconds
    start_timeout: float = Field(600, gt=0)  # seconds to wait for all clients before round 1

    @model_validator(mode="after")
    def _sampled_clients_exist(self) -> Self:
        if self.clients_per_round > self.num_clients:
            raise ValueError(
                f"federation.clients_per_round: got {self.clients_per_round}; must be between 1 "
                f"and num_clients ({self.num_clients}); lower it or raise num_clients"
            )
        if self.min_replies > self.clients_per_round:
            raise ValueError(
                f"federation.min_replies: got {self.min_replies}; must be between 1 and "
                f"clients_per_round ({self.clients_per_round}); lower it or raise clients_per_round"
            )
        return self


class TrainingSection(_Section):
    local_steps: int | None = Field(None, ge=1)  # K; 10 unless local_epochs is given
    local_epochs: int | None = Field(None, ge=1)
    batch_size: int = Field(32, ge=0)  # 0: the full local data
    weight_decay: float = Field(0.0, ge=0)  # part of the loss: adds weight_decay · y to ∇F
    clip_norm: float = Field(0.0, ge=0)  # largest norm of the loss's gradient; 0: no limit
    gradient_momentum: float = Field(0.0, ge=0, lt=1)  # within a round, as torch's SGD
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    threads: int = Field(1, ge=1)  # intra-op threads of a client and of the server

    @model_validator(mode="after")
    def _one_measure_of_work(self) -> Self:
        if self.local_steps is not None and self.local_epochs is not None:
            raise ValueError(
                f"training.local_epochs: got {self.local_epochs} beside local_steps = "
                f"{self.local_steps}; give only one of them"
            )
        if self.local_steps is None and self.local_epochs is None:
            object.__setattr__(self, "local_steps", 10)
        return self


class PartitionSection(_Section):
    """How the training data is divided; each field belongs to the kinds in its comment."""

    kind: Literal["iid", "dirichlet", "classes", "subsample", "beta", "natural", "whole"] | None = (
        None  # natural where the data has owners, else dirichlet; whole: `fedopt client` has it all
    )
    concentration: float = Field(0.3, gt=0)  # dirichlet: α
    classes_per_client: int = Field(2, ge=1)  # classes, subsample
    examples_per_client: tuple[int, int] = (10, 50)  # subsample: n_i is drawn from this range
    shape: tuple[float, float] = (2.0, 5.0)  # beta: both parameters of the distribution
    min_examples: int = Field(1, ge=0)  # smallest n_i; 0 allows empty clients

    @model_validator(mode="after")
    def _ranges_in_order(self) -> Self:
        low, high = self.examples_per_client
        if not 1 <= low <= high:
            raise ValueError(
                f"data.partition.examples_per_client: got [{low}, {high}]; must be [low, high] "
                "with 1 <= low <= high"
            )
        if min(self.shape) <= 0:
            raise ValueError(
                f"data.partition.shape: got {list(self.shape)}; both numbers must be above 0"
            )
        return self


class DataSection(_Section):
    name: str = "digits"
    partition: PartitionSection = PartitionSection()
    path: Path | None = None  # $FEDOPT_DATA, else the user's cache
    options: dict[str, Any] = {}  # of `synthetic`, `emnist` and of the user's own loader


class ModelSection(_Section):
    name: str = "mlp"
    options: dict[str, Any] = {}
    loss: str = "cross_entropy"
    metric: str = "accuracy"


Schedule = Literal["constant", "cosine", "step", "inverse_sqrt"]


class ScheduleSection(_Section):
    """How η and η_g change from round to round: by a factor that is 1 in round 1."""

    client: Schedule = "constant"  # of client_learning_rate
    server: Schedule = "constant"  # of server_learning_rate
    step_rounds: int = Field(30, ge=1)  # step: rounds until the next factor
    step_factor: float = Field(0.1, gt=0, le=1)  # step

    @property
    def is_constant(self) -> bool:
        return self.client == self.server == "constant"


class OutputSection(_Section):
    directory: Path | None = None
    evaluate_every: int = Field(1, ge=1)  # rounds; the last one is always evaluated
    checkpoint_every: int = Field(0, ge=0)  # rounds; 0: no checkpoints


class TransportSection(_Section):
    """What decides how messages travel between processes, and nothing of the result."""

    max_message_mb: int = Field(512, ge=1, le=2047)  # MiB; gRPC itself ends below 2 GiB
    keep_alive_seconds: float = Field(30, ge=2)  # a silent connection counts as dead after this


class RunConfig(_Section):
    """Everything that decides a run's result, and where it is written.

    Raises ConfigError with all problems at once; hyperparameters of the rule are checked when the
    run is put together, as only the rule knows them.
    """

    algorithm: AlgorithmSection = AlgorithmSection()
    rules: dict[str, dict[str, Any]] = {}  # hyperparameters by rule, below those of [algorithm]
    federation: FederationSection = FederationSection()
    training: TrainingSection = TrainingSection()
    schedule: ScheduleSection = ScheduleSection()
    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    output: OutputSection = OutputSection()
    transport: TransportSection = TransportSection()

    _folder: Path | None = PrivateAttr(None)

    def __init__(self, /, **sections: Any) -> None:
        try:
            super().__init__(**sections)
        except ValidationError as error:
            raise ConfigError(validation_problems(error, type(self))) from None

    @property
    def import_folders(self) -> tuple[Path, ...]:
        """Where `module:attribute` names are looked up, in order."""
        here = Path.cwd()
        return (self._folder, here) if self._folder else (here,)

    def looking_in(self, folder: Path | None) -> Self:
        """Make `folder` the first place where `module:attribute` names are looked up."""
        self._folder = folder
        return self

    @classmethod
    def from_file(cls, path: Path | str | None, settings: Iterable[str] = ()) -> Self:
        """Read a TOML file (None: all defaults), then apply `section.key=VALUE` settings."""
        data = _read_toml(Path(path)) if path is not None else {}
        for setting in settings:
            _apply_setting(data, setting)
        return cls(**data).looking_in(None if path is None else Path(path).resolve().parent)

    @classmethod
    def coerce(cls, config: RunConfig | Mapping[str, Any] | Path | str) -> RunConfig:
        """Return a RunConfig from one, from a mapping of sections or from a TOML file's path."""
        if isinstance(config, RunConfig):
            return config
        return cls(**config) if isinstance(config, Mapping) else cls.from_file(config)

    def updated(self, settings: Iterable[str]) -> Self:
        """Return a copy with `section.key=VALUE` settings applied."""
        data = self.to_dict()
        for setting in settings:
            _apply_setting(data, setting)
        return type(self)(**data).looking_in(self._folder)

    def for_rule(self, name: str) -> Self:
        """Return a copy for another rule, without the hyperparameters of this one."""
        if name == self.algorithm.name:
            return self
        config = self.model_copy(update={"algorithm": AlgorithmSection(name=name)})
        return config.looking_in(self._folder)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that TOML can hold and that give the same RunConfig again."""
        return self.model_dump(mode="json", exclude_none=True)


def validation_problems(error: ValidationError, root: type[BaseModel], at: str = "") -> list[str]:
    """Turn pydantic's errors into lines of field, value, what is allowed."""
    lines = []
    for item in error.errors():
        field = ".".join([at, *map(str, item["loc"])]).strip(".")
        if item["type"] == "extra_forbidden":
            known = _fields_at(root, item["loc"][:-1])
            lines.append(unknown_name(field, str(item["loc"][-1]), known))
        elif item["type"] == "value_error":
            lines.append(str(item["ctx"]["error"]))
        else:
            message = item["msg"].removeprefix("Input ").removeprefix("Value ")
            lines.append(f"{field}: got {item['input']!r}; {message}")
    return lines


def _fields_at(root: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    for part in loc:
        annotation = root.model_fields[str(part)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        root = annotation
    return list(root.model_fields)


def _read_toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"config file: {str(path)!r} is not a file; check the path")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"config file: {str(path)!r} is not TOML: {error}; mend that line"
        ) from None


def _apply_setting(data: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise ConfigError(f"--set {setting!r}: must have the form section.key=VALUE")
    for part in parts[:-1]:
        data = data.setdefault(part, {})
        if not isinstance(data, dict):
            raise ConfigError(f"--set {setting!r}: {part!r} is a value, not a section")
    try:
        data[parts[-1]] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        data[parts[-1]] = text.strip()

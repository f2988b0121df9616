"""The configuration of a run: one object, from TOML, `--set`, Flower's run config or a dict."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import PrivateAttr, ValidationError

from ..algorithm import Algorithm
from ..algorithms import ALGORITHMS, load_rule
from ..errors import ConfigError
from ..own_code import is_import_path
from ..problems import unknown_name, validation_problems
from .sections import (
    AlgorithmSection,
    DataSection,
    EvaluationSection,
    FederationSection,
    LimitsSection,
    ModelSection,
    OutputSection,
    ScheduleSection,
    StopSection,
    TrainingSection,
    TransportSection,
    _Options,
    _Section,
)
from .text import changed, read_toml


class RunConfig(_Section):
    """Everything that decides a run's result, and where it is written.

    Raises ConfigError with all problems at once, those of the rules' hyperparameters among them;
    a rule of your own is checked when the run is put together.
    """

    algorithm: AlgorithmSection = AlgorithmSection()
    rules: dict[str, _Options] = {}  # hyperparameters by rule, below those of [algorithm]
    federation: FederationSection = FederationSection()
    training: TrainingSection = TrainingSection()
    schedule: ScheduleSection = ScheduleSection()
    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    evaluation: EvaluationSection = EvaluationSection()
    stop: StopSection = StopSection()
    output: OutputSection = OutputSection()
    transport: TransportSection = TransportSection()
    limits: LimitsSection = LimitsSection()

    _folder: Path | None = PrivateAttr(None)

    def __init__(self, /, **sections: Any) -> None:
        problems: list[str] = []
        try:
            super().__init__(**sections)
        except ValidationError as error:
            problems += validation_problems(error, type(self))
        algorithm = sections.get("algorithm", {})
        rules = sections.get("rules", {})
        if isinstance(algorithm, (Mapping, AlgorithmSection)) and isinstance(rules, Mapping):
            problems += _rule_problems(dict(algorithm), rules)
        if problems:
            raise ConfigError(problems)

    @property
    def import_folders(self) -> tuple[Path, ...]:
        """Where `module:attribute` names are looked up, in order."""
        return tuple(filter(None, (self._folder, Path.cwd())))

    @property
    def names_own_code(self) -> bool:
        """Whether any part is a `module:attribute`, which is looked up in the import folders."""
        names = [self.algorithm.name, self.data.name, self.data.collate or "", self.model.name]
        names += [self.model.loss, self.model.metric, *self.evaluation.metrics]
        return any(is_import_path(name) for name in names)

    def looking_in(self, folder: Path | None) -> Self:
        """Make `folder` the first place where `module:attribute` names are looked up."""
        self._folder = folder
        return self

    @classmethod
    def from_file(
        cls,
        path: Path | str | None,
        settings: Iterable[str] = (),
        values: Mapping[str, Any] | None = None,
    ) -> Self:
        """Read a TOML file (None: all defaults), then apply `section.key=VALUE` settings, then
        values by their `section.key`."""
        data = {} if path is None else read_toml(Path(path))
        folder = None if path is None else Path(path).resolve().parent
        return cls(**changed(data, settings, values)).looking_in(folder)

    @classmethod
    def coerce(cls, config: RunConfig | Mapping[str, Any] | Path | str) -> RunConfig:
        """Return a RunConfig from one, from a mapping of sections or from a TOML file's path."""
        if isinstance(config, RunConfig):
            return config
        if isinstance(config, (str, Path)):
            return cls.from_file(config)
        if not isinstance(config, Mapping) or not all(isinstance(key, str) for key in config):
            raise ConfigError(
                f"config: got {config!r}; must be a RunConfig, a mapping with the sections' names "
                "as keys, or the path of a TOML file"
            )
        return cls(**config)

    def updated(self, settings: Iterable[str]) -> Self:
        """Return a copy with `section.key=VALUE` settings applied."""
        return type(self)(**changed(self.to_dict(), settings)).looking_in(self._folder)

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with these values by their `section.key`."""
        return type(self)(**changed(self.to_dict(), values=values)).looking_in(self._folder)

    def make_rule(self) -> Algorithm:
        """Return the configured rule; ConfigError names every hyperparameter that is wrong."""
        section = self.algorithm
        kind = load_rule(section.name, self.import_folders)
        table = self.rules.get(section.name, {})
        return _make_rule(kind, section.name, table, section.hyperparameters)

    def for_rule(self, name: str) -> Self:
        """Return a copy for another rule, without the hyperparameters of this one."""
        if name == self.algorithm.name:
            return self
        return self.model_copy(update={"algorithm": AlgorithmSection(name=name)})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that TOML can hold and that mean the same in every directory."""
        values = self.model_dump(mode="json", exclude_none=True)
        for section, key in (("data", "path"), ("model", "weights")):
            if key in values[section]:
                path = Path(os.path.expanduser(values[section][key]))
                values[section][key] = str(path.absolute())
        return values


def _make_rule(
    kind: type[Algorithm], name: str, table: Mapping[str, Any], own: Mapping[str, Any]
) -> Algorithm:
    """Make a rule from its table in [rules] and what [algorithm] says over it."""

    def place(key: str) -> str:
        return f"rules.{name}" if key in table and key not in own else "algorithm"

    try:
        return kind(**{**table, **own})
    except ValidationError as error:
        raise ConfigError(validation_problems(error, kind, place)) from None


def _rule_problems(algorithm: Mapping[str, Any], rules: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the hyperparameters of built-in rules."""
    unknown = [n for n in rules if n not in ALGORITHMS and not is_import_path(n)]
    problems = [unknown_name("rules", n, ALGORITHMS) for n in unknown]
    own = dict(algorithm)
    chosen = str(own.pop("name", AlgorithmSection().name))
    if chosen not in ALGORITHMS and not is_import_path(chosen):
        problems.append(unknown_name("algorithm.name", chosen, ALGORITHMS))
    for name, table in {chosen: {}, **rules}.items():
        if name in ALGORITHMS and isinstance(table, Mapping):
            try:
                _make_rule(ALGORITHMS[name], name, table, own if name == chosen else {})
            except ConfigError as error:
                problems += error.problems
    return problems

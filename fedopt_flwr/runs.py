"""One run of an experiment, whatever engine drives it: strategy, files, records, result."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from .algorithm import Algorithm, ClientId, Plan
from .config import RunConfig
from .errors import ConfigError, FedoptError, FedoptWarning, RunError
from .experiment import Experiment
from .flower import FederatedStrategy
from .imports import is_import_path
from .metrics import RoundRecord, summarize
from .outputs import CONFIG, CURVES, Checkpoint, RunDirectory
from .plots import draw_curves

_FLOAT_BYTES = 4
_MAY_CHANGE = {  # when a run goes on: how long one waits, and what computes
    "federation.min_replies",
    "federation.round_timeout",
    "federation.start_timeout",
    "training.device",
}


@dataclass
class Result:
    """What a run gives back: the final vector (NumPy, float32), the module with it, the records."""

    parameters: np.ndarray
    model: nn.Module
    rounds: list[RoundRecord]
    summary: dict[str, Any]

    @property
    def last_error(self) -> str | None:
        """What the last client failed with, if no reply ever counted and no divergence says why."""
        rounds = [record for record in self.rounds if record.round > 0]
        if self.summary["diverged_at"] is not None or any(record.clients for record in rounds):
            return None
        errors = [error for record in rounds for error in record.errors] or [{}]
        return f"client {errors[-1].get('client')}: {errors[-1].get('error')}"


class Listener(Protocol):
    """Hears how a run goes; the CLI shows it."""

    def on_start(self, rule: Algorithm, plan: Plan, experiment: Experiment) -> None:
        """The clients are known and the rule's open step sizes are computed."""

    def on_round(self, record: RoundRecord) -> None:
        """A round is over and, where that was due, evaluated."""


class Silent:
    """A listener that says nothing."""

    def on_start(self, rule: Algorithm, plan: Plan, experiment: Experiment) -> None: ...

    def on_round(self, record: RoundRecord) -> None: ...


class Run:
    """A strategy to give to an engine; every finished round goes to records, files and listener.

    `client_state` returns a client's counted state where this process has it; else checkpoints hold
    the server alone, and clients keep what the last checkpoint counts on.
    """

    def __init__(
        self,
        experiment: Experiment,
        listener: Listener,
        checkpoint: Checkpoint | None,
        *,
        in_memory: bool,
        client_state: Callable[[ClientId, int], Mapping[str, Tensor]] | None = None,
    ) -> None:
        config = experiment.config
        self._experiment, self._listener = experiment, listener
        self._client_state = client_state
        self._directory: RunDirectory | None = None
        self._records: list[RoundRecord] = []
        self._initial_loss: float | None = None  # on the test data; round 0 holds it where it is
        self.num_rounds = config.federation.num_rounds  # still to do
        self._resumed = checkpoint is not None
        if checkpoint:
            self.num_rounds -= checkpoint.server.round
        self.strategy = FederatedStrategy(
            experiment.rule,
            experiment.model,
            config.federation,
            config.training,
            template=experiment.template(),
            schedule=config.schedule,
            evaluate=experiment.evaluate if experiment.data.test is not None else None,
            evaluate_every=config.output.evaluate_every,
            on_start=self._start,
            on_round=self._take,
            in_memory=in_memory,
            resume=checkpoint.server if checkpoint else None,
        )

    def _start(self, rule: Algorithm, plan: Plan) -> None:
        self._listener.on_start(rule, plan, self._experiment)
        if self._experiment.data.test is not None and not (self._resumed or rule.start_names):
            self._initial_loss = self._experiment.evaluate(self.strategy.model).loss

    @contextlib.contextmanager
    def recording(self, checkpoint: Checkpoint | None) -> Iterator[None]:
        """Write the run's files meanwhile, if it has a directory."""
        config = self._experiment.config
        if config.output.directory is None:
            with _own_rule(config):
                yield
            return
        directory = RunDirectory(config.output.directory)
        if checkpoint is None:
            directory.require_unused()
            directory.open(config.to_dict())
        else:
            self._records += directory.reopen(checkpoint.server.round)
        self._directory = directory
        try:
            with _own_rule(config):
                yield
        finally:
            directory.close()
            if not self._records:  # it never began, so the folder is free for another attempt
                directory.discard()

    def _take(self, record: RoundRecord) -> None:
        self._records.append(record)
        if self._directory is not None:
            self._directory.add(record)
            every = self._experiment.config.output.checkpoint_every
            if every and record.round and record.round % every == 0:
                self._directory.write_checkpoint(self._checkpoint())
                if self._client_state is None:
                    self.strategy.durable_versions = dict(self.strategy.versions)
        self._listener.on_round(record)

    def _checkpoint(self) -> Checkpoint:
        server, config = self.strategy.snapshot(), self._experiment.config
        states: dict[ClientId, Mapping[str, Tensor]] = {}
        if self._client_state is not None and self._keeps_state(config):
            states = {i: self._client_state(i, version) for i, version in server.versions.items()}
        folder = str(config.import_folders[0])
        return Checkpoint(server, states, self._experiment.given, folder, config.to_dict())

    def _keeps_state(self, config: RunConfig) -> bool:
        local = config.federation.buffers == "local" and self.strategy.model.has_buffers
        return local or bool(self.strategy.rule.init_client(1))

    def finish(self) -> Result:
        """Write summary, model and curves, and return the result."""
        strategy, config = self.strategy, self._experiment.config
        strategy.load_model()
        model = strategy.model
        vector = model.vector.detach().cpu().numpy().copy()
        summary = {
            "algorithm": strategy.rule.name,
            "hyperparameters": strategy.rule.model_dump(),
            "model_parameters": model.size,
            **summarize(self._records, model.size * _FLOAT_BYTES, self._initial_loss),
        }
        if summary["diverged_at"] is not None:
            warnings.warn(
                f"{strategy.rule.name}: diverged in round {summary['diverged_at']}: losses were no "
                "longer finite, 20 times the first, or again those of an untrained model; lower "
                "the learning rates, set training.clip_norm, or look for values in the data that "
                "are not finite",
                FedoptWarning,
                stacklevel=2,
            )
        if self._directory is not None:
            self._directory.write_results(summary, model.module.state_dict())
            federation = config.federation
            title = (
                f"{config.data.name}, {config.model.name}: {federation.num_clients} clients, "
                f"{federation.clients_per_round} a round"
            )
            records = {strategy.rule.name: [self._records]}
            try:
                draw_curves(records, self._directory.path / CURVES, title)
            except OSError as error:  # all that counts is written
                warnings.warn(f"{CURVES}: not drawn: {error}", FedoptWarning, stacklevel=2)
        result = Result(vector, model.module, self._records, summary)
        if result.last_error is not None:
            warnings.warn(
                "no client's reply was counted in any round, so the model is the untrained one; "
                f"the last error: {result.last_error}",
                FedoptWarning,
                stacklevel=2,
            )
        return result


@contextlib.contextmanager
def _own_rule(config: RunConfig) -> Iterator[None]:
    """Say in a line what a user's own rule raised, and where."""
    try:
        yield
    except FedoptError:
        raise
    except Exception as error:
        if not is_import_path(config.algorithm.name):
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise RunError(
            f"algorithm.name: {config.algorithm.name!r} failed in {place.filename}, line "
            f"{place.lineno}: {type(error).__name__}: {error}"
        ) from error


def read_run(directory: Path) -> tuple[RunConfig, Checkpoint]:
    """Return what is needed to go on with a run; ConfigError if there is nothing to go on with."""
    folder = RunDirectory(directory)
    checkpoint = folder.read_checkpoint()
    config = folder.read_config(checkpoint)
    _require_unchanged(config, checkpoint, directory)
    if checkpoint.server.round >= config.federation.num_rounds:
        raise ConfigError(
            f"--resume: the run in {str(directory)!r} has done all "
            f"{config.federation.num_rounds} rounds; start a new one for more"
        )
    return config, checkpoint


def _require_unchanged(config: RunConfig, checkpoint: Checkpoint, directory: Path) -> None:
    """Raise ConfigError for every key that decides the result and differs from the run's."""
    now, then = _deciding(config.to_dict()), _deciding(checkpoint.config)
    changed = [
        f"--resume: {key} is {now.get(key)!r} in {str(directory / CONFIG)!r}, but the checkpoint "
        f"was made with {then.get(key)!r}; put it back, or start a new run"
        for key in sorted({*now, *then})
        if now.get(key) != then.get(key)
    ]
    if changed:
        raise ConfigError(changed)


def _deciding(config: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys and values, without those that a run may go on with other values of."""
    flat = {
        f"{section}.{key}": value
        for section, values in config.items()
        if section not in ("output", "transport")
        for key, value in values.items()
    }
    return {key: value for key, value in flat.items() if key not in _MAY_CHANGE}


def require_same(experiment: Experiment, checkpoint: Checkpoint, directory: Path) -> None:
    """Raise ConfigError where an experiment is not the one that the checkpoint was made from."""
    if experiment.given != checkpoint.given:
        raise ConfigError(
            f"--resume: the run in {str(directory)!r} was given {checkpoint.given or 'nothing'} "
            f"as Python objects, this call {experiment.given or 'nothing'}; call "
            "fedopt_flwr.resume() with the same ones"
        )
    if checkpoint.server.vectors["model"].numel() != experiment.model.size:
        raise ConfigError(
            f"--resume: the checkpoint's model has {checkpoint.server.vectors['model'].numel()} "
            f"parameters, this one {experiment.model.size}; use the model of the run"
        )

"""Running an experiment in this process: rounds, files, results, and going on after a stop."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import nn

from .algorithm import Algorithm, Plan
from .config import RunConfig
from .data import from_datasets
from .engines.in_process import run_in_process
from .errors import ConfigError, FedoptWarning
from .experiment import Experiment
from .flower import FederatedClient, FederatedStrategy, MemoryStates
from .metrics import RoundRecord, summarize
from .objectives import Loss, Metric
from .outputs import CURVES, Checkpoint, RunDirectory
from .plots import draw_curves

_FLOAT_BYTES = 4


@dataclass
class Result:
    """What a run gives back: the final vector (NumPy, float32), the module with it, the records."""

    parameters: np.ndarray
    model: nn.Module
    rounds: list[RoundRecord]
    summary: dict[str, Any]


class Listener(Protocol):
    """Hears how a run goes; the CLI shows it."""

    def on_start(self, rule: Algorithm, plan: Plan, experiment: Experiment) -> None:
        """The clients are known and the rule's open step sizes are computed."""

    def on_round(self, record: RoundRecord) -> None:
        """A round is over and, where that was due, evaluated."""


class _Silent:
    def on_start(self, rule: Algorithm, plan: Plan, experiment: Experiment) -> None: ...

    def on_round(self, record: RoundRecord) -> None: ...


def simulate(
    config: RunConfig | Mapping[str, Any] | Path | str,
    model: Callable[[], nn.Module] | None = None,
    client_data: Sequence[Any] | None = None,
    test_data: Any | None = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
    *,
    workers: int = 1,
    listener: Listener | None = None,
) -> Result:
    """Run a federation inside this process.

    `model` returns an nn.Module, whose parameters as returned are x⁰; `client_data` is a list of
    map-style data sets of (input, target), one a client; `loss` and `metric` take (outputs,
    targets) and return the mean over the batch. What is not given comes from `config`. Files are
    written if `output.directory` is set. Raises FedoptError with all that is wrong.
    """
    run_config = RunConfig.coerce(config)
    experiment = _experiment(run_config, model, client_data, test_data, loss, metric)
    return run_experiment(experiment, workers=workers, listener=listener)


def resume(
    directory: Path | str,
    model: Callable[[], nn.Module] | None = None,
    client_data: Sequence[Any] | None = None,
    test_data: Any | None = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
    *,
    workers: int = 1,
    listener: Listener | None = None,
) -> Result:
    """Go on with a run from the last checkpoint in its directory, bit for bit.

    What the run was given as objects, its configuration cannot hold: give the same ones again.
    """
    folder = RunDirectory(Path(directory))
    checkpoint = folder.read_checkpoint()
    config = folder.read_config(checkpoint)
    if checkpoint.server.round >= config.federation.num_rounds:
        raise ConfigError(
            f"--resume: the run in {str(folder.path)!r} has done all "
            f"{config.federation.num_rounds} rounds; start a new one for more"
        )
    experiment = _experiment(config, model, client_data, test_data, loss, metric)
    if experiment.given != checkpoint.given:
        raise ConfigError(
            f"--resume: the run in {str(folder.path)!r} was given {checkpoint.given or 'nothing'} "
            f"as Python objects, this call {experiment.given or 'nothing'}; call "
            "fedopt_flwr.resume() with the same ones"
        )
    if checkpoint.server.vectors["model"].numel() != experiment.model.size:
        raise ConfigError(
            f"--resume: the checkpoint's model has {checkpoint.server.vectors['model'].numel()} "
            f"parameters, this one {experiment.model.size}; use the model of the run"
        )
    return run_experiment(experiment, workers=workers, listener=listener, checkpoint=checkpoint)


def _experiment(
    config: RunConfig,
    model: Callable[[], nn.Module] | None,
    client_data: Sequence[Any] | None,
    test_data: Any | None,
    loss: Loss | None,
    metric: Metric | None,
) -> Experiment:
    objects = {
        "model": model,
        "client_data": client_data,
        "test_data": test_data,
        "loss": loss,
        "metric": metric,
    }
    data = None
    if client_data is not None or test_data is not None:
        data = from_datasets(client_data, test_data, config)
    experiment = Experiment(config, model=model, data=data, loss=loss, metric=metric)
    experiment.given = [name for name, value in objects.items() if value is not None]
    return experiment


def run_experiment(
    experiment: Experiment,
    *,
    workers: int = 1,
    listener: Listener | None = None,
    checkpoint: Checkpoint | None = None,
) -> Result:
    """Run an experiment with the in-process engine and write its files."""
    config, listener = experiment.config, listener or _Silent()
    if workers > 1 and experiment.stochastic:
        warnings.warn(
            f"workers: got {workers}; this model draws from torch's global generator in training "
            "(dropout), so one worker is used to keep runs reproducible",
            FedoptWarning,
            stacklevel=2,
        )
        workers = 1
    states, records = MemoryStates(), []
    with _run_directory(config, checkpoint) as (directory, earlier):
        records += earlier
        strategy = _strategy(experiment, listener, checkpoint)
        strategy.on_round = _Recorder(experiment, strategy, states, records, directory, listener)
        if checkpoint:
            for client_id, state in checkpoint.client_states.items():
                states.save(client_id, checkpoint.server.versions[client_id], dict(state))
        pool = experiment.pool(workers)
        run_in_process(
            strategy,
            [FederatedClient(i, d, pool, states) for i, d in enumerate(experiment.data.clients)],
            states,
            num_rounds=config.federation.num_rounds
            - (checkpoint.server.round if checkpoint else 0),
            workers=workers,
            round_timeout=config.federation.round_timeout,
            threads=config.training.threads,
        )
        return _result(experiment, strategy, records, directory)


@contextlib.contextmanager
def _run_directory(
    config: RunConfig, checkpoint: Checkpoint | None
) -> Iterator[tuple[RunDirectory | None, list[RoundRecord]]]:
    if config.output.directory is None:
        yield None, []
        return
    directory = RunDirectory(config.output.directory)
    earlier: list[RoundRecord] = []
    if checkpoint is None:
        directory.require_unused()
        directory.open(config.to_dict())
    else:
        earlier = directory.reopen(checkpoint.server.round)
    try:
        yield directory, earlier
    finally:
        directory.close()


def _strategy(
    experiment: Experiment, listener: Listener, checkpoint: Checkpoint | None
) -> FederatedStrategy:
    config = experiment.config
    return FederatedStrategy(
        experiment.rule,
        experiment.model,
        config.federation,
        config.training,
        model_name=config.model.name,
        loss_name=config.model.loss,
        evaluate=experiment.evaluate if experiment.data.test is not None else None,
        evaluate_every=config.output.evaluate_every,
        on_start=lambda rule, plan: listener.on_start(rule, plan, experiment),
        in_memory=True,
        resume=checkpoint.server if checkpoint else None,
    )


@dataclass
class _Recorder:
    """Takes every finished round to the records, the files and the listener."""

    experiment: Experiment
    strategy: FederatedStrategy
    states: MemoryStates
    records: list[RoundRecord]
    directory: RunDirectory | None
    listener: Listener

    def __call__(self, record: RoundRecord) -> None:
        self.records.append(record)
        if self.directory is not None:
            self.directory.add(record)
            every = self.experiment.config.output.checkpoint_every
            if every and record.round and record.round % every == 0:
                self.directory.write_checkpoint(self._checkpoint())
        self.listener.on_round(record)

    def _checkpoint(self) -> Checkpoint:
        server, rule = self.strategy.snapshot(), self.strategy.rule
        config = self.experiment.config
        local = config.federation.buffers == "local" and self.strategy.model.has_buffers
        keeps_state = local or bool(rule.init_client(1))
        counted = server.versions.items() if keeps_state else ()
        return Checkpoint(
            server=server,
            client_states={i: self.states.load(i, version) for i, version in counted},
            given=self.experiment.given,
            folder=str(config.import_folders[0]),
        )


def _result(
    experiment: Experiment,
    strategy: FederatedStrategy,
    records: list[RoundRecord],
    directory: RunDirectory | None,
) -> Result:
    strategy.load_model()
    model = strategy.model
    vector = model.vector.detach().cpu().numpy().copy()
    summary = {
        "algorithm": strategy.rule.name,
        "hyperparameters": strategy.rule.model_dump(),
        "model_parameters": model.size,
        **summarize(records, model.size * _FLOAT_BYTES),
    }
    if directory is not None:
        directory.write_results(summary, model.module.state_dict())
        draw_curves({strategy.rule.name: records}, directory.path / CURVES, _title(experiment))
    return Result(vector, model.module, records, summary)


def _title(experiment: Experiment) -> str:
    config = experiment.config
    federation = config.federation
    return (
        f"{config.data.name}, {config.model.name}: {federation.num_clients} clients, "
        f"{federation.clients_per_round} a round"
    )

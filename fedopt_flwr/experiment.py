"""The composition root: from a configuration to data, model, rule, strategy and results."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from pydantic import ValidationError
from torch import nn

from .algorithm import Algorithm, Plan
from .algorithms import ALGORITHMS
from .config import RunConfig, validation_problems
from .data import FederatedData, from_datasets, load_federated_data
from .data.federated import require_examples
from .engines.in_process import run_in_process
from .errors import ConfigError, FedoptWarning, unknown_name
from .flower import FederatedClient, FederatedStrategy, MemoryStates, ModelPool
from .flower.messages import NEVER
from .flower.strategy import Evaluation, Snapshot
from .metrics import RoundRecord, summarize
from .models import make_model, seeded_module
from .objectives import (
    Loss,
    Metric,
    draws_random_numbers,
    evaluate,
    named_loss,
    named_metric,
)
from .outputs import CURVES, Checkpoint, RunDirectory
from .plots import draw_curves
from .vectors import FlatModel

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


def make_rule(config: RunConfig) -> Algorithm:
    """Return the configured rule; ConfigError names every hyperparameter that is wrong."""
    section = config.algorithm
    if section.name not in ALGORITHMS:
        raise ConfigError(unknown_name("algorithm.name", section.name, ALGORITHMS))
    kind = ALGORITHMS[section.name]
    try:
        return kind(**section.hyperparameters)
    except ValidationError as error:
        raise ConfigError(validation_problems(error, kind, at="algorithm")) from None


def pick_device(name: str) -> torch.device:
    """Return the device of that name; "auto" is CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"training.device: got {name!r}; this machine has {torch.cuda.device_count()} CUDA "
            "devices; use 'auto' or 'cpu'"
        )
    return device


class Experiment:
    """Data, model and rule of one configuration, checked and ready to run."""

    def __init__(
        self,
        config: RunConfig,
        *,
        model: Callable[[], nn.Module] | None = None,
        data: FederatedData | None = None,
        loss: Loss | None = None,
        metric: Metric | None = None,
    ) -> None:
        self.config, self.rule = config, make_rule(config)
        self.device = pick_device(config.training.device)
        folders = config.import_folders
        self.loss = loss or named_loss(config.model.loss, folders)
        self.metric_name = "custom" if metric else config.model.metric
        self.metric = metric or named_metric(config.model.metric, folders)
        loaded = data or load_federated_data(config)
        require_examples(loaded.clients)
        self._factory = model
        self._loaded = loaded
        self.model = self.make_model()  # the server's, and the first check of the user's module
        self.data = loaded.on_device(self.device)
        largest = max(self.data.clients, key=lambda client: client.num_examples)
        self.stochastic = draws_random_numbers(self.model, largest)

    def make_model(self) -> FlatModel:
        """Return a new model at x⁰; the same for the server and every worker."""
        seed, section = self.config.federation.seed, self.config.model
        if self._factory is not None:
            return FlatModel(seeded_module(self._factory, seed), self.device)
        module = make_model(
            section.name,
            section.options,
            input_shape=self._loaded.input_shape,
            num_classes=self._loaded.num_classes,
            seed=seed,
            folders=self.config.import_folders,
        )
        return FlatModel(module, self.device)

    def evaluate(self, model: FlatModel) -> Evaluation:
        """Evaluate on the test data; where buffers stay local, by the batch's statistics."""
        test = self.data.test
        if test is None:
            raise ConfigError("test_data: there is none to evaluate on")
        local = self.config.federation.buffers == "local" and model.has_buffers
        loss, metric = evaluate(model, test, self.loss, self.metric, use_batch_statistics=local)
        return Evaluation(loss, metric, self.metric_name)

    def pool(self, size: int) -> ModelPool:
        """Return the models of `size` workers; the server's, idle while clients train, is one."""
        section = self.config.model
        return ModelPool(
            [self.model, *(self.make_model() for _ in range(size - 1))],
            self.loss,
            model_name=section.name,
            loss_name=section.loss,
            stochastic=self.stochastic,
            metric=self.metric,
        )


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
    data = None
    if client_data is not None or test_data is not None:
        data = from_datasets(client_data, test_data, run_config)
    experiment = Experiment(run_config, model=model, data=data, loss=loss, metric=metric)
    return run_experiment(experiment, workers=workers, listener=listener)


def resume(directory: Path | str, *, workers: int = 1, listener: Listener | None = None) -> Result:
    """Go on with a run that was started from files, from its last checkpoint, bit for bit."""
    folder = RunDirectory(Path(directory))
    checkpoint = folder.read_checkpoint()
    config = RunConfig.from_file(folder.path / "config.toml").updated(
        [f"output.directory={folder.path}"]
    )
    if checkpoint.round >= config.federation.num_rounds:
        raise ConfigError(
            f"--resume: the run in {str(folder.path)!r} has done all "
            f"{config.federation.num_rounds} rounds; start a new one for more"
        )
    return run_experiment(
        Experiment(config), workers=workers, listener=listener, checkpoint=checkpoint
    )


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
        strategy_round = _Recorder(strategy, states, records, directory, config, listener)
        strategy.on_round = strategy_round
        if checkpoint:
            for client_id, state in checkpoint.client_states.items():
                states.save(client_id, checkpoint.versions[client_id], dict(state))
        pool = experiment.pool(workers)
        run_in_process(
            strategy,
            [FederatedClient(i, d, pool, states) for i, d in enumerate(experiment.data.clients)],
            states,
            num_rounds=config.federation.num_rounds - (checkpoint.round if checkpoint else 0),
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
        earlier = directory.reopen(checkpoint.round)
    try:
        yield directory, earlier
    finally:
        directory.close()


def _strategy(
    experiment: Experiment, listener: Listener, checkpoint: Checkpoint | None
) -> FederatedStrategy:
    config = experiment.config
    snapshot = None
    if checkpoint:
        snapshot = Snapshot(
            checkpoint.round, checkpoint.vectors, checkpoint.buffers, checkpoint.versions
        )
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
        resume=snapshot,
    )


@dataclass
class _Recorder:
    """Takes every finished round to the records, the files and the listener."""

    strategy: FederatedStrategy
    states: MemoryStates
    records: list[RoundRecord]
    directory: RunDirectory | None
    config: RunConfig
    listener: Listener

    def __call__(self, record: RoundRecord) -> None:
        self.records.append(record)
        if self.directory is not None:
            self.directory.add(record)
            every = self.config.output.checkpoint_every
            if every and record.round and record.round % every == 0:
                self.directory.write_checkpoint(self._checkpoint())
        self.listener.on_round(record)

    def _checkpoint(self) -> Checkpoint:
        server = self.strategy.snapshot()
        counted = {i: v for i, v in server.versions.items() if v != NEVER}
        has_state = (
            bool(self.strategy.rule.init_client(1)) or self.config.federation.buffers == "local"
        )
        states = {i: self.states.load(i, v) for i, v in counted.items()} if has_state else {}
        return Checkpoint(server.round, server.vectors, server.buffers, server.versions, states)


def _result(
    experiment: Experiment,
    strategy: FederatedStrategy,
    records: list[RoundRecord],
    directory: RunDirectory | None,
) -> Result:
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

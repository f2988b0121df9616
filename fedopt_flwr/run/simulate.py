"""Running an experiment in this process, and resuming it after a stop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..config.run_config import RunConfig
from ..data import Collate, from_datasets
from ..engines.in_process import run_in_process
from ..errors import ConfigError, FedoptWarning
from ..flower import FederatedClient, MemoryStates
from ..training.calling import Loss
from ..training.metrics import Metric
from .checkpoints import Checkpoint
from .experiment import Experiment
from .result import Result
from .resuming import read_run
from .run import Listener, Run, Silent


def simulate(
    config: RunConfig | Mapping[str, Any] | Path | str,
    model: Callable[[], nn.Module] | None = None,
    client_data: Any | None = None,
    test_data: Any | None = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
    *,
    collate: Collate | None = None,
    weights: Mapping[str, Tensor] | None = None,
    workers: int = 1,
    listener: Listener | None = None,
) -> Result:
    """Run a federation inside this process.

    `model` returns an nn.Module, whose parameters as returned are x⁰; `client_data` is a list of
    data sets of (input, target), one a client: map-style, or IterableDatasets with a length;
    `collate` makes a batch of a list of examples, as that of torch's DataLoader; `loss` takes
    (outputs, targets) and returns the mean over the batch, `metric` takes those of the whole test
    set and returns a number or a dict of numbers, of which the first is `test_metric`; `weights` is
    a state_dict in the place of the file `model.weights`. What is not given comes from `config`.
    Files are written if `output.directory` is set. Raises FedoptError with all that is wrong.
    """
    objects = {"client_data": client_data, "test_data": test_data, "loss": loss, "metric": metric}
    objects |= {"collate": collate, "weights": weights}
    experiment = _experiment(RunConfig.coerce(config), model=model, **objects)
    return run_experiment(experiment, workers=workers, listener=listener)


def resume(
    directory: Path | str,
    model: Callable[[], nn.Module] | None = None,
    client_data: Any | None = None,
    test_data: Any | None = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
    *,
    collate: Collate | None = None,
    weights: Mapping[str, Tensor] | None = None,
    workers: int = 1,
    listener: Listener | None = None,
) -> Result:
    """Continue a run from the last checkpoint in its directory, bit for bit.

    What the run was given as objects, its configuration cannot hold: give the same ones again.
    ConfigError names what is not as it was; own code that was changed is only a warning.
    """
    config, checkpoint = read_run(Path(directory))
    if checkpoint.clients_keep_state:
        raise ConfigError(
            f"--resume: the clients of the run in {str(directory)!r} were processes of their own "
            "that keep its state; continue with `fedopt launch --resume`, or with `fedopt server "
            "--resume` and those clients"
        )
    objects = {"client_data": client_data, "test_data": test_data, "loss": loss, "metric": metric}
    objects |= {"collate": collate, "weights": weights}
    experiment = _experiment(config, model=model, **objects)
    return run_experiment(experiment, workers=workers, listener=listener, checkpoint=checkpoint)


def _experiment(config: RunConfig, **objects: Any) -> Experiment:
    """Make an experiment with the objects that are given, not None, instead of its own."""
    given = {name: value for name, value in objects.items() if value is not None}
    names = list(given)
    ours = [given.pop(name, None) for name in ("client_data", "test_data", "collate")]
    if any(item is not None for item in ours):
        clients, test, collate = ours
        given["data"] = from_datasets(clients, test, config, collate)
    return Experiment(config, given=names, **given)


def run_experiment(
    experiment: Experiment,
    *,
    workers: int = 1,
    listener: Listener | None = None,
    checkpoint: Checkpoint | None = None,
) -> Result:
    """Run an experiment with the in-process engine and write its files."""
    config = experiment.config
    if not isinstance(workers, int) or workers < 1:
        raise ConfigError(f"workers: got {workers!r}; must be a whole number from 1")
    if workers > 1 and experiment.stochastic:
        warnings.warn(
            f"workers: got {workers}; this model draws from torch's global generator in training "
            "(dropout), or data.loader_workers read its data, so one worker is used to keep runs "
            "reproducible",
            FedoptWarning,
            stacklevel=2,
        )
        workers = 1
    states = MemoryStates()
    run = Run(experiment, listener or Silent(), checkpoint, client_state=states.load)
    if checkpoint:
        for client_id, state in checkpoint.client_states.items():
            states.save(client_id, checkpoint.server.versions[client_id], dict(state))
    pool = experiment.pool(workers)
    parts = zip(experiment.data.clients, experiment.data.holdouts, strict=True)
    clients = [FederatedClient(i, d, pool, states, h) for i, (d, h) in enumerate(parts)]
    with run.recording():
        run_in_process(
            run.strategy,
            clients,
            states,
            num_rounds=run.num_rounds,
            workers=workers,
            round_timeout=config.federation.timeout_seconds,
            threads=config.training.threads,
        )
        return run.finish()

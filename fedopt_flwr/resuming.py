"""Going on with a run: what its folder must hold, and what must be as it was."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .algorithm import Plan
from .checkpoints import Checkpoint
from .config import RunConfig
from .errors import ConfigError, FedoptWarning
from .experiment import Experiment
from .outputs import CONFIG, MODEL, SUMMARY, RunDirectory
from .settings import as_setting

_MAY_CHANGE = {  # how long one waits, and what computes
    "federation.min_replies",
    "federation.round_timeout",
    "federation.start_timeout",
    "training.device",
}


def read_run(directory: Path, given: RunConfig | None = None) -> tuple[RunConfig, Checkpoint]:
    """Return what is needed to go on with a run; ConfigError if there is nothing to go on with.

    `given` takes the place of the folder's configuration, which it must agree with in all that
    decides the result.
    """
    folder = RunDirectory(directory)
    checkpoint = folder.read_checkpoint()
    config = given or folder.read_config(checkpoint)
    source = "the given configuration" if given else repr(str(directory / CONFIG))
    _require_unchanged(config, checkpoint, source)
    is_done = checkpoint.server.round >= config.federation.num_rounds
    if is_done and all((directory / name).exists() for name in (SUMMARY, MODEL)):
        raise ConfigError(
            f"--resume: the run in {str(directory)!r} has done all "
            f"{config.federation.num_rounds} rounds; start a new one for more"
        )
    place = as_setting("output.directory", str(directory))
    return config.updated([place]).looking_in(Path(checkpoint.folder)), checkpoint


def _require_unchanged(config: RunConfig, checkpoint: Checkpoint, source: str) -> None:
    """Raise ConfigError for every key that decides the result and differs from the run's."""
    now, then = _deciding(config.to_dict()), _deciding(checkpoint.config)
    changed = [
        f"--resume: {key} is {now.get(key)!r} in {source}, but the checkpoint was made with "
        f"{then.get(key)!r}; put it back, or start a new run"
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
    now, then = experiment.origin, checkpoint.origin
    if now.given != then.given:
        raise ConfigError(
            f"--resume: the run in {str(directory)!r} was given {then.given or 'nothing'} as "
            f"Python objects, this call {now.given or 'nothing'}; call fedopt_flwr.resume() with "
            "the same ones"
        )
    if checkpoint.server.vectors["model"].numel() != experiment.model.size:
        raise ConfigError(
            f"--resume: the checkpoint's model has {checkpoint.server.vectors['model'].numel()} "
            f"parameters, this one {experiment.model.size}; use the model of the run"
        )
    for part, digest in now.data.items():
        if then.data.get(part, digest) != digest:
            raise ConfigError(
                f"--resume: the {part} of {experiment.config.data.name!r} is not that of the run "
                f"in {str(directory)!r}; have $FEDOPT_DATA or data.path lead to the same data (a "
                "loader of your own: return the same in every call), or start a new run"
            )
    edited = [n for n, digest in now.code.items() if then.code.get(n, digest) != digest]
    if edited:
        warnings.warn(
            f"--resume: {', '.join(edited)}: the file was changed since the checkpoint; the rounds "
            "to come use it as it is now",
            FedoptWarning,
            stacklevel=2,
        )


def require_same_sizes(plan: Plan, checkpoint: Checkpoint) -> None:
    """Raise ConfigError for the first client that holds another number of examples than before."""
    for client_id, before in checkpoint.origin.num_examples:
        if (count := plan.num_examples.get(client_id)) != before:
            raise ConfigError(
                f"--resume: client {client_id} holds {count} examples and held {before} when the "
                "checkpoint was made; give it the same data, or start a new run"
            )

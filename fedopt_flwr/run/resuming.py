"""Resuming a run: what its folder must hold, and what must be as it was."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..algorithm import Plan
from ..config.run_config import RunConfig
from ..data.federated import TRAINING
from ..errors import ConfigError, FedoptWarning
from ..rounds.participation import make_plan
from .checkpoints import Checkpoint
from .directory import MODEL, RunDirectory
from .experiment import Experiment
from .reading import CONFIG, SUMMARY

_MAY_CHANGE = {  # how long one waits, what computes, what is kept
    "federation.min_replies",
    "federation.round_timeout",
    "federation.start_timeout",
    "federation.max_reply_norm",
    "training.device",
    "stop.patience",
    "stop.target",
    "stop.max_seconds",
    "stop.max_gigabytes",
    "output.directory",
    "output.checkpoint_every",
    "output.keep",
    "output.link_mbps",
    "output.client_seconds",
    "output.trackers",
}


def read_run(
    directory: Path, config: Path | None = None, settings: Sequence[str] = ()
) -> tuple[RunConfig, Checkpoint]:
    """Return what is needed to resume a run; ConfigError if there is nothing to resume.

    `config` is a file that takes the place of the folder's own, with its code beside it, and
    `settings` change either; both must agree with the run in all that decides the result.
    """
    checkpoint = RunDirectory(directory).read_checkpoint()
    file = config or directory / CONFIG
    found = RunConfig.from_file(file, settings, {"output.directory": str(directory)})
    if config is None:
        found = found.looking_in(Path(checkpoint.folder))
    _require_unchanged(found, checkpoint, f"{str(file)!r}{' and --set' if settings else ''}")
    is_done = checkpoint.server.round >= found.federation.num_rounds
    if is_done and all((directory / name).exists() for name in (SUMMARY, MODEL)):
        raise ConfigError(
            f"--resume: the run in {str(directory)!r} has done all "
            f"{found.federation.num_rounds} rounds; start a new one for more"
        )
    stopped = _why_stopped(directory)
    if stopped and found.to_dict()["stop"] == checkpoint.config.get("stop"):
        raise ConfigError(
            f"--resume: the run in {str(directory)!r} ended {stopped}; to continue it change that "
            f"limit in [stop] of its {CONFIG}, or start a new one"
        )
    return found, checkpoint


def _why_stopped(directory: Path) -> str | None:
    """Return why a run that is over ended before its last round, if it did."""
    with contextlib.suppress(OSError, ValueError):
        summary = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))
        if isinstance(summary, dict) and summary.get("stopped"):
            return str(summary["stopped"])
    return None


def _require_unchanged(config: RunConfig, checkpoint: Checkpoint, source: str) -> None:
    """Raise ConfigError for every key that decides the result and differs from the run's."""
    now = _flat(config.to_dict())
    then = _flat(checkpoint.config)
    with contextlib.suppress(ConfigError):  # keys that were added since have their defaults
        then = _flat(RunConfig(**checkpoint.config).to_dict())
    # data that may lie elsewhere by now is known by its digest
    free = _MAY_CHANGE | ({"data.path"} if TRAINING in checkpoint.origin.data else set())
    changed = [
        f"--resume: {key} is {now.get(key)!r} in {source}, but the checkpoint was made with "
        f"{then.get(key)!r}; put it back, or start a new run"
        for key in sorted({*now, *then} - free)
        if now.get(key) != then.get(key)
    ]
    if changed:
        raise ConfigError(changed)


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys and values, without the sections that decide nothing of the result."""
    return {
        f"{section}.{key}": value
        for section, values in config.items()
        if section not in ("transport", "limits")
        for key, value in values.items()
    }


def require_same(experiment: Experiment, checkpoint: Checkpoint) -> None:
    """Raise ConfigError where an experiment is not the one that the checkpoint was made from."""
    directory = str(experiment.config.output.directory)
    now = experiment.origin
    then = checkpoint.origin
    if now.given != then.given:
        raise ConfigError(
            f"--resume: the run in {directory!r} was given {then.given or 'nothing'} as "
            f"Python objects, this call {now.given or 'nothing'}; call fedopt_flwr.resume() with "
            "the same ones"
        )
    _require_arrays(experiment, checkpoint)
    for part, digest in now.data.items():
        if then.data.get(part, digest) != digest:
            raise ConfigError(
                f"--resume: the {part} of {experiment.config.data.name!r} is not that of the run "
                f"in {directory!r}; have $FEDOPT_DATA or data.path lead to the same data (a "
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


def _require_arrays(experiment: Experiment, checkpoint: Checkpoint) -> None:
    """Raise ConfigError for every array of a checkpoint that is not as rule and model make it."""
    server, model = checkpoint.server, experiment.model
    sizes = dict(server.first or checkpoint.origin.num_examples)
    plan = make_plan(experiment.rule, experiment.config, sizes)
    start = experiment.rule.resolve(plan).init_server(model.vector.detach().cpu(), plan)
    own = experiment.rule.init_client(model.size)
    own |= model.initial_buffers if experiment.has_local_buffers else {}
    own |= model.initial_local
    problems = [
        *_array_problems("vector", start.vectors, server.vectors),
        *_array_problems("buffer", model.initial_buffers, server.buffers),
    ]
    if own and not checkpoint.clients_keep_state:
        for client_id in server.versions:
            state = checkpoint.client_states.get(client_id, {})
            problems += _array_problems(f"client {client_id}'s", own, state)
    if problems:
        raise ConfigError(problems)


def _array_problems(
    what: str, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]
) -> Iterator[str]:
    for name, array in expected.items():
        seen = f"{list(found[name].shape)} of {found[name].dtype}" if name in found else "missing"
        wanted = f"{list(array.shape)} of {array.dtype}"
        if seen != wanted:
            yield (
                f"--resume: the checkpoint's {what} {name!r} is {seen}, with this rule and model "
                f"it is {wanted}; use those of the run"
            )


def require_same_clients(plan: Plan, checkpoint: Checkpoint) -> None:
    """Raise ConfigError for other clients than before, or one with more or less data."""
    before = dict(checkpoint.origin.num_examples)
    if before.keys() != plan.num_examples.keys():
        raise ConfigError(
            f"--resume: the run has the clients {list(before)}, and {list(plan.num_examples)} are "
            "here; start those that it began with"
        )
    for client_id, count in plan.num_examples.items():
        if count != before[client_id]:
            raise ConfigError(
                f"--resume: client {client_id} holds {count} examples and held "
                f"{before[client_id]} when the checkpoint was made; give it the same data, or "
                "start a new run"
            )

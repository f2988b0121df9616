"""Independent runs, one after another or side by side in processes of their own."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from ..config.run_config import RunConfig
from ..config.text import read_toml
from ..errors import ConfigError, FedoptError, FedoptWarning
from ..run.checkpoints import has_checkpoint
from ..run.directory import MODEL, RunDirectory
from ..run.experiment import Experiment
from ..run.reading import CONFIG, SUMMARY, read_finished
from ..run.result import Outcome
from ..run.run import Listener
from ..run.simulate import resume, run_experiment
from .console import LOG, logging_to

Key = TypeVar("Key")
_SLOW_IMPORTS = [__name__, "sklearn.datasets", "flwr_datasets.partitioner", "matplotlib.figure"]
_METHOD = "forkserver" if hasattr(os, "fork") else "spawn"


def attempt(config: RunConfig, train: Callable[[], Outcome]) -> Outcome | str:
    """Return a run's outcome, or in one line why it failed; `run.log` has the whole traceback."""
    try:
        return train()
    except FedoptError as error:
        text = "; ".join(str(error).splitlines())
        failure: Exception = error
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        failure = error
    with contextlib.ExitStack() as stack:
        if config.output.directory is not None:
            stack.enter_context(logging_to(config.output.directory))
        LOG.debug("the run failed", exc_info=failure)
    return text


def train(
    config: RunConfig,
    workers: int,
    listener: Listener | None = None,
    experiment: Experiment | None = None,
) -> Outcome:
    """Run from the start, or from the checkpoint that an attempt before left in the folder."""
    directory = config.output.directory
    if directory is not None and has_checkpoint(directory):
        return resume(directory, workers=workers, listener=listener)
    experiment = experiment or Experiment(config)
    return run_experiment(experiment, workers=workers, listener=listener)


def finished(config: RunConfig) -> Outcome | None:
    """Return what this very run left in its folder, if it came to its end there.

    An attempt that did not, and left no checkpoint, is removed. ConfigError if the folder holds
    another run.
    """
    directory = config.output.directory
    if directory is None or not (directory / CONFIG).exists():
        return None
    there = RunConfig(**read_toml(directory / CONFIG))
    if _of_the_result(there) != _of_the_result(config):
        raise ConfigError(
            f"output.directory: {str(directory)!r} holds a run of another configuration; name "
            "another folder, or remove this one"
        )
    if all((directory / name).exists() for name in (SUMMARY, MODEL)):
        return read_finished(directory)
    if not has_checkpoint(directory):
        RunDirectory(directory).remove_run()
    return None


def _of_the_result(config: RunConfig) -> dict[str, Any]:
    """Return what makes a run another one; its folder may have been renamed."""
    return config.with_values({"output.trackers": [], "output.directory": "."}).to_dict()


def run_side_by_side(
    configs: Mapping[Key, RunConfig],
    *,
    jobs: int,
    workers: int,
    on_end: Callable[[Key, Outcome | str, list[str]], None],
) -> None:
    """Run all configurations, at most `jobs` at a time, each in a new process.

    `on_end` hears of each run its outcome, or why it failed, and its warnings. However this
    process ends, the others end with it.
    """
    multiprocessing.set_forkserver_preload(_SLOW_IMPORTS)
    context: Any = multiprocessing.get_context(_METHOD)
    waiting = deque(configs.items())
    running: dict[Connection, tuple[Key, BaseProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                key, config = waiting.popleft()
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_run, args=(config, workers, sender), daemon=True)
                process.start()
                sender.close()
                running[receiver] = key, process
            ready = wait(list(running))
            for receiver in [r for r in running if r in ready]:
                key, process = running.pop(receiver)
                on_end(key, *_answer(receiver, process))
    finally:
        for _, process in running.values():
            process.kill()


def _answer(receiver: Connection, process: BaseProcess) -> tuple[Outcome | str, list[str]]:
    with receiver:
        try:
            found: tuple[Outcome | str, list[str]] = receiver.recv()
        except EOFError:
            process.join()
            found = f"its process ended with exit code {process.exitcode}", []
    process.join()
    return found


def _run(config: RunConfig, workers: int, sender: Connection) -> None:
    """In a process of its own: train, and send how that ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started this one hears it, and ends it
    threading.Thread(target=_follow_parent, daemon=True).start()
    LOG.addHandler(logging.NullHandler())
    LOG.propagate = False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", FedoptWarning)
        ended = attempt(config, lambda: _without_model(train(config, workers)))
    sender.send((ended, list(dict.fromkeys(str(warning.message) for warning in caught))))


def _without_model(result: Outcome) -> Outcome:
    return Outcome(rounds=result.rounds, summary=result.summary)


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)

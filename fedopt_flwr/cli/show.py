"""What a person sees of a run: a header, then a progress bar or plain lines, then the result."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, Self

from pydantic import BaseModel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from ..algorithm import Algorithm, Plan
from ..algorithms.padamfed import PAdaMFed
from ..algorithms.padamfed_vr import PAdaMFedVR
from ..config.run_config import RunConfig
from ..errors import RunError, Terminated
from ..flower.open_federation import FOLDER
from ..rounds.record import TOO_LATE, RoundRecord
from ..run.checkpoints import has_checkpoint
from ..run.experiment import Experiment
from ..run.result import Result
from .console import (
    errors_console,
    logging_to,
    spell_what_cannot_be_shown,
    steady_console,
    warnings_as_lines,
)

_LINES = 10  # plain lines a run, about
_CHANGES = {  # of the clients of an open federation
    "joined": "joined",
    "forgotten": "away for longer than federation.forget_after, and forgotten",
    "resized": "has another number of examples",
    "restarted": "had lost its state, begins anew",
}


class RunDisplay:
    """Shows one run; a `Listener`."""

    def __init__(
        self,
        directory: Path | None = None,
        *,
        shows_setting: bool = True,
        how_to_continue: str = "",
    ) -> None:
        self._console = steady_console(sys.stdout)
        self._shows_setting = shows_setting  # else the rule alone
        self._progress: Progress | None = None
        self._num_rounds = 0
        self._how_to_continue = how_to_continue  # once it was stopped; "": as any run
        self._last_round: int | None = None
        self._round_before: int | None = None  # before the first one that is shown
        self._directory = directory
        self._meanwhile = contextlib.ExitStack()
        self._log: logging.Handler | None = None  # of a run that began in a directory

    def __enter__(self) -> Self:
        spell_what_cannot_be_shown()
        self._meanwhile.enter_context(warnings_as_lines())
        # Flower's local simulation runs a ServerApp in a thread, which may set no handler
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGTERM, _terminate)
            self._meanwhile.callback(signal.signal, signal.SIGTERM, before or signal.SIG_DFL)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._log is not None and isinstance(error, Exception):  # `main` shows it
            text = {"msg": "the run failed", "exc_info": (kind, error, trace)}
            self._log.handle(logging.makeLogRecord(text))
        self._meanwhile.close()
        if isinstance(error, KeyboardInterrupt):
            errors_console().print(f"stopped {self._how_to_resume()}", markup=False, soft_wrap=True)
            if isinstance(error, Terminated):
                sys.exit(128 + signal.SIGTERM)  # else 130, which the library of the command sets

    def _how_to_resume(self) -> str:
        when = f"after round {self._last_round}" if self._last_round else "before a round was over"
        if self._how_to_continue:
            return f"{when}; {self._how_to_continue}"
        if self._directory is not None and has_checkpoint(self._directory):
            return f"{when}; continue with --resume {self._directory}"
        return f"{when}; without a checkpoint (output.checkpoint_every) it cannot be resumed"

    def _print(self, text: str, style: str | None = None) -> None:
        with contextlib.suppress(SystemExit):  # its reader is gone, as after `| head`: train on
            self._console.print(text, style=style, markup=False, soft_wrap=True)

    def on_start(self, rule: Algorithm, plan: Plan, experiment: Experiment) -> None:
        """Print the header and start the bar."""
        self._num_rounds = plan.num_rounds
        self._started = time.monotonic()
        if self._directory is not None:  # it is this run's from here on
            self._log = self._meanwhile.enter_context(logging_to(self._directory))
        if self._shows_setting:
            self._print_setting(plan, experiment)
        mark = " (experimental)" if rule.experimental else ""
        self._print(f"{rule.name}{mark}: {hyperparameter_text(rule, plan, experiment.rule)}")
        if not self._console.is_terminal:
            return
        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), "{task.fields[state]}")
        self._progress = Progress(*columns, "ETA", TimeRemainingColumn(), console=self._console)
        self._show_progress(self._progress)
        self._progress.add_task(rule.name, total=plan.num_rounds, state="")

    def _show_progress(self, progress: Progress) -> None:
        self._meanwhile.enter_context(progress)

    def _print_setting(self, plan: Plan, experiment: Experiment) -> None:
        config = experiment.config
        model = experiment.model
        training = config.training
        work = training.local_steps or training.local_epochs
        unit = "steps" if training.local_steps else "epochs"
        batch = f"batches of {training.batch_size}" if training.batch_size else "full batches"
        self._print(
            f"{config.data.name}, {config.model.name} with {model.size:,} parameters, "
            f"{plan.num_clients} clients with {min(plan.num_examples.values())} to "
            f"{max(plan.num_examples.values())} examples, {plan.clients_per_round} a round, "
            f"{plan.num_rounds} rounds, {work} local {unit}, {batch}, "
            f"seed {config.federation.seed}, {experiment.device}"
        )
        options = [*_chosen(config.federation, "sampler", "warmup_rounds", "weighting")]
        options += _chosen(config.schedule, *type(config.schedule).model_fields)
        options += _chosen(training, "micro_batch_size", "precision", "weight_decay")
        options += _chosen(training, "clip_norm", "gradient_momentum")
        if options:
            self._print(", ".join(options))
        self._print_what_is_kept(config, experiment)

    def _print_what_is_kept(self, config: RunConfig, experiment: Experiment) -> None:
        """Say what only the clients have, and what the server has of each."""
        model, means = experiment.model, experiment.rule.client_means
        if model.local:
            self._print(
                f"{model.local_vector.numel():,} more parameters stay local "
                f"({', '.join(model.local)}): the server evaluates with their initial values"
            )
        if config.federation.is_open and means:
            size = 4 * model.size * len(means) / 1e6
            place = self._directory / FOLDER if self._directory is not None else "memory"
            self._print(
                "open federation: the server keeps what it must know of each client (a gradient of "
                f"its data), {size:.3g} MB each, in {place}"
            )
        if config.federation.buffers == "local" and model.has_buffers:
            self._print("buffers stay local: evaluation uses the batch's statistics")

    def on_round(self, record: RoundRecord) -> None:
        """Move the bar, or print a line now and then; changes and errors of clients always."""
        self._last_round = record.round
        if self._round_before is None:
            self._round_before = max(record.round - 1, 0)
        for what, ids in record.members.items():
            names = ", ".join(map(str, ids))
            self._print(f"round {record.round}: {_CHANGES[what]}: {names}")
        for item in record.errors:
            if item["error"] == TOO_LATE:
                continue
            # by the clustered sampler before the round; after it
            others = {
                "gradient": "not grouped by its gradient",
                "evaluate": "did not evaluate",
                "diagnose": "did not tell its loss and gradient",
            }
            missed = others.get(item["phase"], "not counted")
            who = f"round {record.round}: client {item['client']}"
            self._print(f"{who} {missed}: {item['error']}", "yellow")
        if self._progress is not None:
            (task,) = self._progress.task_ids
            self._progress.update(task, completed=record.round, state=_state(record))
            return
        every = max(1, self._num_rounds // _LINES)
        if record.round % every == 0 or record.round == self._num_rounds:
            elapsed = time.monotonic() - self._started
            done = max(record.round - self._round_before, 1)
            remaining = elapsed / done * (self._num_rounds - record.round)
            number = f"round {record.round}/{self._num_rounds}"
            self._print(f"{number}  {_state(record)}  ETA {remaining:.0f} s")

    def finish(self, result: Result) -> None:
        """Print the outcome and where the files are; RunError if the run ended without replies."""
        summary = result.summary
        loss = summary["final_test_loss"]
        best = summary["best_test_accuracy"]
        parts = [
            f"test loss {loss:.4f}" if loss is not None else "no test data",
            _measured(summary["final_test_accuracy"], summary["final_test_metric"]),
            f"best {best:.4f}" if best is not None else "",
            f"{summary['gigabytes']:.3g} GB",
            f"{summary['seconds']:.1f} s",
            f"{failures} failures" if (failures := summary["failures"] - summary["late"]) else "",
            f"{summary['late']} late" if summary["late"] else "",
        ]
        self._print("done: " + ", ".join(part for part in parts if part))
        if len(summary["final_test_metrics"]) > 1:
            values = summary["final_test_metrics"].items()
            self._print(", ".join(f"{name} {value:.4f}" for name, value in values))
        found = summary["final_on_clients"]
        if found is not None:
            told = f"{len(found['clients'])} of {found['asked']} clients"
            refused = f", {found['refused']} refused" if found["refused"] else ""
            self._print(f"{on_clients_text(found)} ({told}{refused})")
        if summary["stopped"]:
            self._print(f"stopped {summary['stopped']}")
        if summary["best_round"] is not None:
            self._print(f"best model: round {summary['best_round']}, {summary['best_value']:.4f}")
        if self._directory is not None:
            self._print(f"results in {self._directory}")
        if result.last_error is not None:
            first = result.idle_from
            what = ", so nothing was trained" if first == 1 else f" from round {first} on"
            raise RunError(f"no reply was counted{what}; see the warning above")


def _terminate(number: int, frame: object) -> NoReturn:
    raise Terminated


def _chosen(section: BaseModel, *names: str) -> list[str]:
    """Return "name = value" of those that are not at their default."""
    values = section.model_dump(include=set(names), exclude_defaults=True)
    return [f"{name} = {values[name]}" for name in names if name in values]


def hyperparameter_text(rule: Algorithm, plan: Plan, given: Algorithm | None = None) -> str:
    """Return the resolved hyperparameters with their symbols, and the absolute server rate γ.

    `given` is the rule as it was before its open step sizes were resolved.
    """
    values: dict[str, Any] = rule.model_dump()
    if isinstance(given, PAdaMFed):  # resolved, it is part of the step sizes
        values["step_scale"] = given.step_scale if given.step_scale != 1 else None
    parts = []
    for name, info in type(rule).model_fields.items():
        value = values[name]
        if value is None:
            continue  # not chosen, or chosen in every round
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        note = _no_momentum(rule, plan, given) if name == "momentum" else ""
        parts.append(f"{info.title or name} = {text}{note}")
    eta = values.get("client_learning_rate")
    eta_g = values.get("server_learning_rate")
    if eta and eta_g and "first_decay" not in values:  # there η_g is the server optimiser's step
        gamma = eta_g * eta * plan.mean_local_steps
        parts.append(f"γ = η_g·η·K = {gamma:.4g}")
        if rule.name == "padamfed":
            samples, horizon = plan.clients_per_round * plan.mean_local_steps, plan.num_rounds
            parts.append(f"path γ·T = {gamma * horizon:.4g}")
            parts.append(f"S·K = {samples:g} and T^(1/3) = {horizon ** (1 / 3):.3g}")
    return ", ".join(parts)


def _no_momentum(rule: Algorithm, plan: Plan, given: Algorithm | None) -> str:
    """Say that β = 1 means no momentum in these rules, and why they chose it."""
    if not isinstance(rule, PAdaMFed) or rule.momentum != 1:
        return ""
    if not isinstance(given, PAdaMFed) or given.momentum is not None:
        return " (no momentum)"
    samples = plan.clients_per_round * plan.mean_local_steps
    horizon = f"T <= S·K: {plan.num_rounds}"
    if isinstance(rule, PAdaMFedVR):
        horizon = f"T² <= S·K: {plan.num_rounds**2}"
    return f" (no momentum, as {horizon} <= {samples:g})"


def _measured(accuracy: float | None, metric: float | None) -> str:
    if metric is None:
        return ""
    return f"{'accuracy' if metric == accuracy else 'metric'} {metric:.4f}"  # else it is beside it


def on_clients_text(found: Mapping[str, Any]) -> str:
    """Return in a few words what clients found on what they held out."""
    spread, whose = (found["own_spread"], "own ") if found["own_spread"] else (found["spread"], "")
    name = "accuracy" if "accuracy" in spread else next(iter(spread), "")
    if not name:
        return "clients: no value"
    own = spread[name]
    return f"clients' {whose}{name} {own['mean']:.4f}, worst tenth {own['worst']:.4f}"


def _state(record: RoundRecord) -> str:
    parts = []
    if record.train_loss is not None:
        parts.append(f"train loss {record.train_loss:.4f}")
    if record.test_loss is not None:
        parts.append(f"test loss {record.test_loss:.4f}")
    parts.append(_measured(record.test_accuracy, record.test_metric))
    if record.on_clients is not None:
        parts.append(on_clients_text(record.on_clients))
    if failed := record.failures - record.num_late:
        parts.append(f"{failed} failed")
    return "  ".join(part for part in parts if part)

"""One run of an experiment, whatever engine drives it: strategy, files, records."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any, Protocol

from torch import Tensor

from ..algorithm import Algorithm, ClientId, Plan
from ..errors import EndOfRun, FedoptError, FedoptWarning, RunError
from ..flower import FederatedStrategy
from ..flower.open_federation import Ledger, make_ledger
from ..models.weights import plain_state
from ..own_code import described, is_import_path
from ..rounds.record import RoundRecord
from ..rounds.stopping import Stopping
from .checkpoints import Checkpoint
from .directory import CURVES, MODEL, RunDirectory
from .experiment import Experiment
from .needs import (
    require_states,
    require_what_is_asked,
)
from .plots.curves import Trace
from .plots.one_run import draw_run
from .reading import CONFIG, SUMMARY
from .result import Result
from .resuming import require_same, require_same_clients
from .summary import summarize
from .trackers import Trackers
from .worries import worries_of

_HOPELESS = 10  # rounds taken back, without one between that moved, that end a run


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


class Several:
    """Listeners that all hear the same, in their order."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = listeners

    def on_start(self, rule: Algorithm, plan: Plan, experiment: Experiment) -> None:
        for listener in self._listeners:
            listener.on_start(rule, plan, experiment)

    def on_round(self, record: RoundRecord) -> None:
        for listener in self._listeners:
            listener.on_round(record)


class Run:
    """A strategy to give to an engine; every finished round goes to records, files and listener.

    `client_state` returns a client's counted state where this process has it; else checkpoints hold
    the server alone, and clients keep what the last checkpoints count on.
    """

    def __init__(
        self,
        experiment: Experiment,
        listener: Listener,
        checkpoint: Checkpoint | None,
        *,
        while_waiting: Callable[[], None] = lambda: None,
        client_state: Callable[[ClientId, int], Mapping[str, Tensor]] | None = None,
    ) -> None:
        config = experiment.config
        self._experiment = experiment
        self._listener = listener
        self._client_state = client_state
        self._is_telling = False  # what is raised meanwhile is the listener's and no rule's
        self._directory: RunDirectory | None = None
        self._records: list[RoundRecord] = []
        require_what_is_asked(experiment)
        self._stopping = Stopping(config.stop, experiment.metrics)
        self._best = dict(checkpoint.best) if checkpoint else {}  # model, by stop.metric
        # on the test data; round 0 holds it where it is
        self._initial_loss = checkpoint.initial_loss if checkpoint else None
        done = checkpoint.server.round if checkpoint else 0
        self.num_rounds = config.federation.num_rounds - done  # still to do
        self._checkpoint = checkpoint  # that the run continues from
        if checkpoint:
            with self._naming_own_rule():
                require_same(experiment, checkpoint)
        # of the code as it was imported, not as it is when a checkpoint is due
        self._origin = experiment.origin if checkpoint or config.output.checkpoint_every else None
        self.strategy = FederatedStrategy(
            experiment.rule,
            experiment.model,
            config,
            template=experiment.template(),
            evaluate=experiment.evaluate if experiment.data.test is not None else None,
            on_start=self._start,
            on_round=self._take,
            while_waiting=while_waiting,
            in_memory=client_state is not None,
            resume=checkpoint.server if checkpoint else None,
            known=self._known_clients(),
            ledger=self._make_ledger(),
        )

    def _known_clients(self) -> dict[ClientId, int] | None:
        """Return the clients of a run that is resumed, with their numbers of examples; those of
        this process are all here, and `_start` compares them."""
        if self._checkpoint is None or self._client_state is not None:
            return None
        return dict(self._checkpoint.origin.num_examples)

    def _make_ledger(self) -> Ledger | None:
        """Return what an open federation needs where clients are other processes: those of this
        one are all here."""
        config = self._experiment.config
        if not config.federation.is_open or self._client_state is not None:
            return None
        return make_ledger(self._experiment.rule, config.output.directory)

    def _start(self, rule: Algorithm, plan: Plan) -> None:
        if self._checkpoint is not None:
            require_same_clients(plan, self._checkpoint)
        self._is_telling = True
        self._listener.on_start(rule, plan, self._experiment)
        self._is_telling = False
        if self._checkpoint is None and not rule.start_names:
            if self._experiment.data.test is not None:
                self._initial_loss = self._experiment.evaluate(self.strategy.model).loss
            self._save(0)
        losses = [record.test_loss for record in self._records if record.test_loss is not None]
        self.strategy.last_loss = [self._initial_loss, *losses][-1]
        self._stopping.catch_up(self._records)
        if self._best:  # its file may be of a later round, which is done again
            self._write_best()
        if self._stopping.reason:
            raise EndOfRun

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Write the run's files meanwhile, if it has a directory."""
        config = self._experiment.config
        with contextlib.ExitStack() as stack:
            if config.output.directory is not None:
                directory = RunDirectory(config.output.directory)
                stack.callback(directory.close)
                if self._checkpoint is None:
                    directory.open(config.to_dict())
                else:
                    first = 0 if self.strategy.rule.start_names else 1
                    done = range(first, self._checkpoint.server.round + 1)
                    records = directory.reopen(done)
                    self._records += [self._with_lost_loss(record) for record in records]
                self._directory = directory
                next_round = 1 + self._records[-1].round if self._records else 0
                self._trackers = Trackers(
                    config.output.trackers, directory.path, config.to_dict(), next_round
                )
                stack.callback(self._trackers.close)
            stack.enter_context(self._naming_own_rule())
            yield

    def _with_lost_loss(self, record: RoundRecord) -> RoundRecord:
        """Put back a test loss that was not finite, which JSON cannot hold."""
        if record.taken_back:
            return record
        output = self._experiment.config.output
        number = record.round
        last = self._experiment.config.federation.num_rounds
        due = number % output.evaluate_every == 0 or number == last
        if record.test_loss is None and due and self._experiment.data.test is not None:
            record.test_loss = math.nan
        return record

    def _take(self, record: RoundRecord) -> None:
        self._records.append(record)
        if self._checkpoint and record.round == self._checkpoint.server.round + 1:
            require_states(record, is_open=self._experiment.config.federation.is_open)
        if self._directory is not None:
            self._directory.add(record)
            self._trackers.add(record)
        if self._stopping.hear(record):
            self._keep_best()
        if self._directory is not None:
            self._save(record.round)
        self._is_telling = True
        self._listener.on_round(record)
        self._is_telling = False
        idle = takewhile(lambda record: not record.clients, reversed(self._records))
        if sum(record.taken_back for record in idle) >= _HOPELESS or self._stopping.reason:
            raise EndOfRun

    def _keep_best(self) -> None:
        self.strategy.write_to_model()
        state = plain_state(self.strategy.model.module)
        self._best = {name: value.detach().to("cpu", copy=True) for name, value in state.items()}
        self._write_best()

    def _write_best(self) -> None:
        if self._directory is not None:
            self._directory.write_best(self._best, self._stopping.best_round or 0)

    def _save(self, number: int) -> None:
        """Write a checkpoint where one is due; round 0 is the start, with or without a pass."""
        output = self._experiment.config.output
        every = output.checkpoint_every
        if self._directory is not None and every and number % every == 0:
            self._directory.write_checkpoint(self._new_checkpoint(), output.keep)
            if self._client_state is None:
                self.strategy.confirm_checkpoint()

    @contextlib.contextmanager
    def _naming_own_rule(self) -> Iterator[None]:
        """Say in a line what a user's own rule raised, and where."""
        name = self._experiment.config.algorithm.name
        try:
            yield
        except FedoptError:
            raise
        except Exception as error:
            if not is_import_path(name) or self._is_telling:
                raise
            raise RunError(f"algorithm.name: {name!r} failed: {described(error)}") from error

    def _new_checkpoint(self) -> Checkpoint:
        server = self.strategy.snapshot()
        experiment = self._experiment
        config = experiment.config
        has_state = bool(
            experiment.has_local_buffers
            or experiment.model.local
            or self.strategy.rule.init_client(1)
        )
        states: dict[ClientId, Mapping[str, Tensor]] = {}
        if has_state and self._client_state is not None:
            states = {i: self._client_state(i, version) for i, version in server.versions.items()}
        num_examples = list(self.strategy.state.plan.num_examples.items())
        return Checkpoint(
            server,
            states,
            has_state and self._client_state is None,
            self._initial_loss,
            replace(self._origin or experiment.origin, num_examples=num_examples),
            str(config.import_folders[0]),
            config.to_dict(),
            self._best,
        )

    def finish(self) -> Result:
        """Write summary, model and curves, and return the result."""
        strategy = self.strategy
        strategy.write_to_model()
        model = strategy.model
        vector = model.vector.detach().cpu().numpy().copy()
        summary = {
            "algorithm": strategy.rule.name,
            "hyperparameters": strategy.rule.model_dump(),
            "model_parameters": model.size,
            **summarize(
                self._records,
                model.vector.nbytes,
                self._initial_loss,
                self._experiment.config.output.link_mbps,
                self._experiment.config.output.client_seconds,
            ),
        }
        if (warm_up := self._warm_up_rounds()) is not None:
            summary["warmup_rounds"] = warm_up
        summary |= self._stopping.summary() | self._final_evaluation()
        before = self._checkpoint.server.round if self._checkpoint else 0
        result = Result(
            parameters=vector,
            model=model.module,
            rounds=self._records,
            summary=summary,
            rounds_before=before,
            best=self._best or None,
        )
        if self._directory is not None:
            self._write_results(self._directory, result)
        for text in worries_of(result):
            warnings.warn(text, FedoptWarning, stacklevel=2)
        return result

    def _warm_up_rounds(self) -> int | None:
        """Return how many rounds all clients took part in before `clustered` grouped them."""
        federation = self._experiment.config.federation
        if federation.sampler != "clustered":
            return None
        rounds = [record for record in self._records if record.round]
        number = len(self.strategy.state.plan.num_examples)
        everyone = takewhile(lambda r: r.num_asked == number, rounds)
        return len(list(everyone))

    def _final_evaluation(self) -> dict[str, Any]:
        """Evaluate the model that is left when the last round was taken back, or ended the run
        between two evaluations."""
        last = self._records[-1] if self._records else None
        is_known = last is None or not (
            last.taken_back or (self._stopping.reason and last.test_loss is None)
        )
        if is_known or self._experiment.data.test is None:
            return {}
        found = self._experiment.evaluate(self.strategy.model)
        accuracies = [found.accuracy, *(record.test_accuracy for record in self._records)]
        known = [value for value in accuracies if value is not None]
        return {
            "best_test_accuracy": max(known, default=None),
            "final_test_loss": found.loss,
            "final_test_metric": found.main,
            "final_test_accuracy": found.accuracy,
            "final_test_metrics": found.known,
        }

    def _write_results(self, directory: RunDirectory, result: Result) -> None:
        config = self._experiment.config
        name = self.strategy.rule.name
        directory.write_results(result.summary, result.model)
        trace = Trace(self._records, result.summary["diverged_at"])
        try:
            draw_run(name, trace, config, directory.path / CURVES)
        except Exception as error:  # all that counts is written
            text = f"{CURVES}: not drawn: {described(error)}"
            warnings.warn(text, FedoptWarning, stacklevel=2)
        files = [directory.path / own for own in (CURVES, MODEL, SUMMARY, CONFIG)]
        self._trackers.close(files, is_done=True)

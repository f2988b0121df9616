"""The server half: a Flower Strategy that samples, instructs, checks, aggregates and evaluates."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from flwr.common import EvaluateIns, EvaluateRes, FitIns, FitRes, Parameters, ndarrays_to_parameters
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import Strategy
from torch import Tensor

from ..algorithm import Algorithm, ClientId, Plan, Reply, ServerState
from ..config.run_config import RunConfig
from ..errors import RunError
from ..rounds.participation import Participation, make_plan, warn_of_one_weight
from ..rounds.record import (
    AFTERWARDS,
    NOT_COUNTED,
    NOT_FINITE,
    TOO_LATE,
    RoundRecord,
    Snapshot,
    Upload,
)
from ..rounds.sampling import sorted_ids
from ..rounds.schedules import changed_numbers, scheduled, warn_of_idle_schedule
from ..rounds.soundness import Before, refuse_above, refuse_spoilt, spoilt, take_back
from ..training.evaluation import Evaluation
from ..training.flat_model import FlatModel, average_buffers, is_buffer_name
from .diagnostics import Diagnostics
from .evaluations import record_evaluations
from .instruction import Instruction
from .members import Members
from .messages import (
    NEVER,
    ArraysInMemory,
    Phase,
    Scalar,
    encode,
    encoded_bytes,
    expected_arrays,
    to_arrays,
)
from .open_federation import Ledger, OpenFederation, warn_of_theory
from .replies import Fit, accept, by_client
from .threads import on_fixed_threads
from .wrappers import refuse_privacy_wrappers


class FederatedStrategy(Strategy):
    """Runs any rule in Flower's server loop.

    `model` gives the layout and the initial point, and is what `evaluate` is called with, holding
    the server's vector and buffers. `template` is the part of an instruction that stays the same in
    every round. `on_start` hears the resolved rule and the plan, `on_round` every finished record;
    `while_waiting` is called while clients are missing and may raise to give up. With `in_memory`
    arrays go to clients of this process as they are. `known` are the run's clients and their
    numbers of examples, where it is resumed and they may come one by one. With a `ledger` clients
    of an open federation may come and leave.
    """

    def __init__(
        self,
        rule: Algorithm,
        model: FlatModel,
        config: RunConfig,
        *,
        template: Instruction,
        evaluate: Callable[[FlatModel], Evaluation] | None = None,
        on_start: Callable[[Algorithm, Plan], None] = lambda rule, plan: None,
        on_round: Callable[[RoundRecord], None] = lambda record: None,
        while_waiting: Callable[[], None] = lambda: None,
        in_memory: bool = False,
        resume: Snapshot | None = None,
        known: Mapping[ClientId, int] | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.rule = rule
        self._rule_of_round = rule  # with the step sizes of the current round
        self.model = model
        self._config = config
        self._template = template.model_copy(update={"run": resume.run}) if resume else template
        self._evaluate = evaluate
        self._on_start = on_start
        self._on_round = on_round
        self._in_memory = in_memory
        self._resume = resume
        self.members = Members(config, while_waiting, known or {})
        self._known = dict(known or {})
        self._ledger = ledger
        seen = resume.seen if resume else {}
        is_open = config.federation.is_open
        self._open = OpenFederation(config.federation, seen) if is_open else None
        self._buffers: dict[str, Tensor] = dict(resume.buffers if resume else {})
        self._averages_buffers = config.federation.buffers == "average" and model.has_buffers
        self.versions: dict[ClientId, int] = dict(resume.versions if resume else {})
        # that the last checkpoints count on, the oldest of them first
        before = [*resume.earlier, resume.versions] if resume else []
        self._kept_versions = deque(before, maxlen=config.output.keep)
        self.asked: list[ClientId] = []  # in the current round
        self._rounds_before = resume.round if resume else 0
        self.record = RoundRecord(self._rounds_before)
        self._started = 0.0
        self.evaluated_since: float | None = None  # where a subclass began before `evaluate`
        self.last_loss: float | None = None  # of the last evaluation on the test data
        self._before: Before | None = None  # the current round, until its evaluation is over
        self._diagnostics: Diagnostics | None = None
        if config.output.diagnostics:
            kept = resume.diagnosed if resume else {}
            self._diagnostics = Diagnostics(config.training.weight_decay, kept)
        self.state: ServerState
        self._participation: Participation

    @property
    def quota(self) -> int | None:
        """How many replies close a round, where more clients are asked."""
        federation = self._config.federation
        return None if federation.over_sample == 1 else federation.clients_per_round

    def set_max_workers(self, number: int) -> None:
        """Ask at most so many clients at the same time outside of Flower's loop."""
        self.members.max_workers = number

    def confirm_checkpoint(self) -> None:
        """Let clients drop the states on which only the checkpoint counts that this one pushed
        out of the last `output.keep`."""
        self._kept_versions.append(dict(self.versions))
        self._tidy()

    def _tidy(self) -> None:
        """Let the ledger drop what neither the current state nor a checkpoint counts on."""
        if self._ledger is not None:
            counted = [self.versions, *self._kept_versions]
            self._ledger.keep_only({pair for versions in counted for pair in versions.items()})

    def _kept(self, client_id: ClientId) -> list[int]:
        """Versions of a client's state on which checkpoints count, the oldest first."""
        return [versions.get(client_id, NEVER) for versions in self._kept_versions]

    def extra_config(self, round_number: int) -> dict[str, Scalar]:
        """Return what clients find in their config beside the instruction; for subclasses."""
        return {}

    def announcement(self) -> Instruction:
        """Return what tells a client, before it joins, which rule and model the run has."""
        own = {"algorithm": self.rule.name, "hyperparameters": self.rule.model_dump_json()}
        return self._template.model_copy(update=own)

    def snapshot(self) -> Snapshot:
        """Return what a checkpoint must hold of the server."""
        return Snapshot(
            run=self._template.run,
            round=self.record.round,
            vectors=self.state.vectors,
            buffers=self._buffers,
            versions=dict(self.versions),
            earlier=list(self._kept_versions),
            seen=self._open.seen if self._open else {},
            first=self._first if self._open else {},
            diagnosed=self._diagnostics.kept if self._diagnostics else {},
        )

    @on_fixed_threads
    def initialize_parameters(self, client_manager: ClientManager) -> Parameters:
        """Find all clients, fix the plan, run the start pass; called once, before round 1."""
        refuse_privacy_wrappers()
        if not self.members.ids or self._rounds_before < self._config.federation.num_rounds:
            lately = self._open.present(self.members.ids) if self._open else self.members.ids
            self.members.discover(client_manager, lately)  # else a run lacks its results alone
        # those of a run that is resumed are what it counted on: others count from a round on
        sizes = {i: self.members.num_examples[i] for i in self.members.ids} | self._known
        plan = make_plan(self.rule, self._config, sizes)
        warn_of_one_weight(plan)
        warn_of_idle_schedule(self.rule, self._config.schedule)
        if self._open is not None:
            warn_of_theory(self.rule)
        self._first = dict((self._resume and self._resume.first) or sizes)
        self.rule = self.rule.resolve(make_plan(self.rule, self._config, self._first))
        self._rule_of_round = self.rule
        self._participation = Participation(self.rule, self._config.federation, plan)
        if self._resume:
            self.state = ServerState(plan, dict(self._resume.vectors))
            self._tidy()
        else:
            self.state = self.rule.init_server(self.model.vector.detach().cpu().clone(), plan)
            self._buffers = {name: array.cpu() for name, array in self.model.read_buffers().items()}
        self._on_start(self.rule, plan)
        if self.rule.start_names and not self._resume:
            self._start_pass(client_manager)
        return self._flower_parameters()

    def _start_pass(self, client_manager: ClientManager) -> None:
        """Round 0: every client, and once more those that failed; the rest count with zero."""
        self._begin_round(0)
        uploads: dict[ClientId, Upload] = {}
        for _ in range(2):
            missing = [i for i in self._participation.choose_all() if i not in uploads]
            if not missing:
                break
            self.record.errors.clear()
            self.members.refresh(client_manager)  # some may have come back on a new connection
            uploads |= self._ask_now("start", missing, self.rule.start_names)
        if not uploads:
            error = "client {client}: {error}".format(**self.record.errors[0])
            raise RunError(f"round 0: no client finished the start pass; {error}")
        self._replied = time.perf_counter()
        self.asked = list(self.members.ids)
        self._begin_terms(uploads, 0)
        state = self.rule.server_start(self.state, self._participation.weigh(uploads))
        self._move(state, self._buffers, uploads)

    def _begin_terms(self, uploads: Mapping[ClientId, Upload], number: int) -> None:
        if self._ledger is not None:
            for client_id, upload in uploads.items():
                self._ledger.begin(client_id, number, upload)

    def _move_terms(self, replies: Sequence[Reply]) -> None:
        if self._ledger is not None:
            for r in replies:
                i, version = r.client_id, self.versions.get(r.client_id, NEVER)
                changes = self._rule_of_round.client_changes(self.state, r)
                kept = {version, *self._kept(i)}
                self._ledger.add(changes, self.state, i, version, self.record.round, kept)

    def _renew_members(self) -> None:
        """Before a round of an open federation: take in who came, let go who is gone, and form the
        means anew if anything changed. A new client's start pass is of the round before."""
        if self._open is None:
            return
        number, before = self.record.round, self.state.plan
        self.record.members = changes = self._open.changes(number, self.members, before)
        if not changes:
            return
        gone, new = changes.get("forgotten", []), changes.get("joined", [])
        anew = changes.get("restarted", [])
        self.versions = {i: v for i, v in self.versions.items() if i not in {*gone, *anew}}
        self.members.ids = sorted_ids([*({*before.num_examples} - {*gone}), *new])
        here = {i: self.members.num_examples[i] for i in self.members.here}
        told = dict(before.num_examples) | here
        plan = make_plan(self.rule, self._config, {i: told[i] for i in self.members.ids})
        warn_of_one_weight(plan)
        self._participation.renew(plan)
        self.state = self._open.renewed(self.state, plan)
        if self._ledger is None:
            return
        if self.rule.start_names:
            self._rule_of_round = self.rule
            uploads = self._ask_now("start", [*new, *anew], self.rule.start_names, number - 1)
            uploads = refuse_spoilt(uploads, self.record)
            self._begin_terms(uploads, number - 1)
            self.versions |= dict.fromkeys(uploads, number - 1)
        self.state = self.state.replace(**self._ledger.means(self.state, self.versions))
        self._tidy()

    def _ask_now(
        self,
        phase: Phase,
        ids: Sequence[ClientId],
        names: tuple[str, ...],
        number: int | None = None,
    ) -> dict[ClientId, Upload]:
        """Ask these clients outside of Flower's loop, all at once, and return what is usable; the
        round is the current one unless another is given."""
        self.asked = list(ids)
        vectors = {"model": self.state["model"]}
        answers = self.members.ask(self._instruct(phase, ids, vectors, number))
        return self._usable(answers, dict.fromkeys(ids, names), self.record, phase, number)

    def _usable(
        self,
        answers: Mapping[ClientId, FitRes | Exception | str],
        wanted: Mapping[ClientId, tuple[str, ...]],
        record: RoundRecord,
        phase: Phase,
        number: int | None = None,
    ) -> dict[ClientId, Upload]:
        """Return the uploads that hold what is `wanted` of each client asked, by name; why others
        do not count is noted in the record."""
        trains = phase == "train"
        average = self._averages_buffers and trains
        layouts = {
            names: expected_arrays(names, self.model, with_buffers=average)
            for names in {*wanted.values()}
        }
        expected = {i: layouts[names] for i, names in wanted.items()}
        steps = self.state.plan.local_steps if trains else None
        asked_for = self._asked_for(phase, number)
        uploads = accept(list(wanted), answers, expected, record, asked_for, steps)
        return refuse_above(self._config.federation.max_reply_norm, uploads, record, phase)

    @on_fixed_threads
    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        self._begin_round(server_round + self._rounds_before)
        self.members.gather(client_manager, "min_replies")
        self.members.await_free(client_manager, self._config.federation.min_replies)
        self._renew_members()
        number = self.record.round
        rule = self.rule.at_round(self.state, number)
        num_rounds = self._config.federation.num_rounds
        self._rule_of_round = scheduled(rule, self._config.schedule, number, num_rounds)
        if self._participation.needs_clusters(self.state, number):
            gradients = self._ask_now("gradient", self._participation.choose_all(), ("gradient",))
            rows = {i: upload.arrays["gradient"] for i, upload in gradients.items()}
            self.state = self._participation.group(self.state, rows)
        self.record.chosen = changed_numbers(self.rule, self._rule_of_round)
        self.record.chosen |= self.rule.report(self.state, number)
        ids = self._participation.choose(self.state, number, self.members.is_free)
        self.asked = list(ids)
        return self._instruct("train", ids, self._rule_of_round.broadcast(self.state))

    def _instruct(
        self,
        phase: Phase,
        ids: Sequence[ClientId],
        arrays: dict[str, Tensor],
        number: int | None = None,
    ) -> list[tuple[ClientProxy, FitIns]]:
        if self._averages_buffers and arrays:
            arrays = {**arrays, **self._buffers}
        names, parameters = encode(arrays, in_memory=self._in_memory)
        self.record.downlink_bytes += len(ids) * encoded_bytes(to_arrays(parameters))
        self.record.downlink_vectors += len(ids) * sum(not is_buffer_name(n) for n in arrays)
        changes: dict[str, Scalar] = {
            "phase": phase,
            "round": self.record.round if number is None else number,
            "algorithm": self.rule.name,
            "arrays": names,
        }
        if phase == "start" and self.rule.start_batches is not None:
            changes |= {"local_steps": self.rule.start_batches, "local_epochs": 0}
        beside = {} if phase in AFTERWARDS else self.extra_config(self.record.round)
        instructions = []
        for client_id in ids:
            version = self.versions.get(client_id, NEVER)
            kept = self._kept(client_id)
            # who is asked afterwards may have no place in the round
            rule = self._rule_of_round if phase in AFTERWARDS else self._rule_of(client_id)
            own = changes | {
                "hyperparameters": rule.model_dump_json(),
                "state_version": version,
                "oldest_version": kept[0] if kept else version,
                "middle_versions": ",".join(map(str, dict.fromkeys(kept[1:]))),
            }
            proxy = self.members.connected(client_id)
            if proxy is not None:
                own |= self._open.notice(client_id) if self._open else {}
                instruction = self._template.model_copy(update=own)
                instructions.append(
                    (proxy, FitIns(parameters, {**beside, **instruction.to_config()}))
                )
        return instructions

    @on_fixed_threads
    def aggregate_fit(
        self, server_round: int, results: list[Fit], failures: list[Fit | BaseException]
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        self._replied = time.perf_counter()
        wanted = {i: self._rule_of(i).upload_names for i in self.asked}
        missing = "no answer" if self.quota is None else TOO_LATE
        answers = by_client(self.asked, results, failures, self.members.id_of, missing)
        uploads = self._usable(answers, wanted, self.record, "train")
        for i in self._participation.surplus(uploads):
            del uploads[i]
            self.record.errors.append({"client": i, "phase": "train", "error": TOO_LATE})
        needed = self._config.federation.min_replies
        if len(uploads) < needed:
            why = f"{NOT_COUNTED}{len(uploads)} replies, federation.min_replies is {needed}"
            self.record.errors += [{"client": i, "phase": "train", "error": why} for i in uploads]
            self._finish_round({})
            return self._flower_parameters(), {}
        replies = self._participation.weigh(uploads)
        self._move_terms(replies)
        state = self._rule_of_round.server_update(self.state, replies)
        buffers = self._buffers
        if self._averages_buffers:
            total = sum(r.weight for r in replies)
            own = [{n: a for n, a in r.upload.items() if is_buffer_name(n)} for r in replies]
            weights = [r.weight / total for r in replies]
            buffers = average_buffers(list(zip(weights, own, strict=True)))
        self._move(state, buffers, uploads)
        return self._flower_parameters(), {}

    def would_count(self, proxy: ClientProxy, answer: FitRes) -> bool:
        """Whether a reply of this round is of use, whatever else comes."""
        i, record = self.members.id_of(proxy), RoundRecord(self.record.round)
        wanted = {i: self._rule_of(i).upload_names}
        return bool(self._usable({i: answer}, wanted, record, "train"))

    def _move(
        self, state: ServerState, buffers: dict[str, Tensor], uploads: Mapping[ClientId, Upload]
    ) -> None:
        """End a round with what its replies make of the server's state, if that is finite."""
        self._before = before = Before(self.state, self._buffers, self.versions, uploads)
        self.state = state
        self._buffers = buffers
        self._finish_round(uploads)
        name = spoilt({**state.vectors, **buffers}, {**before.state.vectors, **before.buffers})
        if name is not None:
            why = f"the server's {name!r} would be {NOT_FINITE}, or too large"
            self._take_back(before, why)

    def _take_back(self, before: Before, why: str) -> None:
        """Undo the round: its replies do not count, neither here nor for the clients' states."""
        self._before = None
        self.state, self._buffers, self.versions, uploads = before
        if self.record.round:
            self.state = self._rule_of_round.taken_back(self.state)
        self.write_to_model()
        take_back(self.record, uploads, len(self.asked), why)

    def _asked_for(self, phase: Phase, number: int | None = None) -> dict[str, Scalar]:
        number = self.record.round if number is None else number
        return {"run": self._template.run, "round": number, "phase": phase}

    def _rule_of(self, client_id: ClientId) -> Algorithm:
        return self._rule_of_round.for_client(self._participation.rank(client_id))

    def _begin_round(self, number: int) -> None:
        if self._open is not None:
            self._open.hear(self.record)
        self.record = RoundRecord(number)
        self._started = time.perf_counter()

    def _finish_round(self, counted: Mapping[ClientId, Upload]) -> None:
        self.versions = self.versions | dict.fromkeys(counted, self.record.round)
        self.record.count(self.asked, counted, self.state.plan.num_examples)
        now = time.perf_counter()
        self.record.seconds = now - self._started
        self.record.aggregation_seconds = now - self._replied

    def write_to_model(self) -> None:
        """Put the server's vector and buffers into `model`, which clients may have trained on."""
        self.model.vector.copy_(self.state["model"])
        self.model.reset_local()
        if self._buffers:
            self.model.write_buffers(self._buffers)

    def _flower_parameters(self) -> Parameters:
        """The whole state_dict, for Flower's loop and a user's functions."""
        if self._in_memory:  # where nobody reads them
            return ArraysInMemory([])
        self.write_to_model()
        return ndarrays_to_parameters(self.model.state_arrays())

    def evaluate(
        self, server_round: int, parameters: Parameters
    ) -> tuple[float, dict[str, Scalar]] | None:
        """Evaluate the server's model where that is due, and publish the round's record.

        A loss that is not finite, after one that was, takes the round back.
        """
        started = self.evaluated_since or time.perf_counter()
        record = self.record
        before = self._before
        is_round = server_round > 0 or (bool(self.rule.start_names) and not self._resume)
        metrics = self._measure() if is_round else {}
        loss = record.test_loss
        if loss is not None:
            was_finite = self.last_loss is not None and math.isfinite(self.last_loss)
            if before is not None and was_finite and not math.isfinite(loss):
                self._take_back(before, f"the test loss would be {loss}, {NOT_FINITE}")
            else:
                self.last_loss = loss
        self._before = None
        if is_round:
            self._evaluate_on_clients()
            self._diagnose(before)
            record.evaluation_seconds = time.perf_counter() - started
            self._on_round(record)
        return None if record.test_loss is None else (record.test_loss, metrics)

    def _measure(self) -> dict[str, Scalar]:
        """Note test loss and metrics of the round if they are due; return the metrics by name."""
        record = self.record
        if not self._is_due(self._config.output.evaluate_every):
            return {}
        self.write_to_model()
        if self._evaluate is None:
            return {}
        evaluation = self._evaluate(self.model)
        record.test_loss = evaluation.loss
        record.test_metric = evaluation.main
        record.test_accuracy = evaluation.accuracy
        record.test_metrics = evaluation.known
        return dict(evaluation.known)

    def _is_due(self, every: int) -> bool:
        """Whether what is measured every so many rounds, and in the last one, is measured now."""
        record = self.record
        is_last = record.round == self._config.federation.num_rounds
        return (is_last or record.round % every == 0) and not record.taken_back

    def _evaluate_on_clients(self) -> None:
        """Have clients evaluate the model on what they held out, where that is due."""
        section, record = self._config.evaluation, self.record
        every = section.every or self._config.output.evaluate_every
        if not (section.on_clients and self._is_due(every)):
            return
        count = None if section.clients == "all" else section.clients
        ids = self._participation.evaluators(record.round, count, self.members.is_free)
        instructions = self._instruct("evaluate", ids, {"model": self.state["model"]})
        answers = self.members.ask(instructions)
        most = self._config.limits.examples
        record_evaluations(ids, answers, self._asked_for("evaluate"), record, most)

    def _diagnose(self, before: Before | None) -> None:
        """Note what the round did, if anything, and what the server's state is now; where that is
        due ask all clients for their parts of f and ∇f."""
        diagnostics, record = self._diagnostics, self.record
        if diagnostics is None:
            return
        diagnostics.note_state(record, self.rule, self.state, self.versions)
        if before is not None and record.clients:
            replies = self._participation.weigh(before.uploads)
            diagnostics.note_movement(record, before.state, self.state, replies)
        if self._is_due(self._config.output.evaluate_every):
            diagnostics.measure(
                record,
                self.state,
                self.members.is_free,
                lambda ids: self.members.ask(
                    self._instruct("diagnose", ids, {"model": self.state["model"]})
                ),
                self._asked_for("diagnose"),
            )

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        return []  # the server evaluates on its own test data

    def aggregate_evaluate(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, EvaluateRes]],
        failures: list[tuple[ClientProxy, EvaluateRes] | BaseException],
    ) -> tuple[float | None, dict[str, Scalar]]:
        return None, {}

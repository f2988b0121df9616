"""The server half: a Flower Strategy that samples, instructs, checks, aggregates and evaluates."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from flwr.common import EvaluateIns, EvaluateRes, FitIns, FitRes, Parameters, ndarrays_to_parameters
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import Strategy
from torch import Tensor

from ..algorithm import Algorithm, ClientId, Plan, Reply, ServerState
from ..config import FederationSection, TrainingSection
from ..errors import RunError
from ..metrics import RoundRecord
from ..objectives import Evaluation, num_steps
from ..outputs import Snapshot
from ..sampling import importances, sample_uniform
from ..vectors import FlatModel, average_buffers, is_buffer_name
from .client import expected_arrays
from .members import Members, ask_all
from .messages import (
    IN_MEMORY,
    NEVER,
    Instruction,
    Phase,
    Scalar,
    encode,
    encoded_bytes,
    to_arrays,
)
from .replies import Upload, accept, close, weigh
from .wrappers import refuse_privacy_wrappers

Fit = tuple[ClientProxy, FitRes]


class FederatedStrategy(Strategy):
    """Runs any rule of this package in Flower's server loop.

    `model` gives the layout and the initial point, and is what `evaluate` is called with, holding
    the server's vector and buffers. `on_start` hears the resolved rule and the plan, `on_round`
    every finished record. `template` is what clients are told in every round. With `in_memory`
    arrays go to clients of this process as they are.
    """

    def __init__(
        self,
        rule: Algorithm,
        model: FlatModel,
        federation: FederationSection,
        training: TrainingSection,
        *,
        template: Instruction,
        evaluate: Callable[[FlatModel], Evaluation] | None = None,
        evaluate_every: int = 1,
        on_start: Callable[[Algorithm, Plan], None] = lambda rule, plan: None,
        on_round: Callable[[RoundRecord], None] = lambda record: None,
        in_memory: bool = False,
        resume: Snapshot | None = None,
    ) -> None:
        self.rule, self.model = rule, model
        self._federation, self._training = federation, training
        self._template = replace(template, run=resume.run) if resume else template
        self._evaluate, self._evaluate_every = evaluate, evaluate_every
        self._on_start, self.on_round = on_start, on_round
        self._in_memory, self._resume = in_memory, resume
        self.members = Members({"num_clients": federation.num_clients, "seed": federation.seed})
        self._buffers: dict[str, Tensor] = dict(resume.buffers if resume else {})
        self._averages_buffers = federation.buffers == "average" and model.has_buffers
        self.versions: dict[ClientId, int] = dict(resume.versions if resume else {})
        self.durable_versions: dict[ClientId, int] = dict(self.versions)  # of the last checkpoint
        self.asked: list[ClientId] = []  # in the current round
        self._rounds_before = resume.round if resume else 0
        self.record = RoundRecord(self._rounds_before)
        self._started = 0.0
        self.extra_config: Callable[[int], dict[str, Scalar]] = lambda server_round: {}
        self.state: ServerState

    def snapshot(self) -> Snapshot:
        """Return what a checkpoint must hold of the server."""
        return Snapshot(
            self._template.run,
            self.record.round,
            self.state.vectors,
            self._buffers,
            dict(self.versions),
        )

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters:
        """Find all clients, fix the plan, run the start pass; called once, before round 1."""
        refuse_privacy_wrappers()
        federation = self._federation
        self.members.discover(client_manager, federation.num_clients, federation.start_timeout)
        plan = self._make_plan()
        self.rule = self.rule.resolve(plan)
        self._on_start(self.rule, plan)
        if self._resume:
            self.state = ServerState(plan, dict(self._resume.vectors))
            return self._flower_parameters()
        self.state = self.rule.init_server(self.model.vector.detach().cpu().clone(), plan)
        self._buffers = {name: array.cpu() for name, array in self.model.read_buffers().items()}
        if self.rule.start_names:
            self._start_pass(client_manager)
        return self._flower_parameters()

    def _make_plan(self) -> Plan:
        federation, training = self._federation, self._training
        sizes = {i: self.members.num_examples[i] for i in self.members.ids}
        steps = {
            i: num_steps(n, training.batch_size, training.local_steps, training.local_epochs)
            for i, n in sizes.items()
        }
        return Plan(
            num_clients=federation.num_clients,
            clients_per_round=federation.clients_per_round,
            num_rounds=federation.num_rounds,
            num_examples=sizes,
            local_steps=steps,
            importance=importances(sizes, federation.weighting),
        )

    def _start_pass(self, client_manager: ClientManager) -> None:
        """Round 0: every client, and once more those that failed; the rest count with zero."""
        self._begin_round(0)
        expected = expected_arrays(self.rule.start_names, self.model, with_buffers=False)
        uploads: dict[ClientId, Upload] = {}
        for _ in range(2):
            missing = [i for i in self.members.ids if i not in uploads]
            if not missing:
                break
            self.record.errors.clear()
            self.members.refresh(client_manager)  # some may have come back on a new connection
            instructions = self._instruct("start", missing, {"model": self.state["model"]})
            answers = self._ask_for_start(instructions)
            uploads |= accept(missing, answers, expected, self.record)
        if not uploads:
            raise RunError(f"round 0: no client finished the start pass: {self.record.errors[0]}")
        replies = weigh(uploads, self.members.ids, self.state.plan)
        self.state = self.rule.server_start(self.state, replies)
        self.asked = list(self.members.ids)
        self._finish_round(uploads)

    def _ask_for_start(
        self, instructions: Sequence[tuple[ClientProxy, FitIns]]
    ) -> dict[ClientId, FitRes | str]:
        by_cid = {proxy.cid: ins for proxy, ins in instructions}
        answers = ask_all(
            [(proxy.cid, proxy) for proxy, _ in instructions],
            lambda proxy: proxy.fit(by_cid[proxy.cid], self._federation.round_timeout, 0),
            self.members.max_workers,
        )
        return {
            self.members.id_of(proxy): str(answer) if isinstance(answer, Exception) else answer
            for proxy, _ in instructions
            for answer in [answers[proxy.cid]]
        }

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        self._begin_round(server_round + self._rounds_before)
        needed, patience = self._federation.min_replies, self._federation.start_timeout
        self.members.gather(client_manager, needed, patience, "federation.min_replies")
        order = sample_uniform(self.members.ids, self._federation.seed, self.record.round)
        present = [i for i in order if self.members.connected(i) is not None]
        chosen = set(present[: self._federation.clients_per_round])
        ids = [i for i in self.members.ids if i in chosen]
        return self._instruct("train", ids, self.rule.broadcast(self.state))

    def _instruct(
        self, phase: Phase, ids: Sequence[ClientId], arrays: dict[str, Tensor]
    ) -> list[tuple[ClientProxy, FitIns]]:
        self.asked = list(ids)
        if self._averages_buffers:
            arrays = {**arrays, **self._buffers}
        names, parameters = encode(arrays, in_memory=self._in_memory)
        self.record.downlink_bytes += len(ids) * encoded_bytes(to_arrays(parameters))
        self.record.downlink_vectors += len(ids) * sum(not is_buffer_name(n) for n in arrays)
        instruction = replace(
            self._template,
            phase=phase,
            round=self.record.round,
            algorithm=self.rule.name,
            hyperparameters=self.rule.model_dump_json(),
            arrays=names,
        )
        beside = self.extra_config(self.record.round)
        instructions = []
        for client_id in ids:
            version = self.versions.get(client_id, NEVER)
            durable = self.durable_versions.get(client_id, version)
            told = replace(instruction, state_version=version, oldest_version=durable).to_config()
            proxy = self.members.connected(client_id)
            if proxy is not None:
                instructions.append((proxy, FitIns(parameters, {**beside, **told})))
        return instructions

    def aggregate_fit(
        self, server_round: int, results: list[Fit], failures: list[Fit | BaseException]
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        names = self.rule.upload_names
        expected = expected_arrays(names, self.model, with_buffers=self._averages_buffers)
        uploads = accept(self.asked, self._answers(results, failures), expected, self.record)
        needed = self._federation.min_replies
        if len(uploads) < needed:
            reason = f"not counted: {len(uploads)} replies, federation.min_replies is {needed}"
            self.record.errors += [{"client": i, "error": reason} for i in uploads]
            self._finish_round({})
            return None, {}
        replies = weigh(uploads, self.members.ids, self.state.plan)
        self.state = self.rule.server_update(self.state, replies)
        if self._averages_buffers:
            self._buffers = average_buffers([(r.weight, _buffers(r)) for r in replies])
        self._finish_round(uploads)
        return self._flower_parameters(), {}

    def _answers(
        self, results: Sequence[Fit], failures: Sequence[Fit | BaseException]
    ) -> dict[ClientId, FitRes | str]:
        """Key answers by client id. Flower's exceptions carry no id, so all share their texts."""
        unnamed = "; ".join(sorted({str(f) for f in failures if isinstance(f, BaseException)}))
        answers: dict[ClientId, FitRes | str] = dict.fromkeys(self.asked, unnamed or "no answer")
        for failure in failures:
            if not isinstance(failure, BaseException):
                answers[self.members.id_of(failure[0])] = failure[1].status.message
        return answers | {self.members.id_of(proxy): result for proxy, result in results}

    def _begin_round(self, number: int) -> None:
        self.record = RoundRecord(number)
        self._started = time.perf_counter()

    def _finish_round(self, counted: Mapping[ClientId, Upload]) -> None:
        for client_id in counted:
            self.versions[client_id] = self.record.round
        close(self.record, self.asked, counted, self.state.plan.num_examples)
        self.record.seconds = time.perf_counter() - self._started

    def load_model(self) -> None:
        """Put the server's vector and buffers into `model`, which clients may have trained on."""
        self.model.vector.copy_(self.state["model"])
        if self._buffers:
            self.model.write_buffers(self._buffers)

    def _flower_parameters(self) -> Parameters:
        """The whole state_dict, for Flower's loop and a user's functions."""
        self.load_model()
        arrays = self.model.state_arrays()
        if self._in_memory:
            return Parameters(tensors=arrays, tensor_type=IN_MEMORY)  # type: ignore[arg-type]
        return ndarrays_to_parameters(arrays)

    def evaluate(
        self, server_round: int, parameters: Parameters
    ) -> tuple[float, dict[str, Scalar]] | None:
        """Evaluate the server's model where that is due, and publish the round's record."""
        record = self.record
        last = record.round == self._federation.num_rounds
        due = last or record.round % self._evaluate_every == 0
        if server_round == 0 and (self._resume or not self.rule.start_names):
            return None
        evaluation = None
        if self._evaluate and due:
            self.load_model()
            evaluation = self._evaluate(self.model)
        if evaluation is not None:
            record.test_loss, record.test_metric = evaluation.loss, evaluation.metric
            if evaluation.metric_name == "accuracy":
                record.test_accuracy = evaluation.metric
        self.on_round(record)
        if evaluation is None:
            return None
        metric = evaluation.metric
        return evaluation.loss, {} if metric is None else {evaluation.metric_name: metric}

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


def _buffers(reply: Reply) -> dict[str, Tensor]:
    return {name: array for name, array in reply.upload.items() if is_buffer_name(name)}

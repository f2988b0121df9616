"""The client half: decode, run the rule on local data, encode; an error becomes an answer."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from functools import lru_cache

import numpy as np
import torch
from flwr.client import NumPyClient
from torch import Tensor

from ..algorithm import Algorithm, ClientId, ClientState
from ..algorithms import ALGORITHMS
from ..data import ClientData
from ..errors import FedoptError, FedoptWarning, MessageError
from ..own_code import described
from ..problems import foreign_text, unknown_name
from ..randomness import derive, kept
from ..rounds.soundness import norm
from ..training.diagnostics import diagnose
from ..training.evaluation import evaluate, usable_metrics
from ..training.flat_model import LOCAL_PARAMETERS, FlatModel, is_buffer_name
from ..training.metrics import Metric
from ..training.objective import ModelObjective, batch_positions
from .diagnostics import CONTROL_NORM
from .evaluations import HeldOut
from .instruction import Instruction
from .messages import NEVER, PREFIX, Scalar, decode, expected_arrays, repeated
from .pool import ModelPool
from .sizes import largest_instruction
from .state import BEGINS_ANEW, STATE_LOST, ClientStates

_LOG = logging.getLogger("fedopt_flwr")
_NO_WORK: dict[str, Scalar] = {"loss": 0.0, "num_steps": 0}  # in the report of who trained nothing


class FederatedClient(NumPyClient):
    """Flower client that owns its data, identity and state; instructions say everything else.

    An exception in local work does not end the client: it answers with no arrays and the error's
    text, which the server counts and shows as this client's failure.
    """

    largest_instruction: int | None = None  # bytes, of arrays for the model in use
    evaluates = True  # else it refuses that, and to be diagnosed, and says so
    restarts = False  # after its state was lost, where the federation is open

    def __init__(
        self,
        client_id: ClientId,
        data: ClientData,
        models: ModelPool,
        states: ClientStates,
        holdout: ClientData | None = None,
    ) -> None:
        self.client_id = client_id
        self.data = data
        self.holdout = holdout
        self._models = models
        self._states = states

    def get_properties(self, config: dict[str, Scalar]) -> dict[str, Scalar]:
        return {"client_id": self.client_id, "num_examples": self.data.num_examples}

    def fit(
        self, parameters: list[np.ndarray], config: dict[str, Scalar]
    ) -> tuple[list[np.ndarray], int, dict[str, Scalar]]:
        """Follow one instruction; return arrays, n_i and a report."""
        try:
            instruction = Instruction.from_config(config)
            self.prepare(instruction)
        except FedoptError as error:
            return [], 0, {"error": foreign_text(error)}
        if instruction.examples_before:
            warnings.warn(
                f"client {self.client_id}: counts with its {self.data.num_examples} examples from "
                f"round {instruction.examples_since} on; before it was "
                f"{instruction.examples_before}",
                FedoptWarning,
                stacklevel=2,
            )
        if instruction.phase == "diagnose" and not self.evaluates:
            return [], 0, {"error": f"client {self.client_id}: refuses to tell loss and gradient"}
        started = time.perf_counter()
        repeats = repeated(instruction.to_config())
        try:
            with self._models.borrow() as model:
                torch.set_num_threads(instruction.threads)  # OpenMP keeps it per thread
                self._learn_size(instruction, model)
                works = {"evaluate": self._evaluate, "diagnose": self._diagnose}
                work = works.get(instruction.phase, self._train)
                upload, told = work(instruction, parameters, model)
                arrays = [tensor.detach().cpu().numpy() for tensor in upload.values()]
        except (Exception, SystemExit) as error:
            _LOG.error("client %s, round %s", self.client_id, instruction.round, exc_info=error)
            return [], 0, {**repeats, "error": foreign_text(described(error))}
        report: dict[str, Scalar] = {
            **repeats,
            **told,
            "arrays": ",".join(upload),
            "client_seconds": time.perf_counter() - started,
        }
        return arrays, self.data.num_examples, report

    def _learn_size(self, instruction: Instruction, model: FlatModel) -> None:
        rule, with_buffers = rule_of(instruction), instruction.buffers == "average"
        self.largest_instruction = largest_instruction(rule, model, with_buffers=with_buffers)

    def prepare(self, instruction: Instruction) -> None:
        """Take what this round needs; FedoptError if it is not to be had. For subclasses."""

    def metrics(self, instruction: Instruction) -> Mapping[str, Metric]:
        """Return the metrics that are asked for. For subclasses."""
        return self._models.metrics

    def _evaluate(
        self, instruction: Instruction, parameters: list[np.ndarray], model: FlatModel
    ) -> tuple[dict[str, Tensor], dict[str, Scalar]]:
        """Evaluate the server's model on the held-out examples, and where buffers or parameters
        stay local also the client's own, with those; the server's has the batches' statistics and
        the initial parameters in their place."""
        if not self.evaluates:
            return {}, HeldOut(refused=True).told
        if self.holdout is None or not self.holdout.num_examples:
            return {}, HeldOut().told
        self._take_model(instruction, parameters, model)
        loss, local = self._models.loss, instruction.buffers == "local" and model.has_buffers
        at_once = instruction.micro_batch_size
        seed = derive(instruction.seed, "holdout", self.client_id, instruction.round)
        with kept(model.device, seed) if self._models.is_one else nullcontext():
            measures = usable_metrics(self.metrics(instruction), self.holdout)
            found = evaluate(
                model,
                self.holdout,
                loss,
                measures,
                use_batch_statistics=local,
                micro_batch_size=at_once,
            )
            if not (local or model.local):
                return {}, HeldOut.of(self.holdout.num_examples, found, None).told
            self._take_own_parts(instruction, model)
            own = evaluate(model, self.holdout, loss, measures, micro_batch_size=at_once)
        return {}, HeldOut.of(self.holdout.num_examples, found, own).told

    def _take_model(
        self, instruction: Instruction, parameters: list[np.ndarray], model: FlatModel
    ) -> None:
        """Put the server's model into this one; what stays with clients is as it was at first."""
        with_buffers = instruction.buffers == "average"
        expected = expected_arrays(("model",), model, with_buffers=with_buffers)
        received = decode(parameters, instruction.arrays, expected, "server")
        model.vector.copy_(received.pop("model"))
        model.reset_local()
        # those that stay local are of no client here: a single example is normalised by them
        buffers = received or (model.initial_buffers if model.has_buffers else {})
        if buffers:
            model.write_buffers({name: array.to(model.device) for name, array in buffers.items()})

    def _diagnose(
        self, instruction: Instruction, parameters: list[np.ndarray], model: FlatModel
    ) -> tuple[dict[str, Tensor], dict[str, Scalar]]:
        """Measure f_i and ∇f_i at the server's model, on the data that this client trains on, and
        tell the norm of its c_i if the rule has one; neither the state nor its versions change."""
        self._take_model(instruction, parameters, model)
        local = instruction.buffers == "local" and model.has_buffers
        seed = derive(instruction.seed, "diagnosis", self.client_id, instruction.round)
        with kept(model.device, seed) if self._models.is_one else nullcontext():
            loss, gradient = diagnose(
                model,
                self.data,
                self._models.loss,
                use_batch_statistics=local,
                micro_batch_size=instruction.micro_batch_size,
            )
        told = {**_NO_WORK, "loss": loss}
        rule = rule_of(instruction)
        if rule.client_means:
            with suppress(MessageError):  # a state that is lost is the next round's failure
                state = self._state(rule, model, instruction)
                told[CONTROL_NORM] = norm(state[next(iter(rule.client_means.values()))])
        return {"gradient": gradient}, told

    def _take_own_parts(self, instruction: Instruction, model: FlatModel) -> None:
        """Put what stays with this client into the model, as of the version that counts."""
        state = self._state(rule_of(instruction), model, instruction)
        buffers = {name: array for name, array in state.items() if is_buffer_name(name)}
        if buffers:
            model.write_buffers(buffers)
        if model.local:
            model.local_vector.copy_(state[LOCAL_PARAMETERS])

    def _train(
        self, instruction: Instruction, parameters: list[np.ndarray], model: FlatModel
    ) -> tuple[dict[str, Tensor], dict[str, Scalar]]:
        rule = rule_of(instruction)
        names = rule.broadcast_names if instruction.phase == "train" else ("model",)
        with_buffers = instruction.buffers == "average"
        expected = expected_arrays(names, model, with_buffers=with_buffers)
        received = decode(parameters, instruction.arrays, expected, "server")
        received = {name: array.to(model.device) for name, array in received.items()}
        model.reset_local()
        state = self._state(rule, model, instruction)
        objective = self._objective(instruction, model)
        buffers = {name: received.pop(name) for name in list(received) if is_buffer_name(name)}
        buffers = buffers or {name: state.pop(name) for name in list(state) if is_buffer_name(name)}
        if buffers:
            model.write_buffers(buffers)
        if model.local:
            model.local_vector.copy_(state.pop(LOCAL_PARAMETERS))
        seed = derive(instruction.seed, "model", self.client_id, instruction.round)
        # what draws from the global generators draws the same in every process; clients that train
        # at the same time share them: there, nothing may draw
        seeded = kept(model.device, seed) if self._models.is_one else nullcontext()
        with torch.enable_grad(), seeded:
            if instruction.phase == "gradient":
                return {"gradient": objective.full_gradient(received["model"])}, {**_NO_WORK}
            half = rule.client_start if instruction.phase == "start" else rule.client_update
            upload, next_state = half(received, state, objective)
        if model.has_buffers and instruction.phase == "train":
            buffers = model.read_buffers()
            if instruction.buffers == "average":
                upload = {**upload, **buffers}
        if instruction.buffers == "local":
            next_state = {**next_state, **buffers}
        if model.local:
            next_state = {**next_state, LOCAL_PARAMETERS: model.local_vector.clone()}
        if next_state:
            self._save(instruction, next_state)
        return upload, {"loss": objective.mean_loss, "num_steps": objective.num_steps}

    def _state(self, rule: Algorithm, model: FlatModel, instruction: Instruction) -> ClientState:
        state = rule.init_client(model.size)
        if instruction.buffers == "local" and model.has_buffers:
            # copies, as the store may write to what it is given
            state |= {name: array.clone() for name, array in model.initial_buffers.items()}
        state |= {name: array.clone() for name, array in model.initial_local.items()}
        if state and instruction.state_version != NEVER:
            initial = state
            state = dict(self._counted_state(instruction.state_version))
            if _layout(state) != _layout(initial):
                raise MessageError(
                    f"client {self.client_id}: its state of round {instruction.state_version} "
                    f"holds {_layout(state)}; expected {_layout(initial)}"
                )
        return {name: array.to(model.device) for name, array in state.items()}

    def _counted_state(self, version: int) -> ClientState:
        try:
            return self._states.load(self.client_id, version)
        except MessageError as error:  # it is not there, or broken
            if not self.restarts:
                raise
            raise MessageError(
                f"client {self.client_id}: {STATE_LOST} of round {version}; {BEGINS_ANEW} in the "
                f"next round where the server has federation.num_clients = 'open' ({error})"
            ) from error

    def _save(self, instruction: Instruction, state: ClientState) -> None:
        # pruned first and always: replies of a slow client may never count, and states pile up
        self._states.prune(self.client_id, instruction.kept_versions)
        self._states.save(self.client_id, instruction.round, state)

    def _objective(self, instruction: Instruction, model: FlatModel) -> ModelObjective:
        positions = batch_positions(
            self.data.num_examples,
            instruction.batch_size,
            instruction.local_steps or None,
            instruction.local_epochs or None,
            derive(instruction.seed, "batches", self.client_id, instruction.round),
        )
        return ModelObjective(
            model,
            self._models.loss,
            self.data,
            positions,
            instruction.weight_decay,
            instruction.clip_norm,
            instruction.gradient_momentum,
            derive(instruction.seed, "initial batch", self.client_id, instruction.round),
            instruction.local_learning_rate if instruction.phase == "train" else 0.0,
            instruction.micro_batch_size,
            instruction.precision,
            compares_points=rule_of(instruction).compares_points,
        )

    def evaluate(
        self, parameters: list[np.ndarray], config: dict[str, Scalar]
    ) -> tuple[float, int, dict[str, Scalar]]:
        """Evaluate arrays in state_dict order on the held-out data, as Flower users expect; on the
        data that it trains on where nothing is held out.

        Where an instruction says that parts stay with this client, its own model's values are there
        too, as `own_loss` and `own_NAME`.
        """
        own_keys = [key for key in config if key.startswith(PREFIX)]
        instruction = Instruction.from_config(config) if own_keys else None
        if instruction is not None:
            self.prepare(instruction)
        data = self.data if self.holdout is None else self.holdout
        loss, metrics = self._models.loss, self._models.metrics
        at_once = instruction.micro_batch_size if instruction else 0
        with self._models.borrow() as model:
            model.load_state_arrays(parameters)
            local = instruction is not None and instruction.buffers == "local"
            found = evaluate(
                model, data, loss, metrics, use_batch_statistics=local, micro_batch_size=at_once
            )
            report: dict[str, Scalar] = dict(found.known)
            if instruction is not None and (model.local or local):
                self._take_own_parts(instruction, model)
                own = evaluate(model, data, loss, metrics, micro_batch_size=at_once)
                report |= {"own_loss": own.loss, **{f"own_{n}": v for n, v in own.known.items()}}
        return found.loss, data.num_examples, report


def _layout(state: ClientState) -> dict[str, str]:
    return {name: f"{a.dtype}, {list(a.shape)}" for name, a in sorted(state.items())}


def rule_of(instruction: Instruction) -> Algorithm:
    """Return the rule that an instruction names; MessageError if there is none of that name."""
    if instruction.algorithm not in ALGORITHMS:
        unknown = unknown_name("instruction.algorithm", instruction.algorithm, ALGORITHMS)
        raise MessageError(
            "this client was not given the rule; where it is one of your own, name its class here: "
            "kind=MyRule of clientapp.train or of clients.Client, algorithm.name of `fedopt "
            f"client`; {unknown}"
        )
    return _made(ALGORITHMS[instruction.algorithm], instruction.hyperparameters)


@lru_cache(maxsize=8)
def _made(kind: type[Algorithm], hyperparameters: str) -> Algorithm:
    return kind.model_validate_json(hyperparameters)

"""The clients of one process: their data, one model that they take turns on, their state."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError
from torch import nn

from ..algorithm import ClientId
from ..algorithms import load_rule
from ..config.run_config import RunConfig
from ..config.sections import Facts
from ..data import Part, load_client_data
from ..engines.common import keep_freed_memory
from ..engines.stream import Connections, ServerAddress, StreamClient
from ..errors import FedoptError, MessageError
from ..flower import ClientStates, DiskStates, FederatedClient, Instruction, ModelPool
from ..flower.client import rule_of
from ..flower.messages import Scalar
from ..flower.sizes import largest_instruction
from ..models import make_model
from ..models.weights import load_weights, weights_digest
from ..own_code import is_import_path
from ..problems import foreign_text, validation_problems
from ..training.devices import pick_device
from ..training.dry_run import try_training
from ..training.evaluation import named_loss, named_metric
from ..training.flat_model import FlatModel
from ..training.metrics import Metric
from .limits import bounded_module, require_clients, require_examples, require_work

_GRACE_SECONDS = 5.0


class ClientHost:
    """What the clients of this process share. It owns data, device and state directory.

    How many clients there are and all that training needs, the server says. Code of its own choice
    it cannot name: a `module:attribute` counts only if this configuration names the same one.
    """

    def __init__(self, config: RunConfig, client_ids: Sequence[ClientId]) -> None:
        self._config = config
        self._ids = list(client_ids)
        # registers a rule of the user's own
        load_rule(config.algorithm.name, config.import_folders)
        self._device = pick_device(config.training.device)
        self._lock = threading.Lock()
        self._data: dict[ClientId, Part] = {}
        self._facts: Facts | None = None  # of the federation that the data was divided for
        self._model: tuple[str, FlatModel] | None = None  # with the run that it is for
        self._pool: tuple[str, ModelPool] | None = None

    def data(self, client_id: ClientId, facts: dict[str, Scalar]) -> Part:
        """Return a client's data; all clients' data is loaded at once when one first asks."""
        config = self._config
        known = config.federation.model_dump(include={"num_clients", "seed"})
        if facts.get("num_clients") == "open":  # then this client's own number divides its data
            facts = {**facts, "num_clients": known["num_clients"]}
        try:
            wanted = Facts(**{**known, **facts})
        except ValidationError as error:
            problems = "; ".join(validation_problems(error, Facts))
            raise MessageError(f"what the server says of the federation: {problems}") from None
        require_clients(config, wanted)
        with self._lock:
            if wanted != self._facts:
                loaded = load_client_data(config.data, wanted, self._ids, config.import_folders)
                self._data = {i: part.on_device(self._device) for i, part in loaded.items()}
                self._facts = wanted
            own = self._data[client_id]
        require_examples(config, own.train.num_examples)
        return own

    def pool(self, instruction: Instruction, num_examples: int) -> ModelPool:
        """Return the model that an instruction asks for, the same one for all of a run, if this
        process lets a client of so many examples do that work."""
        require_work(self._config, instruction, num_examples)
        with self._lock:
            if self._pool is None or self._pool[0] != instruction.run:
                self._pool = (instruction.run, self._make_pool(instruction))
            return self._pool[1]

    def model(self, instruction: Instruction) -> FlatModel:
        """Return the model that an instruction asks for, the same one for all of a run."""
        with self._lock:
            return self._model_of(instruction)

    def _model_of(self, instruction: Instruction) -> FlatModel:
        if self._model is None or self._model[0] != instruction.run:
            self._model = (instruction.run, self._make_model(instruction))
        return self._model[1]

    def _make_pool(self, instruction: Instruction) -> ModelPool:
        model = self._model_of(instruction)
        loss = named_loss(instruction.loss, self._config.import_folders)
        # a client that fails here fails in its rounds, as in a simulation; others may train
        own = {i: part.train for i, part in self._data.items()}
        own |= {f"{i}, held out": p.holdout for i, p in self._data.items() if p.holdout}
        try_training(
            model,
            loss,
            own,
            instruction.batch_size,
            are_all=False,
            micro_batch_size=instruction.micro_batch_size,
            precision=instruction.precision,
        )
        return ModelPool([model], loss)

    def metrics(self, instruction: Instruction) -> dict[str, Metric]:
        """Return the metrics that the server asks for; own ones must be this client's own, too."""
        names = instruction.metrics.split(",") if instruction.metrics else []
        own = {self._config.model.metric, *self._config.evaluation.metrics}
        for name in names:
            if is_import_path(name) and name not in own:
                raise MessageError(
                    f"evaluation.metrics: the server asks for {name!r}; this client is configured "
                    f"with {sorted(own)}, and no other code is imported; make the two equal, or "
                    "start the client with --no-evaluation"
                )
        return {name: named_metric(name, self._config.import_folders) for name in names}

    def _make_model(self, instruction: Instruction) -> FlatModel:
        own = self._config.model
        for key, asked, here in (
            ("name", instruction.model, own.name),
            ("loss", instruction.loss, own.loss),
        ):
            if is_import_path(asked) and asked != here:
                raise MessageError(
                    f"model.{key}: the server asks for {asked!r}; this client is configured with "
                    f"{here!r}, and no other code is imported; make the two equal"
                )
        make = partial(
            make_model,
            instruction.model,
            json.loads(instruction.model_options),
            input_shape=tuple(json.loads(instruction.input_shape)),
            num_classes=instruction.num_classes,
            seed=instruction.seed,
            folders=self._config.import_folders,
        )
        module = bounded_module(self._config, instruction, make)
        self._load_weights(module, instruction)
        return FlatModel(module, self._device, instruction.local_patterns)

    def _load_weights(self, module: nn.Module, instruction: Instruction) -> None:
        """Start where the server does, if this client has the file; it needs the file only for what
        does not travel."""
        own = self._config.model
        digest = "" if own.weights is None else weights_digest(own.weights)
        if own.weights is not None and digest == instruction.weights:
            load_weights(module, own.weights, own.weights_prefix, strict=own.weights_strict)
            return
        stays = [name for name, p in module.named_parameters() if not p.requires_grad]
        stays += instruction.local_patterns
        stays += ["buffers"] if instruction.buffers == "local" else []
        if stays and digest != instruction.weights:
            theirs = "a file that this client lacks" if instruction.weights else "no file"
            ours = "none" if own.weights is None else repr(str(own.weights))
            raise MessageError(
                f"model.weights: the server's model starts from {theirs} (this client has {ours}), "
                f"and {stays[0]!r} does not travel; give both the same file"
            )


class HostedClient(FederatedClient):
    """One client of a host, from which each message takes data, model and state.

    `states` returns where the states of a run lie; runs never read each other's.
    """

    def __init__(
        self,
        client_id: ClientId,
        host: ClientHost,
        states: Callable[[str], ClientStates],
        *,
        evaluates: bool = True,
        restarts: bool = False,
    ) -> None:
        self.client_id = client_id
        self.evaluates = evaluates
        self.restarts = restarts
        self._host = host
        self._states_of = states
        self._facts: dict[str, Scalar] = {}

    def get_properties(self, config: dict[str, Scalar]) -> dict[str, Scalar]:
        if config.keys() != Facts.model_fields.keys():
            raise MessageError(
                f"what the server says of the federation: got {foreign_text(sorted(config), 200)}; "
                f"must be {sorted(Facts.model_fields)}; both must run the same version"
            )
        self._facts = dict(config)
        self.data, self.holdout = self._host.data(self.client_id, self._facts)
        return super().get_properties(config)

    def bytes_of_instructions(self, announced: Mapping[str, Any]) -> int:
        """Return the size of the largest message of a run with this instruction's rule and model,
        which is built; MessageError if this process refuses it."""
        instruction = Instruction.from_config(announced)
        rule, model = rule_of(instruction), self._host.model(instruction)
        with_buffers = instruction.buffers == "average"
        return largest_instruction(rule, model, with_buffers=with_buffers)

    def prepare(self, instruction: Instruction) -> None:
        self.data, self.holdout = self._host.data(self.client_id, self._facts)
        self._models = self._host.pool(instruction, self.data.num_examples)
        self._states = self._states_of(instruction.run)

    def metrics(self, instruction: Instruction) -> dict[str, Metric]:
        return self._host.metrics(instruction)


def states_in(directory: Path) -> Callable[[str], DiskStates]:
    """Return what gives each run a folder of its own in `directory`."""
    return lambda run: DiskStates(directory / f"run-{run}")


def serve_clients(
    config: RunConfig,
    client_ids: Sequence[ClientId],
    state: Path,
    server: ServerAddress,
    say: Callable[[str], None],
    connections: Connections,
    *,
    evaluate: bool = True,
    restart: bool = False,
) -> list[FedoptError]:
    """Run one stream for each client until the server sends all home; return what ended others.

    With `evaluate` false they neither evaluate nor diagnose for the server, and say so when they
    are asked. With `restart` those that have lost their state begin anew, where the federation is
    open. SIGTERM and Ctrl-C leave at once: what is being trained is not waited for.
    """
    keep_freed_memory()
    host = ClientHost(config, client_ids)
    states = states_in(state)
    options = {"evaluates": evaluate, "restarts": restart}
    clients = {i: HostedClient(i, host, states, **options) for i in client_ids}
    streams = [StreamClient(i, own, server, say, connections) for i, own in clients.items()]
    errors: list[FedoptError] = []

    def run(stream: StreamClient) -> None:
        try:
            stream.run()
        except FedoptError as error:
            say(str(error))
            errors.append(error)

    threads = [threading.Thread(target=run, args=(stream,), daemon=True) for stream in streams]
    leaving = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: leaving.set())
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not leaving.wait(0.1):
        pass
    if leaving.is_set():
        _leave(streams, threads, say)
    return errors


def _leave(
    streams: Sequence[StreamClient],
    threads: Sequence[threading.Thread],
    say: Callable[[str], None],
) -> NoReturn:
    say("stop requested; leaving")
    for stream in streams:
        stream.stop()
    for thread in threads:
        thread.join(_GRACE_SECONDS / len(threads))
    # A thread deep in a training step cannot be interrupted, and taking the interpreter down with
    # torch in it costs seconds on a busy machine. State files are whole at any moment.
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a full disk
            output.flush()
    os._exit(0)

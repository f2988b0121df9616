"""The composition root: from a configuration to data, model, rule, loss and device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from pydantic import ValidationError
from torch import nn

from .algorithm import Algorithm
from .algorithms import ALGORITHMS, find_rule
from .config import RunConfig, validation_problems
from .data import FederatedData, load_federated_data
from .data.federated import require_examples
from .errors import ConfigError, unknown_name
from .flower import ModelPool
from .flower.messages import Instruction
from .imports import is_import_path
from .models import make_model, seeded_module
from .objectives import (
    Evaluation,
    Loss,
    Metric,
    draws_random_numbers,
    evaluate,
    named_loss,
    named_metric,
)
from .vectors import FlatModel


def make_rule(config: RunConfig) -> Algorithm:
    """Return the configured rule; ConfigError names every hyperparameter that is wrong."""
    section = config.algorithm
    kind = find_rule(section.name, config.import_folders)
    for name in config.rules:
        if not is_import_path(name) and name not in ALGORITHMS:
            raise ConfigError(unknown_name("rules", name, ALGORITHMS))
    try:
        return kind(**{**config.rules.get(section.name, {}), **section.hyperparameters})
    except ValidationError as error:
        raise ConfigError(validation_problems(error, kind, at="algorithm")) from None


def pick_device(name: str) -> torch.device:
    """Return the device of that name; "auto" is CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"training.device: got {name!r}; this machine has {torch.cuda.device_count()} CUDA "
            "devices; use 'auto' or 'cpu'"
        )
    return device


class Experiment:
    """Data, model and rule of one configuration, checked and ready to run."""

    def __init__(
        self,
        config: RunConfig,
        *,
        model: Callable[[], nn.Module] | None = None,
        data: FederatedData | None = None,
        loss: Loss | None = None,
        metric: Metric | None = None,
    ) -> None:
        self.config, self.rule = config, make_rule(config)
        self.device = pick_device(config.training.device)
        folders = config.import_folders
        self.loss = loss or named_loss(config.model.loss, folders)
        self.metric_name = "custom" if metric else config.model.metric
        self.metric = metric or named_metric(config.model.metric, folders)
        loaded = data or load_federated_data(config)
        require_examples(dict(enumerate(loaded.clients)))
        self.given: list[str] = []  # what came as Python objects instead of from the configuration
        self._factory = model
        self._modules: list[nn.Module] = []  # that were made here
        self._loaded = loaded
        self.model = self.make_model()  # the server's, and the first check of the user's module
        self.data = loaded.on_device(self.device)
        self.stochastic = False  # of no consequence where no client trains
        if self.data.clients:
            largest = max(self.data.clients, key=lambda client: client.num_examples)
            self.stochastic = draws_random_numbers(self.model, largest)

    def make_model(self) -> FlatModel:
        """Return a new model at x⁰; the same for the server and every worker."""
        seed, section = self.config.federation.seed, self.config.model
        if self._factory is not None:
            module = seeded_module(self._factory, seed)
            if any(module is other for other in self._modules):
                raise ConfigError(
                    "model: the function returned the same module twice; it must make a new one at "
                    "every call, since workers train at the same time"
                )
            self._modules.append(module)
            return FlatModel(module, self.device)
        module = make_model(
            section.name,
            section.options,
            input_shape=self._loaded.input_shape,
            num_classes=self._loaded.num_classes,
            seed=seed,
            folders=self.config.import_folders,
        )
        return FlatModel(module, self.device)

    def evaluate(self, model: FlatModel) -> Evaluation:
        """Evaluate on the test data; where buffers stay local, by the batch's statistics."""
        test = self.data.test
        if test is None:
            raise ConfigError("test_data: there is none to evaluate on")
        local = self.config.federation.buffers == "local" and model.has_buffers
        loss, metric = evaluate(model, test, self.loss, self.metric, use_batch_statistics=local)
        return Evaluation(loss, metric, self.metric_name)

    def template(self) -> Instruction:
        """Return what clients are told in every round, under the name of a new run."""
        shape, classes = self._loaded.input_shape, self._loaded.num_classes
        return Instruction.for_run(self.config, self.model, shape, classes)

    def pool(self, size: int) -> ModelPool:
        """Return the models of `size` workers; the server's, idle while clients train, is one."""
        section = self.config.model
        return ModelPool(
            [self.model, *(self.make_model() for _ in range(size - 1))],
            self.loss,
            model_name=section.name,
            loss_name=section.loss,
            stochastic=self.stochastic,
            metric=self.metric,
        )

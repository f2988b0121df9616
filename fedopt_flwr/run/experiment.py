"""The composition root: from a configuration to data, model, rule, loss and device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from .. import randomness
from ..algorithm import ClientId
from ..config.run_config import RunConfig
from ..data import ClientData, FederatedData, fingerprint, load_federated_data, require_examples
from ..errors import ConfigError, FedoptError, FedoptWarning, RunError
from ..flower import Instruction, ModelPool
from ..flower.instruction import local_rate
from ..models import find_model, make_model, seeded_module
from ..models.weights import load_weights, weights_digest
from ..own_code import described, file_digest, function_of, is_import_path
from ..problems import about, collected, raise_together
from ..randomness import derive
from ..training.calling import Loss
from ..training.devices import pick_device
from ..training.dry_run import try_evaluation, try_training
from ..training.evaluation import Evaluation, evaluate, named_loss, named_metric, usable_metrics
from ..training.flat_model import FlatModel
from ..training.metrics import Metric
from .checkpoints import Origin


class Experiment:
    """Data, model and rule of one configuration, checked and ready to run.

    `given` names what came as Python objects instead of from the configuration.
    """

    metrics: dict[str, Metric]  # by name, the main one first
    _loaded: FederatedData

    def __init__(
        self,
        config: RunConfig,
        *,
        model: Callable[[], nn.Module] | None = None,
        data: FederatedData | None = None,
        loss: Loss | None = None,
        metric: Metric | None = None,
        weights: Mapping[str, Tensor] | None = None,
        given: Sequence[str] = (),
    ) -> None:
        self.config = config
        self._factory = model
        self._weights = config.model.weights if weights is None else weights
        self._load_parts(data, loss, metric)
        self._given = list(given)
        self._modules: list[nn.Module] = []  # that were made here
        self._drop_idle_accuracy()
        try:
            self.model = self.make_model()  # the server's
            self.data = self._loaded.on_device(self.device)
            self.stochastic = self._try()
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"training.device: {str(self.device)!r} has too little memory: {error}; use a "
                "smaller model or batch, or 'cpu'"
            ) from error

    def _load_parts(
        self, data: FederatedData | None, loss: Loss | None, metric: Metric | None
    ) -> None:
        """Find rule, device, loss, metric, model and data; report their problems together."""
        config = self.config
        folders = config.import_folders
        errors: list[FedoptError] = []
        with collected(errors):
            self.rule = config.make_rule()
        with collected(errors):
            self.device = pick_device(config.training.device)
        with collected(errors):
            self.loss: Loss = (
                named_loss(config.model.loss, folders)
                if loss is None
                else function_of("loss", loss)
            )
        with collected(errors):
            self.metrics = self._find_metrics(metric)
        with collected(errors):
            if self._factory is None:
                find_model(config.model.name, folders)
            elif isinstance(self._factory, nn.Module) or not callable(self._factory):
                raise ConfigError(
                    f"model: got an object of type {type(self._factory).__name__}; give a function "
                    "that makes a new module at every call, since workers train at the same time"
                )
        with collected(errors):
            self._require_weights()
        with collected(errors):
            self._loaded = data or load_federated_data(config)
            require_examples(dict(enumerate(self._loaded.clients)))
        raise_together(errors)

    def _require_weights(self) -> None:
        section = self.config.model
        said = section.weights_prefix or not section.weights_strict
        if said and self._weights is None:
            raise ConfigError(
                f"model.weights_prefix, model.weights_strict: got {section.weights_prefix!r} and "
                f"{section.weights_strict} without model.weights, of which they speak; name the "
                "file, or leave them out"
            )

    def _find_metrics(self, metric: Metric | None) -> dict[str, Metric]:
        folders = self.config.import_folders
        main = self.config.model.metric
        found = {} if metric is None else {"custom": function_of("metric", metric)}
        found = found or {main: named_metric(main, folders)}
        for name in self.config.evaluation.metrics:
            found.setdefault(name, named_metric(name, folders, "evaluation.metrics"))
        return found

    def _drop_idle_accuracy(self) -> None:
        """Accuracy is of class indices; for other targets there is the loss, and what was named."""
        if self._loaded.test is None:
            return
        with about("test data"), randomness.kept(torch.device("cpu")):
            usable = usable_metrics(self.metrics, self._loaded.test)
        if len(usable) < len(self.metrics):
            self.metrics = usable
            warnings.warn(
                "model.metric: accuracy needs class indices, which the targets of the test data "
                f"are not; {', '.join(self.metrics) or 'only the loss'} is measured; name another, "
                "such as 'mse', or one of your own",
                FedoptWarning,
                stacklevel=2,
            )

    def _try(self) -> bool:
        """Try all parts on some data; return whether training draws from a global generator."""
        clients: dict[ClientId, ClientData] = dict(enumerate(self.data.clients))
        test = self.data.test
        clients |= {f"{i}, held out": data for i, data in enumerate(self.data.holdouts) if data}
        training = self.config.training
        is_random = try_training(
            self.model,
            self.loss,
            clients,
            training.batch_size,
            micro_batch_size=training.micro_batch_size,
            precision=training.precision,
        )
        is_random |= self.config.data.loader_workers > 0  # which draw in processes of their own
        if test is not None:
            local = self.has_local_buffers
            try_evaluation(
                self.model,
                self.loss,
                self.metrics,
                test,
                use_batch_statistics=local,
                micro_batch_size=training.micro_batch_size,
            )
        return is_random

    @property
    def has_local_buffers(self) -> bool:
        """Whether clients keep the model's buffers; evaluation then uses the batch's statistics."""
        return self.config.federation.buffers == "local" and self.model.has_buffers

    def make_model(self) -> FlatModel:
        """Return a new model at x⁰; the same for the server and every worker."""
        seed = self.config.federation.seed
        section = self.config.model
        if self._factory is not None:
            module = seeded_module(self._factory, seed)
            known = {id(p) for other in self._modules for p in other.parameters()}
            if any(id(p) in known for p in module.parameters() if p.requires_grad):
                raise ConfigError(
                    "model: the function returned the same module twice, or parts of it; it must "
                    "make a new one at every call, since workers train at the same time"
                )
            self._modules.append(module)
        else:
            module = make_model(
                section.name,
                section.options,
                input_shape=self._loaded.input_shape,
                num_classes=self._num_classes(),
                seed=seed,
                folders=self.config.import_folders,
            )
        if self._weights is not None:
            strict = section.weights_strict
            load_weights(module, self._weights, section.weights_prefix, strict=strict)
        return FlatModel(module, self.device, self.config.federation.local_parameters)

    @cached_property
    def origin(self) -> Origin:
        """What this was made from, for the runs that continue it."""
        config = self.config
        names = [config.algorithm.name, config.data.name, config.model.name, config.model.loss]
        own = [n for n in (*names, *self.metrics, config.data.collate or "") if is_import_path(n)]
        code = {name: file_digest(name) for name in own}
        if isinstance(self._weights, Path):
            code["model.weights"] = weights_digest(self._weights)
        return Origin(self._given, fingerprint(self._loaded), code)

    def _num_classes(self) -> int:
        """Classes for a built-in model; for others they are not counted, as that reads all data."""
        name = self.config.model.name
        data = self._loaded
        if self._factory is not None or is_import_path(name):
            return 0
        if data.test is None and not data.input_shape:  # on a server, which has no other data
            raise ConfigError(
                f"model.name: {name!r} has the shape of the test data, and "
                f"{self.config.data.name!r} gives the server none; return some, or give a model of "
                "your own, as 'module:attribute'"
            )
        return data.num_classes

    def evaluate(self, model: FlatModel) -> Evaluation:
        """Evaluate on the test data; where buffers stay local, by the batch's statistics."""
        test = self.data.test
        if test is None:
            raise ConfigError("test_data: none is given, so nothing can be evaluated; give some")
        local = self.has_local_buffers
        try:
            with randomness.kept(self.device, derive(self.config.federation.seed, "evaluation")):
                return evaluate(
                    model,
                    test,
                    self.loss,
                    self.metrics,
                    use_batch_statistics=local,
                    micro_batch_size=self.config.training.micro_batch_size,
                )
        except (Exception, SystemExit) as error:  # of the user's module, loss, metric or data
            raise RunError(f"evaluation on the test data failed: {described(error)}") from error

    def template(self) -> Instruction:
        """Return what stays the same in all instructions, under the name of a new run."""
        shape = self._loaded.input_shape
        classes = self._num_classes()
        digest = weights_digest(self._weights) if isinstance(self._weights, Path) else ""
        rate = local_rate(self.config, self.rule)
        return Instruction.for_run(self.config, self.model, shape, classes, rate, digest)

    def pool(self, size: int) -> ModelPool:
        """Return the models of `size` workers; the server's, idle while clients train, is one."""
        models = [self.model, *(self.make_model() for _ in range(size - 1))]
        return ModelPool(models, self.loss, metrics=self.metrics)

"""The data of a whole federation: what each client holds, and the server's test set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from ..config import RunConfig
from ..errors import ConfigError, DataError, unknown_name
from ..imports import is_import_path, load_attribute
from ..seeding import derive
from .client_data import ClientData, TensorData, as_client_data
from .partitions import partition
from .sources import SOURCES, Source


@dataclass(frozen=True)
class FederatedData:
    """Client i is `clients[i]`; `num_classes` is 0 where targets are no class indices."""

    clients: list[ClientData]
    test: ClientData | None
    input_shape: tuple[int, ...]
    num_classes: int

    def on_device(self, device: torch.device) -> FederatedData:
        """Return the same data with in-memory tensors on `device`, each moved once."""
        if device.type == "cpu":
            return self
        moved: dict[int, TensorData] = {}
        return replace(
            self,
            clients=[_moved(client, device, moved) for client in self.clients],
            test=None if self.test is None else self.test.on_device(device),
        )

    def label_counts(self) -> np.ndarray:
        """Return how many examples of each class each client holds, shape [clients, classes]."""
        return np.stack(
            [np.bincount(c.targets(), minlength=self.num_classes) for c in self.clients]
        )


def load_federated_data(config: RunConfig) -> FederatedData:
    """Load the configured data set and divide it; ConfigError or DataError say what is wrong."""
    name, federation = config.data.name, config.federation
    if is_import_path(name):
        loader = load_attribute("data.name", name, config.import_folders)
        return _from_user(loader, config)
    if name not in SOURCES:
        raise ConfigError(unknown_name("data.name", name, [*SOURCES, "module:attribute"]))
    try:
        source = SOURCES[name](config)
    except TypeError as error:
        raise ConfigError(
            f"data.options: {name!r} refused {config.data.options}: {error}"
        ) from None
    return _divide(source, config, derive(federation.seed, "partition"))


def from_datasets(
    client_data: Sequence[Any] | None, test_data: Any | None, config: RunConfig
) -> FederatedData:
    """Wrap the user's own data sets, one a client; the test set may be missing."""
    if client_data is None:
        return replace(load_federated_data(config), test=as_client_data(test_data))
    clients = [as_client_data(dataset) for dataset in client_data]
    if len(clients) != config.federation.num_clients:
        raise ConfigError(
            f"federation.num_clients: got {config.federation.num_clients}; client_data holds "
            f"{len(clients)} data sets; make the two equal"
        )
    test = None if test_data is None else as_client_data(test_data)
    require_examples(clients)
    return _describe(clients, test)


def require_examples(clients: Iterable[ClientData]) -> None:
    """Raise DataError that names the first client without an example."""
    for number, client in enumerate(clients):
        if client.num_examples == 0:
            raise DataError(
                f"client {number}: has no data; every client needs at least one example; set "
                "data.partition.min_examples to 1 or more, or leave this client out"
            )


def _from_user(loader: Any, config: RunConfig) -> FederatedData:
    federation, name = config.federation, config.data.name
    try:
        train, test = loader(
            num_clients=federation.num_clients,
            seed=derive(federation.seed, "data"),
            **config.data.options,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"data.name: {name!r} failed: {error}; it is called with num_clients, seed and "
            "data.options and must return (train, test): train is one data set, or a list with one "
            "data set a client; test may be None"
        ) from error
    if isinstance(train, (list, tuple)):
        return from_datasets(train, test, config)
    rows = partition(
        as_client_data(train).targets(),
        federation.num_clients,
        config.data.partition,
        seed=derive(federation.seed, "partition"),
    )
    clients = [as_client_data(Subset(train, r.tolist())) for r in rows]
    require_examples(clients)
    return _describe(clients, None if test is None else as_client_data(test))


def _divide(source: Source, config: RunConfig, seed: int) -> FederatedData:
    rows = partition(
        source.train_targets.numpy(),
        config.federation.num_clients,
        config.data.partition,
        seed=seed,
        natural=source.train_clients,
    )
    whole = TensorData(source.train_inputs, source.train_targets)
    clients: list[ClientData] = [whole.share(torch.from_numpy(r)) for r in rows]
    test = TensorData(source.test_inputs, source.test_targets)
    return FederatedData(clients, test, tuple(source.train_inputs.shape[1:]), source.num_classes)


def _describe(clients: Sequence[ClientData], test: ClientData | None) -> FederatedData:
    first = torch.zeros(1, dtype=torch.int64)
    inputs, targets = next(iter(clients[0].batches([first], torch.device("cpu"))))
    shape = tuple(inputs.shape[1:]) if isinstance(inputs, Tensor) else ()
    num_classes = 0
    if isinstance(targets, Tensor) and not targets.is_floating_point() and targets.ndim == 1:
        num_classes = 1 + max(
            int(part.targets().max()) for part in [*clients, *([test] if test else [])]
        )
    return FederatedData(list(clients), test, shape, num_classes)


def _moved(client: ClientData, device: torch.device, moved: dict[int, TensorData]) -> ClientData:
    if not isinstance(client, TensorData) or client._rows is None:
        return client.on_device(device)
    key = id(client._inputs)
    if key not in moved:
        moved[key] = TensorData(client._inputs, client._labels).on_device(device)
    return moved[key].share(client._rows)

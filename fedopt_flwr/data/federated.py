"""The data of a whole federation: what each client holds, and the server's test set."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import randomness
from ..algorithm import ClientId
from ..config.run_config import RunConfig
from ..config.sections import DataSection, Facts
from ..errors import ConfigError, DataError, FedoptError
from ..own_code import described, function_of, is_import_path, load_attribute
from ..problems import about, collected, raise_together, require_options, unknown_name
from ..randomness import derive
from .client_data import AS_TORCH, ClientData, Loading, NamedInputs, Source, TensorData
from .files import configured_root
from .holdouts import Part, held_out
from .hugging_face import split_source
from .partitions import partition
from .sources import SOURCES
from .wrapping import as_client_data

TRAINING = "training data"
Collate = Callable[[list[Any]], Any]  # a batch (inputs, targets) of a list of examples
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class FederatedData:
    """Client i is `clients[i]`; `classes` are counted when they are asked for, if they are None."""

    clients: list[ClientData]
    test: ClientData | None
    input_shape: tuple[int, ...]
    classes: int | None = None
    holdouts: Sequence[ClientData | None] = ()  # one a client, where there are clients

    @cached_property
    def num_classes(self) -> int:
        """The largest class index and one; 0 where targets are no class indices.

        Counted in the test data alone where there are any: a server has no other data, and must
        make the model that a simulation makes.
        """
        if self.classes is not None:
            return self.classes
        if self.test is not None:
            with about("test data"):
                return _count_classes(self.test)
        counts = [0]
        unreadable: list[FedoptError] = []  # whose clients will fail in their rounds
        for part in self.clients:
            with collected(unreadable):
                counts.append(_count_classes(part))
        return max(counts)

    def on_device(self, device: torch.device) -> FederatedData:
        """Return the same data with in-memory tensors on `device`."""
        return replace(
            self,
            clients=[client.on_device(device) for client in self.clients],
            test=self.test and self.test.on_device(device),
            holdouts=[data and data.on_device(device) for data in self.holdouts],
        )

    def label_counts(self) -> np.ndarray:
        """Return how many examples of each class each client holds, shape [clients, classes]."""
        targets = [client.targets() for client in self.clients]
        classes = max([self.num_classes, *map(_classes_in, targets)])
        return np.stack([np.bincount(labels, minlength=classes) for labels in targets])


def _count_classes(part: ClientData) -> int:
    with randomness.kept(_CPU):
        targets = part.targets()
    is_class = targets.ndim == 1 and targets.dtype.kind in "iub"
    return _classes_in(targets) if is_class else 0


def _classes_in(targets: np.ndarray) -> int:
    return 1 + int(targets.astype(np.int64).max(initial=-1))  # others may be without a sign


def load_federated_data(
    config: RunConfig, collate: Collate | None = None, *, may_download: bool = True
) -> FederatedData:
    """Load the configured data set and divide it; ConfigError or DataError say what is wrong.

    `collate` takes the place of the configured one. Without `may_download`, image sets whose files
    are not on this machine are a DataError.
    """
    facts = config.federation, config.import_folders
    source = _load(config.data, *facts, "train", "test", may_download=may_download)
    if collate is not None:
        source = replace(source, loading=loading_of(config, collate))
    clients = _divided(source, config.data, config.federation)
    return _describe(clients, source.test, source.num_classes, source.loading)


def loading_of(config: RunConfig, collate: Collate | None = None) -> Loading:
    """Return how batches are made, with `collate` in the place of the configured one."""
    return _loading(config.data, config.import_folders, collate)


def _loading(
    section: DataSection, folders: Iterable[Path], collate: Collate | None = None
) -> Loading:
    if collate is None and section.collate is not None:
        if not is_import_path(section.collate):
            raise ConfigError(
                f"data.collate: got {section.collate!r}; must be 'module:function', a function "
                "that makes a batch (inputs, targets) of a list of examples"
            )
        collate = load_attribute("data.collate", section.collate, folders)
    return Loading(
        None if collate is None else function_of("data.collate", collate), section.loader_workers
    )


def load_test_data(config: RunConfig) -> FederatedData:
    """Load what a server has: the test data, if there is any, and no client."""
    source = _load(config.data, config.federation, config.import_folders, "test")
    return _describe([], source.test, source.num_classes, source.loading)


def load_client_data(
    section: DataSection, facts: Facts, client_ids: Sequence[ClientId], folders: Iterable[Path] = ()
) -> dict[ClientId, Part]:
    """Load what some clients have: parts of a divided data set; with "whole", one has it all.

    A `module:attribute` is looked up in `folders`. Raises ConfigError or DataError, also for an id
    that has no part and for a part without an example.
    """
    is_natural = section.partition.kind in (None, "natural")
    wanted = frozenset(client_ids) if is_natural else None
    source = _load(section, facts, folders, "train", client_ids=wanted)
    if section.partition.kind == "whole" and not isinstance(source.train, list):
        if len(client_ids) > 1:
            raise ConfigError(
                f"data.partition.kind: got 'whole' for clients {list(client_ids)}; such data "
                "belongs to one client; start one process for each, with its own data.path"
            )
        whole = _wrapped_part(source.train, source.loading)
        own = {client_ids[0]: _with_holdout(whole, section, facts, client_ids[0])}
    else:
        clients = _divided(source, section, facts)
        own = {i: _part(clients, i, section.name) for i in client_ids}
    require_examples({i: part.train for i, part in own.items()})
    return own


def _part(clients: Sequence[Part], client_id: ClientId, name: str) -> Part:
    if not isinstance(client_id, int):
        raise ConfigError(
            f"client id {client_id!r}: {name!r} is divided among numbered clients; set "
            "data.partition.kind to 'whole' if all of it belongs to this client"
        )
    if client_id >= len(clients):
        raise ConfigError(
            f"client id {client_id}: must be between 0 and {len(clients) - 1}, as the federation "
            f"has {len(clients)} clients"
        )
    return clients[client_id]


def from_datasets(
    client_data: Any | None,
    test_data: Any | None,
    config: RunConfig,
    collate: Collate | None = None,
) -> FederatedData:
    """Wrap the user's own data sets, one a client; the test set may be missing.

    A DatasetDict or FederatedDataset has both, and is divided as configured or as it says itself.
    """
    loading = loading_of(config, collate)
    if client_data is None:
        loaded = load_federated_data(config, collate)
        if test_data is None:
            return loaded
        return replace(loaded, test=_test_data(test_data, loading))
    source = split_source(client_data, config.federation.num_clients, loading)
    if source is not None:
        clients = _divided(source, config.data, config.federation)
        return _describe(clients, source.test if test_data is None else test_data, None, loading)
    if not isinstance(client_data, Sequence):
        raise ConfigError(
            f"client_data: got an object of type {type(client_data).__name__}; must be a list with "
            "one map-style data set a client, a DatasetDict or a FederatedDataset"
        )
    clients = _wrapped(client_data, config.data, config.federation, loading)
    return _describe(clients, test_data, None, loading)


def _wrapped(
    datasets: Sequence[Any], section: DataSection, facts: Facts, loading: Loading
) -> list[Part]:
    clients = []
    for number, dataset in enumerate(datasets):
        with about(f"client {number}"):
            part = _wrapped_part(dataset, loading)
            clients.append(_with_holdout(part, section, facts, number))
    if not facts.is_open and len(clients) != facts.num_clients:
        raise ConfigError(
            f"federation.num_clients: got {facts.num_clients}; client_data holds {len(clients)} "
            "data sets; make the two equal"
        )
    return clients


def _wrapped_part(dataset: Any, loading: Loading) -> Part:
    """Wrap one client's data set, or its pair (training data, held-out data)."""
    arrays = (Tensor, np.ndarray)
    if isinstance(dataset, tuple) and len(dataset) == 2 and not isinstance(dataset[0], arrays):
        train, holdout = (as_client_data(item, loading) for item in dataset)
        return Part(train, holdout if holdout.num_examples else None)
    return Part(as_client_data(dataset, loading))


def _with_holdout(part: Part, section: DataSection, facts: Facts, client_id: ClientId) -> Part:
    if part.holdout is not None or not section.holdout:
        return part
    return held_out(part.train, section.holdout, derive(facts.seed, "holdout", client_id))


def _test_data(dataset: Any | None, loading: Loading) -> ClientData | None:
    if dataset is None:
        return None
    with about("test data"):
        data = as_client_data(dataset, loading)
        if data.num_examples == 0:
            raise DataError("has no example; give some, or None for a run without a test")
    return data


def require_examples(clients: Mapping[ClientId, ClientData]) -> None:
    """Raise DataError that names the first client without an example."""
    for client_id, client in clients.items():
        if client.num_examples == 0:
            raise DataError(
                f"client {client_id}: has no data; every client needs at least one example; set "
                "data.partition.min_examples to 1 or more, or leave this client out"
            )


def _load(
    section: DataSection,
    facts: Facts,
    folders: Iterable[Path],
    *parts: str,
    client_ids: Collection[ClientId] | None = None,
    may_download: bool = True,
) -> Source:
    """Return the data set of that name; one of ours must have these parts, and may hold little of
    clients that are not among `client_ids`."""
    name = section.name
    options = section.options
    loading = _loading(section, folders)
    if is_import_path(name):
        return replace(_call_loader(section, facts, folders), loading=loading)
    if name not in SOURCES:
        raise ConfigError(unknown_name("data.name", name, [*SOURCES, "module:attribute"]))
    wanted = signature(SOURCES[name]).parameters
    more = {"client_ids": client_ids, "may_download": may_download}
    given = {**dict(section), **dict(facts), **more}
    require_options("data.options", name, options, [key for key in wanted if key not in given])
    try:
        source = SOURCES[name](**{k: given[k] for k in wanted if k in given}, **options)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"data.options: {name!r} refused {options}: {error}") from None
    for part in parts:
        if getattr(source, part) is None:
            where = f"data.name: {name!r} has no {part} part"
            if name == "npz":
                where = f"data.path: {str(configured_root(section.path))!r} holds no {part}.npz"
            raise DataError(
                f"{where}; only a server can do without that for training, and only a client "
                "without that for the test"
            )
    return replace(source, loading=loading)


def _call_loader(section: DataSection, facts: Facts, folders: Iterable[Path]) -> Source:
    name = section.name
    loader = load_attribute("data.name", name, folders)
    seed = derive(facts.seed, "data")
    try:
        with randomness.kept(_CPU, seed):  # one that does not use its seed is the same everywhere
            returned = loader(
                num_clients=facts.num_clients,
                seed=seed % 2**32,  # as NumPy's own seeds must be
                **section.options,
            )
            source = split_source(returned, facts.num_clients, AS_TORCH)
            source = source or Source(*returned)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"data.name: {name!r} failed: {described(error)}; it is called with "
            "num_clients, seed and data.options and must return (train, test): train is one data "
            "set, or a list with one data set a client; test may be None"
        ) from error
    return source


def _divided(source: Source, section: DataSection, facts: Facts) -> list[Part]:
    if isinstance(source.train, (list, tuple)):
        return _wrapped(source.train, section, facts, source.loading)
    train = as_client_data(source.train, source.loading)
    if section.partition.kind == "whole":
        raise ConfigError(
            "data.partition.kind: got 'whole'; that is for `fedopt client`, whose data all belongs "
            "to it; here the data must be divided among clients"
        )
    seed = derive(facts.seed, "partition")
    count = facts.fixed_number(
        "who divides data",
        "give their number (to a client of an open federation its own), or let a client's data be "
        "its own with data.partition.kind = 'whole'",
    )
    rows = partition(train.targets(), count, section.partition, seed=seed, natural=source.owners)
    parts = [Part(train.share(torch.as_tensor(r))) for r in rows]
    return [_with_holdout(part, section, facts, i) for i, part in enumerate(parts)]


def _describe(
    divided: list[Part], test_data: Any | None, classes: int | None, loading: Loading
) -> FederatedData:
    """Find the shape in the test data, as a server does, else in the first client's that can be
    read; the others' clients will fail alone."""
    test = _test_data(test_data, loading)
    clients = [part.train for part in divided]
    holdouts = [part.holdout for part in divided]
    parts = {"test data": test} if test else {}
    parts |= {f"client {i}": client for i, client in enumerate(clients) if client.num_examples}
    unreadable: list[FedoptError] = []
    for whom, part in parts.items():
        with collected(unreadable), about(whom), randomness.kept(_CPU):
            inputs, _ = next(part.batches([torch.zeros(1, dtype=torch.int64)], _CPU))
            inputs = inputs.alone if isinstance(inputs, NamedInputs) else inputs
            shape = tuple(inputs.shape[1:]) if isinstance(inputs, Tensor) else ()
            return FederatedData(clients, test, shape, classes, holdouts)
    raise_together(unreadable[:1])
    return FederatedData(clients, None, (), classes, holdouts)


def fingerprint(data: FederatedData) -> dict[str, str]:
    """Return a digest of the training data and one of the test data, of those that are here.

    Of data sets that are read from elsewhere only sizes and known targets count.
    """
    parts = {TRAINING: data.clients, "test data": [data.test] if data.test else []}
    parts["held-out data"] = [holdout for holdout in data.holdouts if holdout]
    return {name: _digest(clients) for name, clients in parts.items() if clients}


def _digest(parts: Iterable[ClientData]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(f"{part.num_examples} examples".encode())
        for array in _arrays(part):
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _arrays(part: ClientData) -> list[np.ndarray]:
    if isinstance(part, TensorData):
        batch = next(part.batches([torch.arange(part.num_examples)], _CPU))
        return [tensor.contiguous().view(torch.uint8).numpy() for tensor in batch]
    targets = part.known_targets()
    return [] if targets is None or targets.dtype == object else [targets]

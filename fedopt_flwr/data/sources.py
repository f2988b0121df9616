"""The named data sets, as tensors in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..algorithm import ClientId
from ..config.sections import PartitionSection
from ..errors import ConfigError, DataError
from ..problems import needing, unknown_name
from ..randomness import derive
from .client_data import Source, TensorData
from .files import configured_root, torchvision_dataset
from .hugging_face import huggingface
from .texts import imdb, mr, sst2
from .tiny_imagenet import tiny_imagenet


def _digits() -> Source:
    """scikit-learn's 1,797 digits of 8x8 pixels in [0, 1]; a fifth of each class for the test."""
    with needing("scikit-learn", "data.name: 'digits'"):
        from sklearn.datasets import load_digits
    images, labels = load_digits(return_X_y=True)
    inputs = torch.from_numpy(images.astype(np.float32) / 16).view(-1, 1, 8, 8)
    targets = torch.from_numpy(labels.astype(np.int64))
    ranks = np.eye(10, dtype=np.int64)[labels].cumsum(axis=0)  # of each example, by class
    test = torch.from_numpy(ranks[np.arange(len(labels)), labels] % 5 == 0)
    train_part, test_part = (TensorData(inputs[rows], targets[rows]) for rows in (~test, test))
    return Source(train_part, test_part, 10)


# torchvision's class, channel means and deviations of the training images in [0, 1]
_IMAGE_SETS: dict[str, tuple[str, tuple[float, ...], tuple[float, ...]]] = {
    "mnist": ("MNIST", (0.1307,), (0.3081,)),
    "fashion_mnist": ("FashionMNIST", (0.2860,), (0.3530,)),
    "emnist": ("EMNIST", (0.1736,), (0.3317,)),
    "cifar10": ("CIFAR10", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ("CIFAR100", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
_EMNIST_SPLITS = ("byclass", "bymerge", "balanced", "letters", "digits", "mnist")
_LARGEST_SPREAD = 1e6
_MOST_CLASSES = 10**6


def _images(name: str, path: Path | None, may_download: bool) -> Source:
    """One of torchvision's image sets, standardised with the usual means and deviations."""
    return _from_torchvision(name, path, may_download)


def _emnist(name: str, path: Path | None, may_download: bool, split: str = "balanced") -> Source:
    """As the other image sets, turned upright; `letters` counts its classes from 0, not from 1."""
    if split not in _EMNIST_SPLITS:
        raise ConfigError(unknown_name("data.options.split", str(split), _EMNIST_SPLITS))
    return _from_torchvision(name, path, may_download, split=split)


def _from_torchvision(name: str, path: Path | None, may_download: bool, **arguments: str) -> Source:
    class_name, *moments = _IMAGE_SETS[name]
    mean, deviation = (torch.tensor(channels).view(1, -1, 1, 1) for channels in moments)
    root = configured_root(path)
    parts = []
    for train in (True, False):
        dataset = torchvision_dataset(class_name, root, train, may_download, **arguments)
        inputs = _as_inputs(np.asarray(dataset.data)).sub_(mean).div_(deviation)
        targets = torch.as_tensor(dataset.targets, dtype=torch.int64)
        if name == "emnist":
            inputs = inputs.transpose(-1, -2)
        if arguments.get("split") == "letters":
            targets = targets - 1
        parts.append(TensorData(inputs, targets))
    train_part, test_part = parts
    return Source(train_part, test_part, 1 + int(train_part.targets().max()))


def _synthetic(
    num_clients: int,
    seed: int,
    partition: PartitionSection,
    client_ids: Collection[ClientId] | None,
    model_spread: float = 1.0,
    data_spread: float = 1.0,
) -> Source:
    """Synthetic(α, β) of Li et al., "Federated Optimization in Heterogeneous Networks" (2020).

    Client k: n_k ~ 50 + lognormal(4, 2); x ~ N(v_k, diag(j^-1.2)) in 60 dimensions with
    v_k ~ N(B_k, 1), B_k ~ N(0, β); y = argmax(Wx + b) over 10 classes with W, b ~ N(u_k, 1),
    u_k ~ N(0, α). `model_spread` is α and `data_spread` is β, both variances, both >= 0. A tenth of
    each client's examples is for the test. As in the paper, u_k moves the scores of all classes
    alike: α changes no label, and clients label unlike because W and b are each client's own.

    Of clients other than `client_ids` (None: all are wanted) only as many training examples are
    kept as the data's own division looks at.
    """
    if not (0 <= model_spread <= _LARGEST_SPREAD and 0 <= data_spread <= _LARGEST_SPREAD):
        raise DataError(
            f"data.options: got model_spread {model_spread}, data_spread {data_spread}; both are "
            f"variances and must be from 0 to {_LARGEST_SPREAD:g}"
        )
    dimension = 60
    classes = 10
    rng = np.random.default_rng(derive(seed, "synthetic"))
    scale = np.arange(1, dimension + 1) ** -0.6  # square root of the diagonal j^-1.2
    clients = []
    for client in range(num_clients):
        size = 50 + int(rng.lognormal(4, 2))
        u = rng.normal(0, math.sqrt(model_spread))
        centre = rng.normal(rng.normal(0, math.sqrt(data_spread)), 1, dimension)  # v_k
        weight = rng.normal(u, 1, (dimension, classes))
        bias = rng.normal(u, 1, classes)
        x = rng.normal(centre, scale, (size, dimension))
        y = np.argmax(x @ weight + bias, axis=1)
        is_test = np.arange(size) % 10 == 9
        if client_ids is not None and client not in client_ids:
            rows = np.flatnonzero(~is_test)[: max(1, partition.min_examples)]
            x, y, is_test = x[rows], y[rows], is_test[rows]
        clients.append((x.astype(np.float32), y, np.full(len(y), client), is_test))
    x, y, owners, test = map(np.concatenate, zip(*clients, strict=True))
    train_part, test_part = (
        TensorData(torch.from_numpy(x[rows]), torch.from_numpy(y[rows])) for rows in (~test, test)
    )
    return Source(train_part, test_part, classes, owners[~test])


def _npz(
    path: Path | None,
    num_classes: int = 0,
    means: Sequence[float] = (),
    deviations: Sequence[float] = (),
) -> Source:
    """A folder with train.npz and test.npz: `x`, integer `y`, and in train optionally `client`.

    A client needs only the first, a server only the second. Where no part holds every class,
    the option `num_classes` says how many there are.

    uint8 images become float32 in [0, 1]; [n, h, w] gets a channel, [n, h, w, 3 or 1] is turned to
    [n, channels, h, w]. Other arrays are taken as float32 as they are. With `means` and
    `deviations`, one for each channel, images are standardised; they are given, not computed, as
    no machine of a federation has all data.
    """
    root = configured_root(path)
    files = {part: root / f"{part}.npz" for part in ("train", "test")}
    found = {part: _read_npz(file) for part, file in files.items() if file.is_file()}
    if not found:
        raise DataError(
            f"data.path: {str(root)!r} holds neither train.npz nor test.npz; 'npz' wants a folder "
            "with both, a client only the first, a server only the second"
        )
    largest = max(int(arrays["y"].max()) for arrays in found.values())
    if num_classes and not largest < num_classes <= _MOST_CLASSES:
        raise DataError(
            f"data.options: got num_classes {num_classes}; the files hold class {largest}; it must "
            f"be from {largest + 1} to {_MOST_CLASSES}"
        )
    kinds = {part: str(arrays["x"].dtype) for part, arrays in found.items()}
    if "uint8" in kinds.values() and len(set(kinds.values())) > 1:
        raise DataError(
            f"data.path: 'x' has dtypes {kinds}; uint8 is divided by 255, other dtypes are not, so "
            "both files must have the same"
        )
    shapes = {part: arrays["x"].shape[1:] for part, arrays in found.items()}
    if len(set(shapes.values())) > 1:
        raise DataError(f"data.path: 'x' has examples of different shapes: {shapes}")
    owners = found.get("train", {}).get("client")
    parts = {
        part: TensorData(
            _standardised(_as_inputs(arrays["x"]), means, deviations),
            torch.from_numpy(arrays["y"].astype(np.int64)),
        )
        for part, arrays in found.items()
    }
    return Source(parts.get("train"), parts.get("test"), num_classes or 1 + largest, owners)


def _standardised(inputs: Tensor, means: Sequence[float], deviations: Sequence[float]) -> Tensor:
    if not means and not deviations:
        return inputs
    channels = inputs.shape[1] if inputs.ndim == 4 else None
    if len(means) != channels or len(deviations) != channels or min(deviations) <= 0:
        raise DataError(
            f"data.options: got means {list(means)} and deviations {list(deviations)}; 'x' has "
            f"examples of shape {tuple(inputs.shape[1:])}; both must have a number for each "
            "channel of images [n, channels, h, w], in pixels from 0 to 1, deviations above 0"
        )
    mean, deviation = (torch.tensor(v).view(1, -1, 1, 1) for v in (means, deviations))
    return inputs.sub_(mean).div_(deviation)


SOURCES: dict[str, Callable[..., Source]] = {  # called with the facts it names and data.options
    "digits": _digits,
    **dict.fromkeys(_IMAGE_SETS, _images),
    "emnist": _emnist,
    "synthetic": _synthetic,
    "npz": _npz,
    "tiny_imagenet": tiny_imagenet,
    "sst2": sst2,
    "mr": mr,
    "imdb": imdb,
    "huggingface": huggingface,
}


def _as_inputs(x: np.ndarray) -> Tensor:
    """uint8 [n, h, w] or [n, h, w, 3 or 1] to float32 [n, channels, h, w] in [0, 1]."""
    is_bytes = x.dtype == np.uint8
    if is_bytes and x.ndim == 3:
        x = x[:, None]
    elif is_bytes and x.ndim == 4 and x.shape[-1] in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    inputs = torch.from_numpy(x.astype(x.dtype.newbyteorder("="), order="C", copy=False)).float()
    return inputs.div_(255) if is_bytes else inputs


def _read_npz(path: Path) -> dict[str, Any]:
    try:
        # np.load would leave a broken file open
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = dict(archive)
    except Exception as error:  # NumPy and zipfile raise many kinds
        text = f"{type(error).__name__}: {error}"
        raise DataError(
            f"data.path: {str(path)!r} cannot be read: {text}; must be what numpy.savez writes"
        ) from error
    named = {name: arrays[name] for name in ("x", "y", "client") if name in arrays}
    lengths = {name: array.shape[0] if array.ndim else 0 for name, array in named.items()}
    if "x" not in lengths or "y" not in lengths or len(set(lengths.values())) > 1:
        raise DataError(
            f"data.path: {str(path)!r} holds {sorted(arrays)} with lengths {lengths}; must hold "
            "'x' and 'y', and may hold 'client', all of one length"
        )
    problem = next(_npz_problems(named), None)
    if problem is not None:
        name, text = problem
        raise DataError(f"data.path: {name!r} of {str(path)!r} {text}")
    return named


def _npz_problems(arrays: dict[str, np.ndarray]) -> Iterator[tuple[str, str]]:
    x = arrays["x"]
    y = arrays["y"]
    if x.dtype.kind not in "fiub" or x.ndim < 2 or not x.size:
        seen = f"has dtype {x.dtype} and shape {x.shape}"
        yield "x", f"{seen}; must hold real numbers, [n, ...] with n of at least 1"
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        rows = np.flatnonzero(~np.isfinite(x.reshape(len(x), -1)).all(axis=1))
        yield "x", f"is not finite in {len(rows)} examples, the first is {rows[0]}; remove them"
    wanted = "must be one class for each example, an integer from 0 to 999,999"
    if y.dtype.kind not in "iu" or y.ndim != 1:
        yield "y", f"has dtype {y.dtype} and shape {y.shape}; {wanted}"
    if not 0 <= y.min() <= y.max() < _MOST_CLASSES:
        yield "y", f"has values from {y.min()} to {y.max()}; {wanted}"
    if "client" in arrays and arrays["client"].ndim != 1:
        yield "client", f"has shape {arrays['client'].shape}; must be one id for each example"

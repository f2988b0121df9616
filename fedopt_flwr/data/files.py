"""Where data files lie: a folder that may be read-only, and the user's cache for what we unpack."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError

_ARCHIVES = {"CIFAR10": "cifar-10-python.tar.gz", "CIFAR100": "cifar-100-python.tar.gz"}


def cache_root() -> Path:
    """Return the folder for unpacked and downloaded data; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(base), "fedopt-flwr", "data")


def configured_root(path: Path | None) -> Path:
    """Return `data.path`, else $FEDOPT_DATA, else the cache; raise DataError if it is no folder."""
    named = path or os.environ.get("FEDOPT_DATA")
    if not named:
        return cache_root()
    root = Path(os.path.expanduser(named))  # leaves a user who is not known as it is
    if not root.is_dir():
        field = "data.path" if path else "environment variable FEDOPT_DATA"
        raise DataError(f"{field}: {str(root)!r} is not a folder; create it or name another one")
    return root


def torchvision_dataset(
    class_name: str, root: Path, train: bool, may_download: bool = True, **arguments: Any
) -> Any:
    """Return torchvision's data set from `root`, from the cache, or from the network if it may.

    Files that are there only in packed form are unpacked into the cache, never beside them.
    """
    import torchvision.datasets

    kind: Callable[..., Any] = getattr(torchvision.datasets, class_name)
    cache = cache_root()
    read = partial(_read, partial(kind, train=train, **arguments), class_name)
    found = (  # unpacked only where the root holds nothing to read
        read(root, root) or read(_unpacked(class_name, root, cache), root) or read(cache, cache)
    )
    if found:
        return found
    missing = partial(_missing, class_name, arguments, train, root, cache)
    if not may_download:
        raise missing("nothing is downloaded here")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            kind(str(cache), train=train, download=True, **arguments)
    except (OSError, RuntimeError) as error:  # URLError is an OSError
        raise missing(f"the download failed ({' '.join(str(error).split())})") from error
    return read(cache, cache)


def _missing(
    class_name: str, arguments: dict[str, Any], train: bool, root: Path, cache: Path, why: str
) -> DataError:
    part = f"{'training' if train else 'test'} files of {class_name}"
    split = f" (split {arguments['split']!r})" if arguments else ""
    prefix = "emnist-<split>-" if class_name == "EMNIST" else ""
    files = _ARCHIVES.get(class_name, f"{class_name}/raw/{prefix}*-ubyte(.gz)")
    return DataError(
        f"data.name: the {part}{split} are not, or not whole, in {str(root)!r} and {str(cache)!r}, "
        f"and {why}; put {files} into one of the two, or set data.path or $FEDOPT_DATA"
    )


def _read(make: Callable[..., Any], class_name: str, place: Path, origin: Path) -> Any | None:
    """Return the data set in this folder, or None where its files are not, or not whole.

    `origin` is where the files were before they were unpacked.
    """
    try:
        dataset = make(str(place), download=False)
        labels = np.asarray(dataset.targets)
        classes = len(dataset.classes)
        fits = len(labels) == len(dataset.data) > 0
        if not fits or not 0 <= labels.min() <= labels.max() < classes:
            span = f" from {labels.min()} to {labels.max()}" if len(labels) else ""
            found = f"{len(dataset.data)} images and {len(labels)} labels{span}"
            raise ValueError(f"{found}; there are {classes} classes")
    except Exception as error:
        if "not found" in str(error):
            return None
        raise DataError(
            f"data files: those of {class_name} in {str(origin)!r} cannot be used: "
            f"{type(error).__name__}: {error}; replace or remove them"
        ) from error
    return dataset


def _unpacked(class_name: str, root: Path, cache: Path) -> Path:
    """Unpack into a folder of the cache that belongs to these very files, and return it."""
    raw = Path(class_name) / "raw"
    archive = root / _ARCHIVES.get(class_name, "")
    packed = [archive] if archive.is_file() else sorted((root / raw).glob("*-ubyte.gz"))
    facts = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in packed]
    folder = cache / "unpacked" / hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    if packed and not folder.exists():
        _unpack(packed, folder, raw)
    return folder


def _unpack(packed: Sequence[Path], folder: Path, raw: Path) -> None:
    """Make `folder` so that a reader, or a second process doing the same, never sees half of it.

    An archive is extracted into it, other files go into its subfolder `raw`.
    """
    source = packed[0]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
            whole = Path(unfinished, "whole")
            (whole / raw).mkdir(parents=True)
            for source in packed:
                if source.name.endswith(".tar.gz"):
                    with tarfile.open(source) as archive:
                        archive.extractall(whole, filter="data")
                else:
                    with gzip.open(source) as file, (whole / raw / source.stem).open("wb") as plain:
                        shutil.copyfileobj(file, plain)
            try:
                whole.rename(folder)
            except OSError:
                if not folder.is_dir():  # else a second process was faster
                    raise
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise DataError(
            f"data file: {str(source)!r} cannot be unpacked into the cache {str(folder)!r}: "
            f"{error}; replace it if it is broken; else make room there, or set XDG_CACHE_HOME to "
            "a folder that can be written"
        ) from error

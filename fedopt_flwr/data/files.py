"""Where data files lie: a folder that may be read-only, and the user's cache for what we unpack."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ..errors import DataError

_ARCHIVES = {"CIFAR10": "cifar-10-python.tar.gz", "CIFAR100": "cifar-100-python.tar.gz"}


def cache_root() -> Path:
    """Return the folder for unpacked and downloaded data; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "fedopt-flwr" / "data"


def configured_root(path: Path | None) -> Path:
    """Return `data.path`, else $FEDOPT_DATA, else the cache; raise DataError if it is no folder."""
    named = path or os.environ.get("FEDOPT_DATA")
    if not named:
        return cache_root()
    root = Path(named)
    if not root.is_dir():
        field = "data.path" if path else "environment variable FEDOPT_DATA"
        raise DataError(f"{field}: {str(root)!r} is not a folder; create it or name another one")
    return root


def torchvision_dataset(class_name: str, root: Path, train: bool, **arguments: Any) -> Any:
    """Return torchvision's data set from `root`, from the cache, or from the network.

    Files that are only there packed are unpacked into the cache, never beside the originals.
    """
    import torchvision.datasets

    make = getattr(torchvision.datasets, class_name)
    cache = cache_root()
    _unpack_into_cache(class_name, root, cache)
    for place in (root, cache):
        with contextlib.suppress(RuntimeError):  # "Dataset not found"
            return make(str(place), train=train, download=False, **arguments)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return make(str(cache), train=train, download=True, **arguments)
    except (OSError, RuntimeError) as error:  # URLError is an OSError
        part = "training" if train else "test"
        raise DataError(
            f"data.name: the {part} files of {class_name} {arguments or ''} are neither in "
            f"{str(root)!r} nor in {str(cache)!r}, and the download failed ({error}); put "
            f"{_expected_files(class_name)} into one of the two, or set data.path or $FEDOPT_DATA"
        ) from error


def _expected_files(class_name: str) -> str:
    if class_name in _ARCHIVES:
        return _ARCHIVES[class_name]
    prefix = "emnist-<split>-" if class_name == "EMNIST" else ""
    return f"{class_name}/raw/{prefix}*-ubyte(.gz)"


def _unpack_into_cache(class_name: str, root: Path, cache: Path) -> None:
    if class_name in _ARCHIVES:
        from torchvision.datasets.utils import extract_archive

        archive = root / _ARCHIVES[class_name]
        folder = "cifar-10-batches-py" if class_name == "CIFAR10" else "cifar-100-python"
        if archive.is_file() and not (root / folder).is_dir() and not (cache / folder).is_dir():
            extract_archive(str(archive), str(cache))
        return
    raw = Path(class_name) / "raw"
    packed = sorted((root / raw).glob("*-ubyte.gz"))
    for source in packed:
        name = source.name.removesuffix(".gz")
        target = cache / raw / name
        if not (root / raw / name).exists() and not target.exists():
            _gunzip(source, target)


def _gunzip(source: Path, target: Path) -> None:
    """Unpack so that a reader, or a second process doing the same, never sees half a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=target.parent)
    try:
        with gzip.open(source) as packed, os.fdopen(handle, "wb") as plain:
            shutil.copyfileobj(packed, plain)
        os.replace(unfinished, target)
    except (OSError, EOFError) as error:
        os.unlink(unfinished)
        raise DataError(f"data file: {str(source)!r} cannot be unpacked: {error}") from error

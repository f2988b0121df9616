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
    with contextlib.suppress(RuntimeError):  # "Dataset not found"
        return make(str(root), train=train, download=False, **arguments)
    for place in (_unpacked(class_name, root, cache), cache):
        with contextlib.suppress(RuntimeError):
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


def _unpacked(class_name: str, root: Path, cache: Path) -> Path:
    """Unpack into a folder of the cache that belongs to these very files, and return it."""
    raw, archive = Path(class_name) / "raw", root / _ARCHIVES.get(class_name, "")
    packed = [archive] if archive.is_file() else sorted((root / raw).glob("*-ubyte.gz"))
    facts = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in packed]
    folder = cache / "unpacked" / hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    for source in packed:
        if source == archive:
            if not folder.exists():
                _extract(source, folder)
        elif not (folder / raw / source.stem).exists():
            _gunzip(source, folder / raw / source.stem)
    return folder


def _extract(source: Path, folder: Path) -> None:
    """Extract an archive as `_gunzip` unpacks: whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        with tarfile.open(source) as archive:
            archive.extractall(unfinished, filter="data")
        with contextlib.suppress(FileExistsError):  # a second process was faster
            unfinished.rename(folder)
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise DataError(f"data file: {str(source)!r} cannot be unpacked: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _gunzip(source: Path, target: Path) -> None:
    """Unpack so that a reader, or a second process doing the same, never sees half a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=target.parent)
    try:
        with gzip.open(source) as packed, os.fdopen(handle, "wb") as plain:
            shutil.copyfileobj(packed, plain)
        os.replace(unfinished, target)
    except (OSError, EOFError, zlib.error) as error:
        os.unlink(unfinished)
        raise DataError(f"data file: {str(source)!r} cannot be unpacked: {error}") from error

"""Files that are written whole or not at all, and that show whether a bit of them changed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from safetensors import safe_open

if TYPE_CHECKING:
    from torch import Tensor

# a file of its own, in no place to which somebody laid a link
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_NEW |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_REST = re.compile(r".*\.[0-9a-f]{16}\.unfinished", re.DOTALL)

SEAL = "sha256"  # the key of a file's own digest among its metadata
_UNSEALED = "0" * 64
_SEAL = re.compile(rb'"%b":"([0-9a-f]{64})"' % SEAL.encode())  # in no text: quotes there have a \
_LONGEST_HEADER = 100_000_000  # bytes, of any safetensors file


@contextlib.contextmanager
def replacing(
    target: str | Path, *, durable: bool = False, private: bool = False
) -> Iterator[BinaryIO]:
    """Give a file to write to, which takes the place of `target` at the end, or is removed.

    With `durable` the contents are on the disk before they have their name, and the name before
    this returns, so that a power cut leaves either the old file or the new one. With `private`
    nobody else on the machine may read it.
    """
    unfinished = f"{target}.{secrets.token_hex(8)}.unfinished"
    handle = os.open(unfinished, _NEW, 0o600 if private else 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(unfinished, target)
    except BaseException:  # Ctrl-C too
        remove(unfinished)
        raise
    if durable and os.name != "nt":  # where a folder cannot be opened
        with contextlib.suppress(OSError):  # not every file system can do that to a folder
            _to_disk(os.path.dirname(target) or ".")


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; what is no file, a pipe or /dev/null, stays what it is.

    OSError if it cannot be written.
    """
    if path.is_dir():
        raise IsADirectoryError("it is a folder; name a file")
    place = path.resolve()  # a link stays one
    if place.exists() and not place.is_file():
        place.write_bytes(data)
        return
    with replacing(place) as file:
        file.write(data)


def remove_rests(folder: str | Path) -> None:
    """Remove what `replacing` left in a folder when its process was killed; nobody else may be
    writing there."""
    for name in os.listdir(folder):
        if _REST.fullmatch(name):
            remove(os.path.join(folder, name))


def remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _to_disk(folder: str) -> None:
    """Have the system write a folder's names now."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def tensor_bytes(arrays: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Return a safetensors file of tensors in any strides, on any device, also of shared memory."""
    import torch
    from safetensors.torch import save

    layout = torch.contiguous_format
    alone = {n: a.detach().cpu().clone(memory_format=layout) for n, a in arrays.items()}
    return save(alone, metadata)


def sealed(arrays: Mapping[str, Tensor], metadata: Mapping[str, str]) -> list[bytes | memoryview]:
    """Return the parts of a safetensors file that shows whether any of its bits was changed.

    Its metadata hold the SHA-256 of the whole file with zeros in the place of the digest itself.
    """
    data = tensor_bytes(arrays, {**metadata, SEAL: _UNSEALED})
    start, end = _place_of_seal(data)
    return [data[:start], hashlib.sha256(data).hexdigest().encode(), memoryview(data)[end:]]


def read_sealed(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return arrays and metadata of a file that `sealed` made; ValueError if it was changed."""
    from safetensors.torch import load

    with open(path, "rb") as file:
        header = file.read(8)
        header += file.read(min(int.from_bytes(header, "little"), _LONGEST_HEADER))
        start, end = _place_of_seal(header)
        digest = hashlib.sha256(header[:start] + _UNSEALED.encode() + header[end:])
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest().encode() != header[start:end]:
        raise ValueError("it is not as it was written")
    with safe_open(path, "pt") as opened, open(path, "rb") as file:
        metadata: dict[str, str] = opened.metadata()
        # its `get_tensor` would lose 29 bytes at each call; a client reads its state every round
        arrays = load(file.read())
    # copies, as bits of dot products depend on how memory is aligned
    return {name: array.clone() for name, array in arrays.items()}, metadata


def _place_of_seal(header: bytes) -> tuple[int, int]:
    found = _SEAL.search(header)
    if found is None:
        raise ValueError("it does not hold its own digest")
    return found.span(1)

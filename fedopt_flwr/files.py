"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(target: Path, *, durable: bool = False) -> Iterator[Path]:
    """Give a path to write to, which takes the place of `target` at the end, or is removed.

    With `durable` the contents are on the disk before they have their name, and the name before
    this returns, so that a power cut leaves either the old file or the new one.
    """
    unfinished = target.with_name(target.name + ".unfinished")
    try:
        yield unfinished
        if durable:
            _to_disk(unfinished)
        os.replace(unfinished, target)
    except BaseException:  # Ctrl-C too
        unfinished.unlink(missing_ok=True)
        raise
    if durable:
        with contextlib.suppress(OSError):  # not every file system can do that to a folder
            _to_disk(target.parent)


def _to_disk(path: Path) -> None:
    """Have the system write a file or folder now."""
    if os.name == "nt" and path.is_dir():  # which cannot be opened there
        return
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

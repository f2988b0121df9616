"""Ends a process when the one that started it is gone, however that ended.

The child's standard input is a pipe whose other end the parent holds and never writes to. The
system closes it when the parent ends, kill -9 included, and the child reads the end of the file.
"""

from __future__ import annotations

import os
import threading

_VARIABLE = "FEDOPT_LEASH"
LEASHED = {_VARIABLE: "stdin"}  # environment of a child that is to end with its parent


def follow_parent() -> None:
    """In a child: end as soon as the parent is gone. Does nothing in a process without a leash.

    Other code of the child finds its standard input empty.
    """
    if os.environ.pop(_VARIABLE, None) is None:
        return
    leash = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    threading.Thread(target=_watch, args=(leash,), daemon=True).start()


def _watch(leash: int) -> None:
    os.read(leash, 1)
    os._exit(1)  # at once, even in the middle of a training step; state files are whole

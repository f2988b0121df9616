"""Ends a process when the one that started it is gone, however that ended.

The parent holds one end of a pipe that it never writes to. The system closes it when the parent
ends, kill -9 included, and the child reads the end of the file.
"""

from __future__ import annotations

import os
import threading

_VARIABLE = "FEDOPT_LEASH"


class Leash:
    """The parent's end; children are started with `environment` and `pass_fds`."""

    def __init__(self) -> None:
        self._child_end, self._own_end = os.pipe()
        self.pass_fds = (self._child_end,)
        self.environment = {_VARIABLE: str(self._child_end)}

    def release(self) -> None:
        """Close both ends: children still there end at once."""
        os.close(self._own_end)
        os.close(self._child_end)


def follow_parent() -> None:
    """In a child: end as soon as the parent is gone. Does nothing in a process without a leash."""
    descriptor = os.environ.pop(_VARIABLE, None)
    if descriptor is not None:
        threading.Thread(target=_watch, args=(int(descriptor),), daemon=True).start()


def _watch(descriptor: int) -> None:
    os.read(descriptor, 1)
    os._exit(1)  # at once, even in the middle of a training step; state files are whole

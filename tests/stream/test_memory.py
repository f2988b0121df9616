"""A federation takes no more memory, files and threads in its last rounds than in its first."""

from __future__ import annotations

import sys

import memory
import pytest
from processes import Processes

_SHORT_RUN = 1500  # bytes a round that are pages and chance; a lost vector would be 19,240


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_rounds_leave_nothing_behind(processes: Processes) -> None:
    """In full, where 200 bytes can be told from chance: python tests/memory.py."""
    courses, own = memory.run(processes, 600)
    assert courses["server"].slope() < own + _SHORT_RUN
    for name, course in courses.items():
        assert name == "server" or course.slope() < _SHORT_RUN, name
        assert course.growth(course.files) <= 2, (name, course.files)
        assert course.growth(course.threads) <= 2, (name, course.threads)

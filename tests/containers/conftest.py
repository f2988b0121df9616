"""One engine, with both images, for all tests of containers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine import Engine, build, import_base, missing, running_engine


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    problem = missing()
    if problem and os.environ.get("CI") == "true":
        pytest.fail(f"containers cannot be tested: {problem}")
    if problem:
        pytest.skip(f"SKIPPED ALL TESTS OF CONTAINERS: {problem}")
    folder = Path(f"/var/tmp/fedopt-engine-{os.getpid()}")
    with running_engine(folder) as running:
        import_base(running, folder)
        for target in ("client", "server"):
            build(running, target)
        yield running

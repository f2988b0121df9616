"""A SuperLink for tests that need one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from superlinks import SuperLink


@pytest.fixture
def superlink(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SuperLink]:
    link = SuperLink(tmp_path, getattr(request, "param", "subprocess"))
    yield link
    link.close()

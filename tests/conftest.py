"""Nothing in the tests may reach the network or the user's own folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# before anything imports flwr
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"

from processes import Processes


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("FLWR_HOME", str(tmp_path_factory.mktemp("flwr")))


@pytest.fixture(autouse=True)
def _on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a GPU, only tests marked `cuda` use it: others compare bits of the CPU."""
    if request.node.get_closest_marker("cuda") is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # of the processes that a test starts
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture
def real_data() -> Path:
    """The folder with the real data sets, or a skip that says how to name it."""
    folder = os.environ.get("FEDOPT_DATA")
    if not folder or not (Path(folder) / "MNIST" / "raw").is_dir():
        pytest.skip("needs MNIST: set FEDOPT_DATA to a folder with MNIST/raw")
    return Path(folder)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    running = Processes(tmp_path)
    yield running
    running.end()

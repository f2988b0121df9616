"""What the images install, against pyproject.toml; the images themselves: tests/containers."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedopt_flwr import DataError, RunConfig
from fedopt_flwr.data import load_test_data
from fedopt_flwr.data.partitions import partition

ROOT = Path(__file__).parents[1]


def required(name: str) -> set[str]:
    lines = (ROOT / "docker" / f"requirements-{name}.txt").read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def test_the_images_lists_are_the_packages_dependencies_without_ray() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {dependency.replace("[simulation]", "") for dependency in project["dependencies"]}
    assert required("client") | required("server") == wanted
    assert required("client") & required("server") == set()
    big = ("flwr-datasets", "scikit-learn", "matplotlib")
    assert {line.partition(">")[0] for line in required("server")} == set(big)


@pytest.mark.parametrize(
    ("module", "use", "message"),
    [
        (
            "sklearn.datasets",
            lambda: load_test_data(RunConfig()),
            "data.name: 'digits' needs scikit-learn, which is not installed",
        ),
        (
            "flwr_datasets.partitioner",
            lambda: partition(np.arange(100) % 10, 2, RunConfig().data.partition, seed=0),
            "data.partition.kind: 'dirichlet' needs flwr-datasets, which is not installed",
        ),
    ],
    ids=["digits", "dirichlet"],
)
def test_a_package_that_the_client_image_lacks_is_named(
    module: str, use: Callable[[], object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=message):
        use()

"""The app that `flwr new` makes for PyTorch, of its shape, and what takes it to one of our rules.

`template` is the app as Flower's own strategy runs it, `examples/flwr_new` the same with ours.
"""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from superlinks import SuperLink

STOCK = Path(__file__).parent / "template"
OURS = Path(__file__).parents[2] / "examples" / "flwr_new"
APPS = {"stock": STOCK, "ours": OURS}
NODES = ["partition-id=0 num-partitions=2", "partition-id=1 num-partitions=2"]


def lines_of(app: Path) -> dict[Path, list[str]]:
    files = [path for kind in ("*.py", "*.toml") for path in app.rglob(kind)]
    return {path.relative_to(app): path.read_text().splitlines() for path in files}


def test_our_rule_takes_under_ten_added_or_changed_lines() -> None:
    """Of the whole app; a changed line counts once, as the new one, and removed ones do not."""
    stock, ours = lines_of(STOCK), lines_of(OURS)
    assert stock.keys() == ours.keys()
    changes = [line for name in stock for line in difflib.ndiff(stock[name], ours[name])]
    added = [line for line in changes if line.startswith("+ ")]
    assert 0 < len(added) < 10, added
    assert any("import ScaffoldM" in line for line in added)
    assert any("strategy = FedAvg" in line for line in changes if line.startswith("- "))


def task_of(app: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits_task", app / "digits_app" / "task.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("app", ["ours", pytest.param("stock", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["simulation", "subprocess"])
def test_the_app_runs_and_learns(tmp_path: Path, kind: str, app: str) -> None:
    link = SuperLink(tmp_path, kind, NODES)
    try:
        run = link.run("num-server-rounds=6 learning-rate=0.5 fraction-evaluate=1.0", APPS[app])
        words = run.stdout + run.stderr
        models = [*tmp_path.rglob("final_model.pt")]
        assert len(models) == 1, words + link.logs()
    finally:
        link.close()
    task = task_of(APPS[app])
    net = task.Net()
    net.load_state_dict(torch.load(models[0], weights_only=True))
    _, accuracy = task.test(net, task.load_centralized_dataset(), torch.device("cpu"))
    assert accuracy > 0.6, words
    assert "eval_acc" in words  # the nodes evaluate, with the app's own function

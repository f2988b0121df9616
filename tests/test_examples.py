"""The examples run, on the real files where they need some."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedopt_flwr
from fedopt_flwr import ConfigError, RunConfig, simulate
from fedopt_flwr.algorithm import Algorithm
from fedopt_flwr.algorithms import ALGORITHMS, FedAvg, load_rule, register
from fedopt_flwr.data import load_federated_data
from fedopt_flwr.models import make_model

EXAMPLES = Path(__file__).parent.parent / "examples"


def make_npz(name: str, output: Path) -> None:
    subprocess.run([sys.executable, EXAMPLES / "make_npz.py", name, output], check=True)


def test_femnist_becomes_npz_with_its_own_clients(real_data: Path, tmp_path: Path) -> None:
    make_npz("femnist", tmp_path)
    config = RunConfig(
        algorithm={"name": "scaffold_m", "client_learning_rate": 0.1},
        data={"name": "npz", "path": tmp_path},
        federation={"num_clients": 12, "clients_per_round": 4, "num_rounds": 40},
    )
    data = load_federated_data(config)
    assert sum(c.num_examples for c in data.clients) + data.test.num_examples == 5997
    assert data.input_shape == (1, 28, 28)
    assert simulate(config).rounds[-1].test_accuracy > 0.8


@pytest.mark.slow
def test_cifar10_becomes_npz_with_all_its_images(real_data: Path, tmp_path: Path) -> None:
    make_npz("cifar10", tmp_path)
    with np.load(tmp_path / "train.npz") as train, np.load(tmp_path / "test.npz") as test:
        assert train["x"].shape == (50_000, 32, 32, 3)
        assert np.bincount(train["y"]).tolist() == [5000] * 10
        assert np.bincount(test["y"]).tolist() == [1000] * 10
        mean = train["x"].mean(axis=(0, 1, 2)) / 255
    np.testing.assert_allclose(mean, [0.4914, 0.4822, 0.4465], atol=2e-3)


def test_make_npz_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, EXAMPLES / "make_npz.py", "femnist", tmp_path / "out"]
    monkeypatch.setenv("FEDOPT_DATA", str(tmp_path))
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert "femnist_digits.npz' is not there" in result.stderr
    assert not (tmp_path / "out").exists()


def test_the_readme_configuration_is_valid() -> None:
    config = RunConfig.from_file(EXAMPLES / "mnist_cnn.toml")
    federation = config.federation
    assert (federation.num_clients, federation.clients_per_round, federation.num_rounds) == (
        100,
        10,
        100,
    )


@pytest.mark.slow
def test_mnist_with_a_cnn_reaches_what_the_readme_says(real_data: Path) -> None:
    """A third of the README's rounds, for the rule that has no rate to tune and for a tuned one."""
    settings = ["federation.num_rounds=30", "output.evaluate_every=30"]
    for name, least in (("fedavg", 0.85), ("scaffold_m", 0.85), ("padamfed", 0.35)):
        config = RunConfig.from_file(
            EXAMPLES / "mnist_cnn.toml", [*settings, f"algorithm.name={name}"]
        )
        result = simulate(config, workers=2)
        assert sum(r.failures for r in result.rounds) == 0
        assert result.rounds[-1].test_accuracy > least, name


def fedopt(*arguments: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    command = [sys.executable, "-m", "fedopt_flwr", *arguments]
    run = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_your_own_model_learns_its_sensors(tmp_path: Path) -> None:
    config = str(EXAMPLES / "your_own_model" / "federation.toml")
    fedopt("simulate", config, "--set", "output.directory=run", cwd=tmp_path)
    lines = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert records[-1]["test_loss"] < 0.8 * records[0]["test_loss"]
    assert records[-1]["test_metric"] < records[0]["test_metric"]
    assert records[-1]["test_accuracy"] is None


@pytest.mark.slow
def test_a_custom_algorithm_from_outside_the_package_trains_in_processes_too(
    tmp_path: Path,
) -> None:
    # in a module whose name is not the rule's
    text = (EXAMPLES / "custom_algorithm" / "federation.toml").read_text()
    shutil.copy(EXAMPLES / "custom_algorithm" / "sign_fedavg.py", tmp_path / "own_rules.py")
    (tmp_path / "federation.toml").write_text(text.replace("sign_fedavg:", "own_rules:"))
    config = "federation.toml"
    fedopt("simulate", config, "--set", "output.directory=alone", cwd=tmp_path)
    fedopt("launch", config, "--processes", "2", "--set", "output.directory=many", cwd=tmp_path)
    alone, many = (tmp_path / name / "model.safetensors" for name in ("alone", "many"))
    assert alone.read_bytes() == many.read_bytes()
    summary = json.loads((tmp_path / "many" / "summary.json").read_text())
    assert summary["algorithm"] == "sign_fedavg"
    assert summary["final_test_accuracy"] > 0.8


@pytest.mark.slow
def test_a_new_rule_is_one_file_one_line_and_two_names(tmp_path: Path) -> None:
    """The example moved inside of a copy of the package gives the bytes that it gives outside."""
    package = tmp_path / "copy" / "fedopt_flwr"
    shutil.copytree(Path(fedopt_flwr.__file__).parent, package)
    shutil.copy(EXAMPLES / "custom_algorithm" / "sign_fedavg.py", package / "algorithms")
    table = package / "algorithms" / "__init__.py"
    line = "from .sign_fedavg import SignFedAvg as SignFedAvg\n"
    table.write_text(table.read_text().replace("# isort: on\n", f"{line}# isort: on\n"))
    for name, base in (
        ("strategies", "SignFedAvg(RuleStrategy)"),
        ("clients", "SignFedAvgClient(Client)"),
    ):
        file = package / f"{name}.py"
        file.write_text(f"{file.read_text()}\n\nclass {base}:\n    kind = algorithms.SignFedAvg\n")
    inside = {**os.environ, "PYTHONPATH": str(tmp_path / "copy")}
    config = (EXAMPLES / "custom_algorithm" / "federation.toml").read_text()
    (tmp_path / "inside.toml").write_text(config.replace("sign_fedavg:SignFedAvg", "sign_fedavg"))

    fedopt("simulate", "inside.toml", "--set", "output.directory=inside", cwd=tmp_path, env=inside)
    outside = str(EXAMPLES / "custom_algorithm" / "federation.toml")
    fedopt("simulate", outside, "--set", "output.directory=outside", cwd=tmp_path)
    models = [tmp_path / name / "model.safetensors" for name in ("inside", "outside")]
    assert models[0].read_bytes() == models[1].read_bytes()
    assert "sign_fedavg" in fedopt("algorithms", cwd=tmp_path, env=inside)
    assert "0 failed" in fedopt("verify", "sign_fedavg", cwd=tmp_path, env=inside)
    program = (
        "import inspect; from fedopt_flwr import clients, strategies;"
        "print(inspect.signature(strategies.SignFedAvg).parameters['client_learning_rate'].default,"
        " clients.SignFedAvgClient.kind.name)"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    assert subprocess.check_output(command, cwd=tmp_path, env=inside, text=True).split() == [
        "0.002",
        "sign_fedavg",
    ]


def test_a_rule_cannot_take_the_name_of_another() -> None:
    class Impostor(Algorithm):
        name = "fedavg"

    with pytest.raises(ConfigError, match="is the name of a rule in fedopt_flwr"):
        register(Impostor)
    assert ALGORITHMS["fedavg"] is FedAvg
    with pytest.raises(ConfigError, match="is no subclass of fedopt_flwr's Algorithm"):
        load_rule("json:loads")


def run_example(name: str, folder: Path, *commands: list[str]) -> None:
    """Copy an example and run commands in its folder, as its files say."""
    shutil.copytree(EXAMPLES / name, folder, dirs_exist_ok=True)
    for command in commands:
        subprocess.run(command, cwd=folder, check=True, timeout=600, capture_output=True)


def test_vision_finetune_trains_the_head_alone(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from torchvision.models import resnet18

    torch.manual_seed(1)
    trunk = resnet18(num_classes=7)  # its head goes
    torch.save(trunk.state_dict(), tmp_path / "given.pth")
    numbers = np.random.default_rng(0)
    (tmp_path / "cifar10").mkdir()
    for part, count in (("train", 60), ("test", 20)):
        images = numbers.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        labels = np.arange(count) % 10
        np.savez(tmp_path / "cifar10" / f"{part}.npz", x=images, y=labels)
    sizes = ["--set", "federation.num_clients=3", "--set", "federation.clients_per_round=2"]
    rounds = ["--set", "federation.num_rounds=2", "--set", "output.directory=run"]
    run_example(
        "vision_finetune",
        tmp_path,
        [sys.executable, "vision_finetune.py", "given.pth", "trunk.safetensors"],
        [sys.executable, "-m", "fedopt_flwr", "simulate", "federation.toml", *sizes, *rounds],
    )
    trained = load_file(tmp_path / "run" / "model.safetensors")
    for key, value in trunk.state_dict().items():
        if not key.startswith("fc."):
            assert torch.equal(trained[f"trunk.{key}"], value), key
    kind: dict[str, Any] = {"options": {}, "input_shape": (3, 32, 32), "num_classes": 10}
    start = make_model("vision_finetune:Finetuned", **kind, seed=0, folders=[tmp_path])
    for key, value in start.state_dict().items():
        if key.startswith("head."):
            assert 1e-6 < (trained[key] - value).abs().max() < 1, key
    records = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    last = json.loads(records[-1])
    assert last["clients"]
    assert last["uplink_bytes"] < 4 * 4 * 2 * (512 * 10 + 10)  # of 11 million parameters


PLAIN = """
import sys
import torch
from peft import PeftModel
from text_lora import full, load

model = PeftModel.from_pretrained(full(), "run/pretrained").eval()
loss = 0.0
test = load(20, 0)["test"].with_format("torch")
with torch.no_grad():
    for batch in test.iter(256):
        loss += model(**batch).loss.item() * len(batch["labels"]) / len(test)
assert "fedopt_flwr" not in sys.modules
print(loss)
"""


@pytest.mark.slow
def test_text_lora_from_its_files(real_data: Path, tmp_path: Path) -> None:
    """A base after few steps: it runs, learns the training loss, and the adapter alone travels."""
    pytest.importorskip("peft", reason="needs the extra 'text'")
    values = ["federation.num_rounds=6", "output.directory=run", "data.partition.kind=iid"]
    values += ["algorithm.name=local_adam", "algorithm.client_learning_rate=0.003"]
    small = [part for value in values for part in ("--set", value)]
    run_example(
        "text_lora",
        tmp_path,
        [sys.executable, "prepare.py", "--steps", "20"],
        [sys.executable, "-m", "fedopt_flwr", "simulate", "federation.toml", *small],
    )
    rounds = [json.loads(r) for r in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert not any(record["errors"] for record in rounds)
    assert rounds[-1]["train_loss"] < rounds[1]["train_loss"]
    assert rounds[1]["uplink_bytes"] < 5 * 4 * 100_000  # of 1.4 million parameters
    assert (tmp_path / "run" / "pretrained" / "adapter_model.safetensors").exists()
    plain = [sys.executable, "-W", "ignore", "-c", PLAIN]
    found = subprocess.check_output(plain, cwd=tmp_path, text=True, timeout=300)
    assert float(found) == pytest.approx(rounds[-1]["test_loss"], abs=1e-4)


def test_text_lora_says_how_its_base_is_made(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs the extra 'text'")
    file = shutil.copy(EXAMPLES / "text_lora" / "text_lora.py", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"base is not there; run prepare\.py, which makes"):
        runpy.run_path(file)["full"]()

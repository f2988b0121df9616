"""Hugging Face's models: batches of named columns, their own loss, adapters, and what is saved."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from helpers import CLASSES, FEATURES, linear_model, small_config, three_datasets
from processes import fedopt
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from fedopt_flwr import ConfigError, DataError, simulate
from fedopt_flwr.data import as_client_data
from fedopt_flwr.errors import FedoptWarning
from fedopt_flwr.models.weights import load_weights
from fedopt_flwr.training.calling import models_own_loss
from fedopt_flwr.training.evaluation import evaluate, named_metric
from fedopt_flwr.training.flat_model import FlatModel
from fedopt_flwr.training.objective import ModelObjective

datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers", reason="needs the extra 'text'")
peft = pytest.importorskip("peft", reason="needs the extra 'text'")

# of peft, which uses a name that transformers is about to drop
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

WORDS, LENGTH, EXAMPLES = 40, 12, 14
OWN_LOSS = {"model": {"loss": "model"}}


def config_of(**values: Any) -> Any:
    return transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=1,
        n_head=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **values,
    )


def classifier() -> nn.Module:
    return transformers.GPT2ForSequenceClassification(config_of(num_labels=3))


def language_model() -> nn.Module:
    return transformers.GPT2LMHeadModel(config_of())


def texts(seed: int, *, language: bool = False) -> list[dict[str, Any]]:
    """Examples of unlike lengths, padded with 0; those of language models have no class."""
    numbers = np.random.default_rng(seed)
    found = []
    for length in numbers.integers(3, LENGTH, EXAMPLES):
        ids = np.zeros(LENGTH, np.int64)
        ids[:length] = numbers.integers(2, WORDS, length)
        mask = (np.arange(LENGTH) < length).astype(np.int64)
        targets = np.where(mask == 1, ids, -100) if language else int(numbers.integers(3))
        row = {"input_ids": ids, "attention_mask": mask, "label": targets, "text": "a title"}
        found.append(row)
    return found


def batch_of(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    named = ("input_ids", "attention_mask")
    batch = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in named}
    return batch | {"labels": torch.from_numpy(np.stack([row["label"] for row in rows]))}


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().ravel() for p in module.parameters() if p.requires_grad])


def settings(**sections: Any) -> dict[str, Any]:
    return small_config(
        algorithm={"name": "fedavg", "client_learning_rate": 0.5},
        training={"local_steps": 1, "batch_size": 0},
        **sections,
    )


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make()


@pytest.mark.parametrize("loss", ["model", "cross_entropy"])
@pytest.mark.parametrize(
    ("make", "language"), [(classifier, False), (language_model, True)], ids=["class", "language"]
)
def test_a_round_is_plain_pytorchs_on_the_same_batches(
    make: Callable[[], nn.Module], language: bool, loss: str
) -> None:
    """One step of each client on its whole data, averaged; by the models' own calls."""
    data = [texts(seed, language=language) for seed in range(3)]
    expected = []
    for rows in data:
        module = seeded(make)
        module(**batch_of(rows)).loss.backward()
        parameters = list(module.parameters())
        expected.append(torch.cat([(p - 0.5 * p.grad).detach().ravel() for p in parameters]))
    config = settings(model={"loss": loss})
    config["federation"]["num_rounds"] = 1
    result = simulate(config, lambda: seeded(make), data)
    torch.testing.assert_close(
        torch.from_numpy(result.parameters), torch.stack(expected).mean(0), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("micro", [0, 1, 4])
def test_a_language_models_test_loss_is_that_of_all_its_tokens(micro: int) -> None:
    rows = texts(5, language=True)
    module = seeded(language_model).eval()
    with torch.no_grad():
        outputs = module(**batch_of(rows))
        expected = float(outputs.loss)
        hits = outputs.logits[:, :-1].argmax(-1) == batch_of(rows)["labels"][:, 1:]
    counted = batch_of(rows)["labels"][:, 1:] != -100
    metrics = {name: named_metric(name) for name in ("perplexity", "accuracy")}
    data = as_client_data(rows)
    for loss in (models_own_loss, functional.cross_entropy):
        found = evaluate(FlatModel(module), data, loss, metrics, micro_batch_size=micro)
        assert found.loss == pytest.approx(expected, rel=1e-6)
        assert found.metrics["perplexity"] == pytest.approx(np.exp(expected), rel=1e-5)
        assert found.accuracy == pytest.approx(float(hits[counted].float().mean()))


@pytest.mark.parametrize("loss", [models_own_loss, functional.cross_entropy])
def test_micro_batches_of_unlike_numbers_of_tokens_give_the_whole_gradient(loss: Any) -> None:
    rows = texts(6, language=True)
    module = seeded(language_model)
    module(**batch_of(rows)).loss.backward()
    expected = torch.cat([p.grad.ravel() for p in module.parameters()])
    model = FlatModel(seeded(language_model))
    positions = [torch.arange(EXAMPLES)]
    objective = ModelObjective(model, loss, as_client_data(rows), positions, micro_batch_size=3)
    (batch,) = objective.batches()
    found = objective.gradient(model.vector.clone(), batch)
    assert torch.linalg.vector_norm(found - expected) <= 1e-6 * torch.linalg.vector_norm(expected)


def test_tied_weights_are_one_and_stay_tied(tmp_path: Path) -> None:
    module = seeded(language_model)
    expected = sum({p.data_ptr(): p.numel() for p in module.parameters()}.values())
    data = [texts(seed, language=True) for seed in range(3)]
    config = settings(**OWN_LOSS, output={"directory": str(tmp_path / "run")})
    result = simulate(config, lambda: seeded(language_model), data)
    assert result.parameters.size == expected == FlatModel(module).size
    assert result.model.lm_head.weight is result.model.transformer.wte.weight
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "run" / "pretrained")
    torch.testing.assert_close(flat(again), torch.from_numpy(result.parameters), rtol=0, atol=0)
    weights = {"loss": "model", "weights": str(tmp_path / "run" / "model.safetensors")}
    config = settings(model=weights)
    config["algorithm"]["client_learning_rate"] = 1e-30  # moves nothing
    continued = simulate(config, language_model, data)
    np.testing.assert_array_equal(continued.parameters, result.parameters)


FRESH = """
import json, sys
import torch
from peft import PeftModel
from transformers import GPT2ForSequenceClassification

base = GPT2ForSequenceClassification.from_pretrained(sys.argv[1])
model = PeftModel.from_pretrained(base, sys.argv[2]).eval()
batch = {name: torch.tensor(rows) for name, rows in json.load(open(sys.argv[3])).items()}
with torch.no_grad():
    print(float(model(**batch).loss))
"""


def test_an_adapter_travels_alone_and_loads_with_plain_peft(tmp_path: Path) -> None:
    seeded(classifier).save_pretrained(tmp_path / "base")

    def adapted() -> nn.Module:
        base = transformers.GPT2ForSequenceClassification.from_pretrained(tmp_path / "base")
        lora = peft.LoraConfig(
            task_type="SEQ_CLS", r=2, target_modules=["c_attn"], fan_in_fan_out=True
        )
        return peft.get_peft_model(base, lora)

    module = adapted()
    trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
    assert {"lora_A", "lora_B", "modules_to_save"} <= {
        part for n in trainable for part in n.split(".")
    }
    data, test = [texts(seed) for seed in range(3)], texts(9)
    config = settings(
        **OWN_LOSS,
        output={"directory": str(tmp_path / "run")},
    )
    config["federation"]["num_rounds"] = 5
    result = simulate(config, adapted, data, test)
    assert result.parameters.size == sum(p.numel() for p in trainable.values())
    assert result.summary["failures"] == 0
    assert result.rounds[-1].train_loss < result.rounds[0].train_loss
    uplink = result.rounds[0].uplink_bytes / 3
    assert 0 <= uplink - 4 * result.parameters.size <= 256
    batch = {name: values.tolist() for name, values in batch_of(test).items()}
    (tmp_path / "batch.json").write_text(json.dumps(batch))
    places = [tmp_path / "base", tmp_path / "run" / "pretrained", tmp_path / "batch.json"]
    command = [sys.executable, "-W", "ignore", "-c", FRESH, *map(str, places)]
    fresh = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert float(fresh.stdout) == pytest.approx(result.rounds[-1].test_loss, rel=1e-6)
    sizes = [
        path.stat().st_size for path in (tmp_path / "run" / "pretrained").glob("*.safetensors")
    ]
    assert sum(sizes) < 8 * result.parameters.size


def test_a_base_in_bfloat16_stays_so_and_its_adapter_trains() -> None:
    def adapted() -> nn.Module:
        base = seeded(language_model).to(torch.bfloat16)
        lora = peft.LoraConfig(
            task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True
        )
        return peft.get_peft_model(base, lora)

    data = [texts(seed, language=True) for seed in range(3)]
    config = settings(**OWN_LOSS)
    config["training"]["precision"] = "bf16"
    config["federation"]["num_rounds"] = 4
    result = simulate(config, adapted, data)
    assert result.rounds[-1].train_loss < result.rounds[0].train_loss
    frozen = {p.dtype for p in result.model.parameters() if not p.requires_grad}
    assert (frozen, result.parameters.dtype) == ({torch.bfloat16}, np.float32)


OWN = """
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        shape = GPT2Config(
            vocab_size=100, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=0,
            eos_token_id=0
        )
        lora = LoraConfig(
            task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True
        )
        self.adapted = get_peft_model(GPT2LMHeadModel(shape).to(torch.bfloat16), lora)

    def forward(self, ids):
        return self.adapted(input_ids=ids).logits.float()

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs[:, :-1].flatten(0, 1), targets[:, 1:].flatten())

def hits(outputs, targets):
    return (outputs[:, :-1].argmax(-1) == targets[:, 1:]).float().mean()

def load(num_clients, seed):
    ids = torch.randint(5, 100, (24, 12), generator=torch.Generator().manual_seed(0))
    return [TensorDataset(ids, ids)] * num_clients, TensorDataset(ids, ids)
"""


def test_an_adapter_inside_a_module_of_ones_own_trains_from_the_command_line(
    tmp_path: Path,
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    sections = {
        "algorithm": {"name": "scaffold", "client_learning_rate": 0.5},
        "federation": {"num_clients": 2, "clients_per_round": 2, "num_rounds": 2},
        "training": {"local_steps": 2, "batch_size": 8},
        "data": {"name": "own:load"},
        "model": {"name": "own:Lora", "loss": "own:loss", "metric": "own:hits"},
        "output": {"directory": "run"},
    }
    (tmp_path / "lora.toml").write_text(tomli_w.dumps(sections))
    ended = fedopt("simulate", "lora.toml", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    lines = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    first, *_, last = (json.loads(line) for line in lines)
    assert last["failures"] == 0
    assert last["test_loss"] < first["test_loss"]
    saved = load_file(tmp_path / "run" / "model.safetensors")
    kinds = {"lora_" in name: value.dtype for name, value in saved.items()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    size = sum(value.numel() for name, value in saved.items() if "lora_" in name)
    assert 0 <= last["uplink_bytes"] - 2 * 4 * size <= 512  # of the two clients


def compiled() -> nn.Module:
    return torch.compile(nn.Sequential(linear_model()), backend="eager")


def test_a_compiled_module_trains_to_the_same_bits_under_its_own_names(tmp_path: Path) -> None:
    data = three_datasets()
    plain = simulate(small_config(), lambda: nn.Sequential(linear_model()), data, data[0])
    config = small_config(output={"directory": str(tmp_path / "run")})
    result = simulate(config, compiled, data, data[0])
    assert result.parameters.tobytes() == plain.parameters.tobytes()
    assert isinstance(result.model, torch._dynamo.OptimizedModule)
    assert set(load_file(tmp_path / "run" / "model.safetensors")) == {"0.weight", "0.bias"}
    weights = str(tmp_path / "run" / "model.safetensors")
    config = small_config(model={"weights": weights})
    config["algorithm"]["client_learning_rate"] = 1e-30  # moves nothing
    continued = simulate(config, compiled, data)
    np.testing.assert_array_equal(continued.parameters, result.parameters)
    local = small_config()
    local["federation"]["local_parameters"] = ["0.bias"]
    assert simulate(local, compiled, data).parameters.size == CLASSES * FEATURES


class Averaging(nn.Module):
    """Names a part of the columns, as models of one's own do, and no labels."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        shares = attention_mask.float() / attention_mask.sum(1, keepdim=True)
        return (self.embedding(input_ids) * shares[..., None]).sum(1)


def test_a_module_of_ones_own_gets_the_columns_that_it_names() -> None:
    data = [texts(seed) for seed in range(3)]
    config = settings()
    config["federation"]["num_rounds"] = 10
    result = simulate(config, lambda: seeded(Averaging), data, data[0])
    assert result.summary["failures"] == 0
    assert result.rounds[-1].train_loss < result.rounds[0].train_loss


def test_a_single_column_is_the_argument_whatever_its_name() -> None:
    pairs = three_datasets()
    rows = [[{"signal": x, "label": y} for x, y in dataset] for dataset in pairs]
    expected = simulate(small_config(), linear_model, pairs, pairs[0])
    result = simulate(small_config(), linear_model, rows, rows[0])
    assert result.parameters.tobytes() == expected.parameters.tobytes()
    assert result.rounds[-1].test_accuracy == expected.rounds[-1].test_accuracy


def without(column: str) -> list[list[dict[str, Any]]]:
    rows = [texts(seed) for seed in range(3)]
    return [[{k: v for k, v in row.items() if k != column} for row in part] for part in rows]


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(
        DataError, match=r"columns \['attention_mask', 'input_ids', 'text'\] withou"
    ):
        simulate(settings(), classifier, without("label"))
    with pytest.raises(
        ConfigError, match=r"forward takes \['input'\]; the data's columns are \['at"
    ):
        simulate(settings(), linear_model, without("text"))
    with pytest.raises(ConfigError, match=r"model.loss: failed.*returned no loss of its own"):
        simulate(settings(**OWN_LOSS), linear_model, three_datasets())


class Pair(nn.Module):
    """Takes one column of any name, and its labels; returns a plain dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear_model()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        scores = self.inner(x)
        return {"loss": functional.cross_entropy(scores, labels), "logits": scores}


@pytest.mark.parametrize("loss", ["model", "cross_entropy"])
def test_a_model_may_take_labels_beside_its_only_column_and_return_a_dict(loss: str) -> None:
    pairs = three_datasets()
    rows = [[{"signal": x, "label": y, "title": "a"} for x, y in dataset] for dataset in pairs]
    expected = simulate(small_config(), linear_model, pairs, pairs[0])
    result = simulate(small_config(model={"loss": loss}), Pair, rows, rows[0])
    assert result.parameters.tobytes() == expected.parameters.tobytes()
    assert result.rounds[-1].test_accuracy == expected.rounds[-1].test_accuracy


def test_a_prompt_that_is_learned_is_no_part_of_the_scores() -> None:
    def prompted() -> nn.Module:
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
        return peft.get_peft_model(seeded(longer_language_model), config)

    data = [texts(seed, language=True) for seed in range(3)]
    config = settings(**OWN_LOSS)
    config["evaluation"] = {"metrics": ["perplexity"]}
    last = simulate(config, prompted, data, data[0]).rounds[-1]
    assert last.test_metrics["perplexity"] == pytest.approx(np.exp(last.test_loss), rel=1e-5)


def longer_language_model() -> nn.Module:
    config = config_of()
    config.n_positions = LENGTH + 2
    return transformers.GPT2LMHeadModel(config)


def test_a_class_that_the_model_lacks_is_named_before_its_own_loss_meets_it() -> None:
    rows = [texts(seed) for seed in range(3)]
    rows[1][0]["label"] = 3
    data = [datasets.Dataset.from_list(part) for part in rows]
    with pytest.raises(DataError, match="client 1: has an example of class 3; the model has 3 out"):
        simulate(settings(**OWN_LOSS), classifier, data)


def test_weights_of_a_tied_model_as_it_saves_itself_are_whole(tmp_path: Path) -> None:
    module = seeded(language_model)
    module.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    other = language_model()
    load_weights(other, tmp_path / "model.safetensors")
    assert torch.equal(flat(other), flat(module))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of the compiler
def test_an_adapter_of_a_compiled_base_is_saved_as_an_adapter(tmp_path: Path) -> None:
    def adapted() -> nn.Module:
        base = torch.compile(seeded(language_model), backend="eager")
        lora = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        return peft.get_peft_model(base, lora)

    data = [texts(seed, language=True) for seed in range(3)]
    simulate(settings(**OWN_LOSS, output={"directory": str(tmp_path / "run")}), adapted, data)
    names = {path.name for path in (tmp_path / "run" / "pretrained").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names


class Saving(nn.Linear):
    def save_pretrained(self, path: str) -> None:
        Path(path).mkdir()
        torch.save(self.state_dict(), Path(path) / "own.pt")


class Failing(nn.Linear):
    def save_pretrained(self, path: str) -> None:
        raise ConnectionError("no hub")


def test_a_save_pretrained_of_any_kind_is_called_and_its_failure_is_a_warning(
    tmp_path: Path,
) -> None:
    data = three_datasets()
    config = small_config(output={"directory": str(tmp_path / "one")})
    result = simulate(config, lambda: Saving(FEATURES, CLASSES), data)
    own = torch.load(tmp_path / "one" / "pretrained" / "own.pt")
    torch.testing.assert_close(own["weight"], result.model.weight, rtol=0, atol=0)
    assert own["weight"].untyped_storage().nbytes() == 4 * own["weight"].numel()
    config = small_config(output={"directory": str(tmp_path / "two")})
    with pytest.warns(FedoptWarning, match="pretrained: not written: ConnectionError: no hub"):
        simulate(config, lambda: Failing(FEATURES, CLASSES), data)
    assert (tmp_path / "two" / "summary.json").exists()

"""Data sets of `datasets` and flwr-datasets, as objects, from one's own loader and by name."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from helpers import FEATURES, linear_model, small_config, three_datasets
from torch.utils.data import Subset, TensorDataset

from fedopt_flwr import ConfigError, DataError, RunConfig, simulate
from fedopt_flwr.data import as_client_data, load_client_data, load_federated_data
from fedopt_flwr.training.dry_run import UnknownClassError

datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers", reason="needs the extra 'text'")

# `datasets` leaves files open that it has read
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

CPU = torch.device("cpu")
TITLES = ["good film", "bad film", "a good day", "bad bad luck", "film day", "luck is good"] * 3
CLASSES_OF = [1, 0, 1, 0, 0, 1] * 3


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What `datasets` keeps lies here, and no hub is asked."""
    import huggingface_hub.constants

    folder = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    yield folder
    gc.collect()  # so that no later test hears of those files


def as_table(dataset: TensorDataset, **more: list[Any]) -> Any:
    x, y = dataset.tensors
    return datasets.Dataset.from_dict({"signal": x.tolist(), "label": y.tolist(), **more})


def test_tables_give_the_bits_of_tensors() -> None:
    pairs = three_datasets()
    tables = [as_table(dataset) for dataset in pairs]
    expected = simulate(small_config(), linear_model, pairs, pairs[0])
    result = simulate(small_config(), linear_model, tables, tables[0])
    assert result.parameters.tobytes() == expected.parameters.tobytes()
    assert result.rounds[-1].test_loss == expected.rounds[-1].test_loss


def test_a_tables_own_transform_counts() -> None:
    table = as_table(three_datasets()[0])
    doubled = table.with_transform(
        lambda rows: {
            "signal": [2 * torch.tensor(row) for row in rows["signal"]],
            "labels": rows["label"],
        }
    )
    found, plain = (
        next(as_client_data(data).batches([torch.tensor([3])], CPU)) for data in (doubled, table)
    )
    torch.testing.assert_close(found[0]["signal"], 2 * plain[0]["signal"])
    assert int(found[1]) == int(plain[1])


def whole(pairs: list[TensorDataset]) -> TensorDataset:
    return TensorDataset(*(torch.cat(parts) for parts in zip(*(p.tensors for p in pairs))))  # noqa: B905


def test_a_dataset_dict_is_divided_as_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, test = whole(three_datasets(20)), three_datasets()[1]
    both = datasets.DatasetDict({"train": as_table(train), "test": as_table(test)})
    result = simulate(small_config(), linear_model, both)
    both.save_to_disk(tmp_path / "saved")
    by_name = small_config(
        data={"name": "huggingface", "options": {"dataset": str(tmp_path / "saved")}}
    )
    torch.save((train.tensors, test.tensors), tmp_path / "tensors")
    (tmp_path / "myloader.py").write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\n"
        f"def load(**_):\n    parts = torch.load({str(tmp_path / 'tensors')!r})\n"
        "    return [TensorDataset(*p) for p in parts]\n"
    )
    monkeypatch.chdir(tmp_path)
    expected = simulate(small_config(data={"name": "myloader:load"}), linear_model)
    for found in (result, simulate(by_name, linear_model)):
        assert found.parameters.tobytes() == expected.parameters.tobytes()
        assert found.rounds[-1].test_loss == expected.rounds[-1].test_loss


def saved_csv(folder: Path, *, test: bool = True) -> Path:
    folder.mkdir()
    for part, count in (("train", 18), ("test", 6)):
        rows = [f"{title},{kind}" for title, kind in zip(TITLES, CLASSES_OF, strict=True)]
        if part == "train" or test:
            (folder / f"{part}.csv").write_text("\n".join(["title,label", *rows[:count]]) + "\n")
    return folder


def federated(folder: Path, count: int) -> Any:
    from flwr_datasets import FederatedDataset
    from flwr_datasets.partitioner import DirichletPartitioner

    partitioner = DirichletPartitioner(
        num_partitions=count, partition_by="label", alpha=1.0, min_partition_size=1
    )
    return FederatedDataset(dataset=str(folder), partitioners={"train": partitioner})


@pytest.mark.filterwarnings("ignore:The currently tested dataset")
def test_flwr_datasets_partitioner_divides(tmp_path: Path, fast_tokenizer: Path) -> None:
    made = federated(saved_csv(tmp_path / "csv"), 3)
    expected = [sorted(made.load_partition(i, "train")["label"]) for i in range(3)]
    from fedopt_flwr.data import from_datasets

    data = from_datasets(made, None, RunConfig(**small_config()))
    assert [sorted(part.targets().tolist()) for part in data.clients] == expected
    assert data.test is not None
    assert data.test.num_examples == 6
    without = from_datasets(
        federated(saved_csv(tmp_path / "half", test=False), 3), None, RunConfig(**small_config())
    )
    assert without.test is None
    with pytest.raises(DataError, match=r"got 4; the FederatedDataset's.*makes 3 partitions"):
        from_datasets(made, None, RunConfig(**small_config(4)))


@pytest.mark.filterwarnings("ignore:The currently tested dataset")
@pytest.mark.parametrize("is_own_kind", [False, True])
def test_any_partitioner_and_any_kind_of_federated_dataset(
    is_own_kind: bool, tmp_path: Path
) -> None:
    from flwr_datasets import FederatedDataset
    from flwr_datasets.partitioner import IidPartitioner

    from fedopt_flwr.data import from_datasets

    class OwnKind(FederatedDataset):  # type: ignore[misc]
        """As one with another way to load."""

    kind = OwnKind if is_own_kind else FederatedDataset
    partitioners = {"train": IidPartitioner(num_partitions=3)}
    made = kind(dataset=str(saved_csv(tmp_path / "csv")), partitioners=partitioners, shuffle=False)
    data = from_datasets(made, None, RunConfig(**small_config()))
    found = [part.targets().tolist() for part in data.clients]
    assert found == [CLASSES_OF[:6], CLASSES_OF[6:12], CLASSES_OF[12:]]


@pytest.fixture
def fast_tokenizer(tmp_path: Path) -> Path:
    """A tokenizer whose word numbers are known: 0 padding, 1 unknown, then good, bad, film, day."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[PAD]", "[UNK]", "good", "bad", "film", "day"]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    )
    fast.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def text_config(folder: Path, words: Path, **options: Any) -> RunConfig:
    own = {"dataset": str(folder), "text": "title", "tokenizer": str(words), "length": 4}
    own = {name: value for name, value in (own | options).items() if value is not None}
    data = {"name": "huggingface", "options": own, "partition": {"kind": "iid"}}
    return RunConfig(**small_config(data=data))


def test_texts_are_tokenised_once(tmp_path: Path, fast_tokenizer: Path, cache: Path) -> None:
    config = text_config(saved_csv(tmp_path / "csv"), fast_tokenizer)
    data = load_federated_data(config)
    assert data.test is not None
    inputs, targets = next(data.test.batches([torch.arange(3)], CPU))
    assert inputs["input_ids"].tolist() == [[2, 4, 0, 0], [3, 4, 0, 0], [1, 2, 5, 0]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]
    assert targets.tolist() == [1, 0, 1]
    kinds = np.concatenate([part.targets() for part in data.clients])
    assert sorted(kinds.tolist()) == sorted(CLASSES_OF)
    written = {path: path.stat().st_mtime_ns for path in cache.rglob("cache-*.arrow")}
    assert len(written) == 2
    (tmp_path / "run.toml").write_text(tomli_w.dumps(config.to_dict()))
    again = f"""
from fedopt_flwr import RunConfig
from fedopt_flwr.data import load_federated_data
print(load_federated_data(RunConfig.from_file({str(tmp_path / "run.toml")!r})).test.num_examples)
"""
    found = subprocess.check_output(
        [sys.executable, "-W", "ignore", "-c", again],
        env=os.environ | {"HF_DATASETS_CACHE": str(cache), "HF_HUB_OFFLINE": "1"},
        text=True,
    )
    assert found.split() == ["6"]
    assert {p: p.stat().st_mtime_ns for p in cache.rglob("cache-*.arrow")} == written


def test_texts_without_classes_are_their_own_targets(tmp_path: Path, fast_tokenizer: Path) -> None:
    lines = "\n".join(TITLES)
    for part in ("train", "test"):
        (tmp_path / f"{part}.txt").write_text(lines)
    files = {part: str(tmp_path / f"{part}.txt") for part in ("train", "test")}
    config = text_config(Path("text"), fast_tokenizer, text="text", data_files=files)
    data = load_federated_data(config)
    assert data.test is not None
    _, targets = next(data.test.batches([torch.arange(2)], CPU))
    assert targets.tolist() == [[2, 4, -100, -100], [3, 4, -100, -100]]


def test_a_run_on_texts_by_name_learns_them(tmp_path: Path, fast_tokenizer: Path) -> None:
    (tmp_path / "mytext.py").write_text(
        "from transformers import GPT2Config, GPT2ForSequenceClassification\n"
        "def make():\n"
        "    return GPT2ForSequenceClassification(GPT2Config(vocab_size=6, n_positions=4, "
        "n_embd=8, n_layer=1, n_head=1, num_labels=2, pad_token_id=0, use_cache=False, "
        "resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))\n"
    )
    config = text_config(saved_csv(tmp_path / "csv"), fast_tokenizer).to_dict()
    config["model"] = {"name": "mytext:make", "loss": "model"}
    config["federation"]["num_rounds"] = 40
    config["algorithm"] = {"name": "fedavg", "client_learning_rate": 0.5}
    result = simulate(RunConfig(**config).looking_in(tmp_path))
    assert result.rounds[-1].test_accuracy == 1.0


def test_images_become_numbers(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (9, 8, 8, 3), dtype=np.uint8)
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(2)})
    table = datasets.Dataset.from_dict(
        {"img": list(images), "label": [0, 1, 1] * 3}, features=features
    )
    inputs, targets = next(as_client_data(table).batches([torch.tensor([1, 4])], CPU))
    expected = torch.from_numpy(images[[1, 4]]).permute(0, 3, 1, 2) / 255
    torch.testing.assert_close(inputs["img"], expected)
    assert targets.tolist() == [1, 1]
    result = simulate(small_config(model={"name": "cnn"}), None, [table] * 3, table)
    assert result.summary["failures"] == 0  # a model made for [3, 8, 8] and two classes


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dataset": "no/such"}, "data.options.dataset: 'no/such' cannot be loaded"),
        ({"test": "dev"}, r"data.options.test: .* has no split 'dev'; it has \['test', 'train'\]"),
        (
            {"label": "kind"},
            r"label: got 'kind'; the columns are \['label', 'title'\]",
        ),
        ({"text": "body"}, r"text: got 'body'; the columns are \['labels', 'title'\]"),
        ({"length": 0}, "data.options.length: got 0; must be from 1 to"),
        ({"tokenizer": None}, "data.options.tokenizer: none is given"),
        ({"tokenizer": "no/such"}, "data.options.tokenizer: 'no/such' cannot be loaded"),
        ({"colour": 1}, "unknown 'colour'; Known: data_files, dataset"),
    ],
)
def test_options_that_cannot_be_are_refused(
    options: dict[str, Any], text: str, tmp_path: Path, fast_tokenizer: Path
) -> None:
    config = text_config(saved_csv(tmp_path / "csv"), fast_tokenizer, **options)
    with pytest.raises((ConfigError, DataError), match=text):
        load_federated_data(config)


def test_a_dataset_dict_without_a_training_part_is_refused() -> None:
    with pytest.raises(DataError, match=r"has the splits \['test'\]; one must be 'train'"):
        simulate(
            small_config(),
            linear_model,
            datasets.DatasetDict({"test": as_table(three_datasets()[0])}),
        )


def test_a_class_that_the_model_lacks_is_found_in_a_table_too() -> None:
    table = as_table(three_datasets()[0]).map(lambda row: {"label": row["label"] + 7})
    with pytest.raises(UnknownClassError, match="the model has 3 outputs"):
        simulate(small_config(), linear_model, [table] * 3)


def test_the_named_column_is_the_target_beside_another_label(tmp_path: Path) -> None:
    table = datasets.Dataset.from_dict(
        {"signal": [[0.0] * FEATURES] * 6, "kind": [0, 1, 2] * 2, "label": [7] * 6}
    )
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(tmp_path / "saved")
    options = {"dataset": str(tmp_path / "saved"), "label": "kind"}
    data = {"name": "huggingface", "options": options, "partition": {"kind": "iid"}}
    part = load_federated_data(RunConfig(**small_config(data=data))).clients[0]
    _, targets = next(part.batches([torch.arange(part.num_examples)], CPU))
    assert targets.tolist() == part.targets().tolist()
    assert max(targets.tolist()) < 3


def test_labels_that_a_tables_transform_makes_count_everywhere() -> None:
    table = datasets.Dataset.from_dict(
        {"signal": [[0.5] * FEATURES] * 9, "label": list(range(9))}
    ).with_transform(
        lambda rows: {
            "signal": torch.tensor(rows["signal"]),
            "labels": torch.tensor(rows["label"]) % 3,
        }
    )
    assert as_client_data(table).targets().tolist() == [0, 1, 2] * 3
    result = simulate(small_config(), linear_model, [table] * 3)
    assert result.summary["failures"] == 0


def test_a_part_of_a_table_is_one(tmp_path: Path) -> None:
    pairs = three_datasets()
    parts = [Subset(as_table(whole([dataset, dataset])), range(9)) for dataset in pairs]
    expected = simulate(small_config(), linear_model, pairs, pairs[0])
    result = simulate(small_config(), linear_model, parts, parts[0])
    assert result.parameters.tobytes() == expected.parameters.tobytes()
    nested = [Subset(Subset(part.dataset, range(9, 18)), range(9)) for part in parts]
    result = simulate(small_config(), linear_model, nested, nested[0])
    assert result.parameters.tobytes() == expected.parameters.tobytes()


def test_labels_that_a_collate_function_makes_count() -> None:
    rows = {"signal": [[0.5] * FEATURES] * 9, "label": [1, 2, 3] * 3}
    table = datasets.Dataset.from_dict(rows)

    def collate(examples: list[Any]) -> Any:
        labels = torch.tensor([example["label"] - 1 for example in examples])
        return torch.stack([torch.as_tensor(e["signal"]) for e in examples]), labels

    result = simulate(small_config(), linear_model, [table] * 3, collate=collate)
    assert result.summary["failures"] == 0


def test_images_of_any_mode_are_colours_or_greys_and_other_columns_do_no_harm() -> None:
    from PIL import Image

    red = Image.new("RGB", (4, 4), (255, 0, 0))
    modes = [red.convert("P"), red, red.convert("RGBA")]
    features = datasets.Features(
        {"img": datasets.Image(), "file": datasets.Value("string"), "label": datasets.Value("int8")}
    )
    rows = {"img": modes, "file": ["a", "b", None], "label": [0, 1, 1]}
    table = datasets.Dataset.from_dict(rows, features=features)
    for place in range(3):
        read = table.select([place]) if place < 2 else table.select([0, 1])
        inputs, _ = next(as_client_data(read).batches([torch.tensor([0])], CPU))
        assert inputs["img"][0, :, 0, 0].tolist() == [1.0, 0.0, 0.0]
        assert inputs.alone is inputs["img"]
    deep = Image.fromarray(np.full((4, 4), 60000, np.uint16))
    table = datasets.Dataset.from_dict({"img": [deep], "label": [0]}).cast_column(
        "img", datasets.Image()
    )
    inputs, _ = next(as_client_data(table).batches([torch.tensor([0])], CPU))
    torch.testing.assert_close(inputs["img"][0, 0, 0, 0], torch.tensor(60000 / 65535))


def test_labels_that_are_texts_are_named() -> None:
    table = datasets.Dataset.from_dict({"signal": [[0.0] * 4], "label": ["cat"]})
    with pytest.raises(DataError, match=r"'label' holds texts.*class_encode_column\('label'\)"):
        as_client_data(table)


def test_a_text_without_a_next_word_is_left_out(tmp_path: Path, fast_tokenizer: Path) -> None:
    for part in ("train", "test"):
        (tmp_path / f"{part}.txt").write_text("\n".join([*TITLES, "", "day", ""]))
    files = {part: str(tmp_path / f"{part}.txt") for part in ("train", "test")}
    config = text_config(Path("text"), fast_tokenizer, text="text", data_files=files)
    data = load_federated_data(config)
    assert sum(part.num_examples for part in data.clients) == len(TITLES)


def test_a_client_needs_no_test_part(tmp_path: Path) -> None:
    table = as_table(three_datasets()[0])
    datasets.DatasetDict({"train": table}).save_to_disk(tmp_path / "saved")
    data = {"name": "huggingface", "options": {"dataset": str(tmp_path / "saved")}}
    config = RunConfig(**small_config(data=data | {"partition": {"kind": "whole"}}))
    own = load_client_data(config.data, config.federation, [1])[1]
    assert own.train.num_examples == 9
    with pytest.raises(DataError, match=r"data.name: 'huggingface' has no test part"):
        load_federated_data(config)

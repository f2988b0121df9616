"""Data sets of Hugging Face's `datasets` and flwr-datasets: a user's objects, or by name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import DataError
from ..own_code import described
from ..problems import needing
from .client_data import AS_TORCH, DatasetData, Loading, Source

_NO_TARGET = -100  # that losses leave out
_LONGEST = 10**6


def is_hugging_face(dataset: Any, name: str) -> bool:
    """Whether this is the class of that name in `datasets` or flwr-datasets, or of a kind of it."""
    own = ("datasets.", "flwr_datasets.")
    kinds = type(dataset).__mro__
    return any(k.__name__ == name and k.__module__.startswith(own) for k in kinds)


def wrap_table(table: Any, loading: Loading = AS_TORCH) -> DatasetData:
    """Wrap a `datasets.Dataset`; one without a format or transform of its own gives tensors.

    DataError where its labels are texts.
    """
    labels = next((name for name in ("labels", "label") if name in table.column_names), None)
    kind = "" if labels is None else str(getattr(table.features[labels], "dtype", ""))
    has_own = table.format["type"] == "custom"  # whose labels may be others
    if kind == "string" and not has_own:
        raise DataError(
            f"data set: its column {labels!r} holds texts; give numbers, for example by "
            f"dataset.class_encode_column({labels!r})"
        )
    is_class = "int" in kind and not has_own
    known = np.asarray(table.with_format("numpy")[labels][:]) if is_class else None
    if table.format["type"] is None:
        images = [name for name, kind in table.features.items() if type(kind).__name__ == "Image"]
        own = partial(_with_images, images)
        table = table.with_transform(own) if images else table.with_format("torch")
    return DatasetData(table, known, loading)


def split_source(given: Any, num_clients: int | str, loading: Loading) -> Source | None:
    """Return both parts of a DatasetDict, or of flwr-datasets' FederatedDataset, whose partitioner
    has divided the training part; None for anything else.

    Raises DataError where the training part is missing or divided among another number of clients.
    """
    if is_hugging_face(given, "DatasetDict"):
        if "train" not in given:
            raise DataError(f"DatasetDict: has the splits {sorted(given)}; one must be 'train'")
        return Source(given["train"], given.get("test"), loading=loading)
    if not is_hugging_face(given, "FederatedDataset"):
        return None
    if num_clients == "open":
        raise DataError(
            "federation.num_clients: got 'open'; a FederatedDataset is divided among a fixed "
            "number of clients; give it, or let a client's data be its own"
        )
    try:
        first = given.load_partition(0, "train")
        count = given.partitioners["train"].num_partitions
        if count != num_clients:
            raise DataError(
                f"federation.num_clients: got {num_clients}; the FederatedDataset's partitioner of "
                f"'train' makes {count} partitions; make the two equal"
            )
        parts = [first, *(given.load_partition(i, "train") for i in range(1, count))]
    except (ValueError, KeyError, OSError) as error:
        raise DataError(
            f"FederatedDataset: its split 'train' cannot be read: {described(error)}"
        ) from error
    try:
        return Source(parts, given.load_split("test"), loading=loading)
    except ValueError:  # there is none
        return Source(parts, None, loading=loading)


def huggingface(
    dataset: str,
    subset: str | None = None,
    data_files: Any = None,
    train: str = "train",
    test: str | None = None,
    label: str | None = None,
    text: str | None = None,
    tokenizer: str | None = None,
    length: int = 128,
) -> Source:
    """Any data set that `datasets` loads: a name on the hub, a format such as "csv" with
    `data_files`, or a folder that `save_to_disk` wrote.

    Its parts are `train` and `test`, by default "test" where there is one. `label` names the column
    of targets, where that is not "label" or "labels". The column `text` is turned into `input_ids`
    and `attention_mask` of `length` tokens by the `tokenizer` (a name on the hub or a folder),
    once: `datasets` keeps the result in its cache. Without a column of targets they are the tokens
    themselves, for language models.
    """
    splits = _loaded(dataset, subset, data_files)
    names = [train, *([test] if test else [])]
    for part, name in zip(("train", "test"), names, strict=False):
        if name not in splits:
            raise DataError(
                f"data.options.{part}: {dataset!r} has no split {name!r}; it has {sorted(splits)}"
            )
    if test is None and "test" in splits:
        names.append("test")
    tables = [_with_labels(splits[name], label) for name in names]
    if text is not None:
        tables = [_tokenised(table, text, tokenizer, length) for table in tables]
    classes = getattr(tables[0].features.get("labels"), "num_classes", None)
    found = [wrap_table(table) for table in tables]
    return Source(found[0], found[1] if len(found) > 1 else None, classes)


def _loaded(dataset: str, subset: str | None, data_files: Any) -> Any:
    with needing("datasets", "data.name: 'huggingface'"):
        import datasets
    try:
        if (Path(dataset) / "dataset_dict.json").exists():
            return datasets.load_from_disk(dataset)
        return datasets.load_dataset(dataset, subset, data_files=data_files)  # nosec B615  # as named
    except Exception as error:  # of its many own kinds
        raise DataError(
            f"data.options.dataset: {dataset!r} cannot be loaded: {described(error)}; must be a "
            "name on the hub (which needs a network), a format such as 'csv' with data_files, or a "
            "folder of a DatasetDict that save_to_disk wrote"
        ) from error


def _with_labels(table: Any, label: str | None) -> Any:
    if label is not None and label not in table.column_names:
        raise DataError(
            f"data.options.label: got {label!r}; the columns are {sorted(table.column_names)}"
        )
    name = label or "label"
    if name not in table.column_names or name == "labels":
        return table
    others = {"label", "labels"} - {name}  # which are no targets here
    table = table.remove_columns([other for other in others if other in table.column_names])
    return table.rename_column(name, "labels")


def _tokenised(table: Any, text: str, tokenizer: str | None, length: int) -> Any:
    if text not in table.column_names:
        raise DataError(
            f"data.options.text: got {text!r}; the columns are {sorted(table.column_names)}"
        )
    if not isinstance(length, int) or not 1 <= length <= _LONGEST:
        raise DataError(f"data.options.length: got {length!r}; must be from 1 to {_LONGEST}")
    encode = _tokenizer(tokenizer)
    has_labels = "labels" in table.column_names

    def encoded(rows: dict[str, list[Any]]) -> dict[str, Any]:
        columns = encode(rows[text], truncation=True, max_length=length, padding="max_length")
        found = {name: columns[name] for name in ("input_ids", "attention_mask")}
        if not has_labels:
            masks = zip(found["input_ids"], found["attention_mask"], strict=True)
            found["labels"] = [
                [token if here else _NO_TARGET for token, here in zip(*row, strict=True)]
                for row in masks
            ]
        return found

    others = [name for name in table.column_names if name != "labels"]
    if None in table[text][:]:
        raise DataError(
            f"data.options.text: column {text!r} has empty entries; fill or remove them"
        )
    try:
        found = table.map(encoded, batched=True, remove_columns=others)
        # of a text of one word nothing is predicted
        return found if has_labels else found.filter(_is_long_enough, batched=True)
    except OSError as error:
        raise DataError(
            f"data.options.text: what is tokenised cannot be kept: {error}; make room in the cache "
            "of `datasets` ($HF_DATASETS_CACHE), or in the data's own folder"
        ) from error


def _is_long_enough(rows: dict[str, list[Any]]) -> list[bool]:
    return [sum(row) > 1 for row in rows["attention_mask"]]


def _tokenizer(name: str | None) -> Any:
    if name is None:
        raise DataError(
            "data.options.tokenizer: none is given for data.options.text; name one on the hub, "
            "or a folder that save_pretrained wrote"
        )
    with needing("transformers", "data.options.tokenizer"):
        from transformers import AutoTokenizer
    try:
        found = AutoTokenizer.from_pretrained(name)  # nosec B615  # as the user named it
    except Exception as error:  # of its many own kinds
        raise DataError(
            f"data.options.tokenizer: {name!r} cannot be loaded: {described(error)}"
        ) from error
    if found.pad_token is None:
        found.pad_token = found.eos_token
    return found


def _with_images(names: list[str], rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Give images as float32 [channels, h, w] in [0, 1], numbers as tensors, the rest as it is."""
    return {
        name: [_pixels(value) if name in names else _number(value) for value in values]
        for name, values in rows.items()
    }


def _pixels(image: Any) -> torch.Tensor:
    from torchvision.transforms.functional import to_tensor

    if image.mode.startswith("I;16"):
        return torch.from_numpy(np.asarray(image, np.float32) / 65535)[None]
    plain = image if image.mode in ("L", "RGB") else image.convert("RGB")
    found: torch.Tensor = to_tensor(plain)
    return found


def _number(value: Any) -> Any:
    return torch.as_tensor(value) if isinstance(value, (int, float)) else value

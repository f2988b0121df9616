"""Data sets of Hugging Face's `datasets` and flwr-datasets: a user's objects, or by name."""

from __future__ import annotations

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
    """Whether this is `datasets`' class of that name, or of a kind of it."""
    kinds = type(dataset).__mro__
    return any(k.__name__ == name and k.__module__.startswith("datasets.") for k in kinds)


def wrap_table(table: Any, loading: Loading = AS_TORCH) -> DatasetData:
    """Wrap a `datasets.Dataset`; one without a format or transform of its own gives tensors."""
    labels = next((name for name in ("labels", "label") if name in table.column_names), None)
    is_class = labels is not None and "int" in str(getattr(table.features[labels], "dtype", ""))
    known = np.asarray(table.with_format("numpy")[labels][:]) if is_class else None
    if table.format["type"] is None:
        images = [name for name, kind in table.features.items() if type(kind).__name__ == "Image"]
        table = _with_images(table, images) if images else table.with_format("torch")
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
    if type(given).__name__ != "FederatedDataset":
        return None
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
    test: str = "test",
    label: str | None = None,
    text: str | None = None,
    tokenizer: str | None = None,
    length: int = 128,
) -> Source:
    """Any data set that `datasets` loads: a name on the hub, a format such as "csv" with
    `data_files`, or a folder that `save_to_disk` wrote.

    `label` names the column of targets, where that is not "label" or "labels". The column `text` is
    turned into `input_ids` and `attention_mask` of `length` tokens by the `tokenizer` (a name on
    the hub or a folder), once: `datasets` keeps the result in its cache. Without a column of
    targets they are the tokens themselves, for language models.
    """
    splits = _loaded(dataset, subset, data_files)
    for part, name in (("train", train), ("test", test)):
        if name not in splits:
            raise DataError(
                f"data.options.{part}: {dataset!r} has no split {name!r}; it has {sorted(splits)}"
            )
    tables = [_with_labels(splits[name], label) for name in (train, test)]
    if text is not None:
        tables = [_tokenised(table, text, tokenizer, length) for table in tables]
    classes = getattr(tables[0].features.get("labels"), "num_classes", None)
    return Source(wrap_table(tables[0]), wrap_table(tables[1]), classes)


def _loaded(dataset: str, subset: str | None, data_files: Any) -> Any:
    with needing("datasets", "data.name: 'huggingface'"):
        import datasets
    try:
        if (Path(dataset) / "dataset_dict.json").exists():
            return datasets.load_from_disk(dataset)
        return datasets.load_dataset(dataset, subset, data_files=data_files)
    except Exception as error:  # of its many own kinds
        raise DataError(
            f"data.options.dataset: {dataset!r} cannot be loaded: {described(error)}; must be a "
            "name on the hub (which needs a network), a format such as 'csv' with data_files, or a "
            "folder that save_to_disk wrote"
        ) from error


def _with_labels(table: Any, label: str | None) -> Any:
    if label is not None and label not in table.column_names:
        raise DataError(
            f"data.options.label: got {label!r}; the columns are {sorted(table.column_names)}"
        )
    name = label or "label"
    is_other = name in table.column_names and name != "labels"
    return table.rename_column(name, "labels") if is_other else table


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
    return table.map(encoded, batched=True, remove_columns=others)


def _tokenizer(name: str | None) -> Any:
    if name is None:
        raise DataError(
            "data.options.tokenizer: none is given for data.options.text; name one on the hub, "
            "or a folder that save_pretrained wrote"
        )
    with needing("transformers", "data.options.tokenizer"):
        from transformers import AutoTokenizer
    try:
        found = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # of its many own kinds
        raise DataError(
            f"data.options.tokenizer: {name!r} cannot be loaded: {described(error)}"
        ) from error
    if found.pad_token is None:
        found.pad_token = found.eos_token
    return found


def _with_images(table: Any, names: list[str]) -> Any:
    """Give images as float32 [channels, h, w] in [0, 1], and other columns as tensors."""
    from torchvision.transforms.functional import to_tensor

    def tensors(rows: dict[str, list[Any]]) -> dict[str, Any]:
        return {
            name: [
                to_tensor(value) if name in names else torch.as_tensor(value) for value in values
            ]
            for name, values in rows.items()
        }

    return table.with_transform(tensors)

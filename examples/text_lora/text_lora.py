"""20 Newsgroups with a small GPT-2 and LoRA: the data and the models of federation.toml.

Half of the training posts belong to nobody: `prepare.py` trains the tokeniser and the base model on
them. Clients share the other half, and the server tests on a fifth of the official test part.

With a hub in reach the base may be a published one, without `prepare.py`; one line differs:

    BASE = "distilgpt2"
"""

from __future__ import annotations

import json
import lzma
import os
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

BASE = str(Path(__file__).with_name("base"))  # prepare.py writes it
CLASSES, LENGTH = 20, 64


def posts(part: str) -> tuple[list[str], list[int]]:
    """Subjects and texts, without the rest of the header, and the groups in alphabetical order."""
    folder = Path(os.environ["FEDOPT_DATA"]) / "20Newsgroups"
    with lzma.open(folder / f"{part}.jsonl.xz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    groups = sorted({row["label"] for row in rows})
    texts = [subject_and_body(row["text"]) for row in rows]
    return texts, [groups.index(row["label"]) for row in rows]


def subject_and_body(post: str) -> str:
    header, _, body = post.partition("\n\n")
    subjects = [line for line in header.splitlines() if line.startswith("Subject:")]
    return "\n".join([*subjects, body])


def is_public(count: int) -> np.ndarray:
    """Which of the training posts no client holds, the same in every process."""
    return np.random.default_rng(20).permutation(count) < count // 2


def load(num_clients: int, seed: int) -> DatasetDict:
    """The clients' posts, which fedopt divides, and a fifth of the test posts, tokenised."""
    texts, groups = posts("train")
    public = is_public(len(texts))
    private = [row for row in zip(texts, groups, public, strict=True) if not row[2]]
    test = [part[::5] for part in posts("test")]  # which are sorted by group
    parts = {"train": list(zip(*private, strict=True))[:2], "test": test}
    return DatasetDict({name: tokenised(*part) for name, part in parts.items()})


def tokeniser() -> PreTrainedTokenizerBase:
    if Path(BASE).is_absolute() and not Path(BASE).is_dir():
        raise FileNotFoundError(f"{BASE} is not there; run prepare.py, which makes it")
    found = AutoTokenizer.from_pretrained(BASE)
    if found.pad_token is None:  # as published ones of GPT-2's kind
        found.pad_token = found.eos_token
    return found


def tokenised(texts: list[str], groups: list[int]) -> Dataset:
    encode = tokeniser()
    columns = encode(list(texts), truncation=True, max_length=LENGTH, padding="max_length")
    named = {name: columns[name] for name in ("input_ids", "attention_mask")}
    return Dataset.from_dict({**named, "labels": list(groups)})


def full() -> nn.Module:
    """Every parameter is trained and travels."""
    pad = tokeniser().pad_token_id  # by which the classifier finds a text's last token
    return AutoModelForSequenceClassification.from_pretrained(
        BASE, num_labels=CLASSES, pad_token_id=pad
    )


def lora(rank: int = 8) -> nn.Module:
    """Adapters of the attention and the new head are trained; they alone travel."""
    adapters = LoraConfig(
        task_type="SEQ_CLS",
        r=rank,
        lora_alpha=2 * rank,
        target_modules=["c_attn", "c_proj", "c_fc"],
        fan_in_fan_out=True,
    )
    return get_peft_model(full(), adapters)

"""The data and the model of untuned.py's tasks that the package does not have by name.

None of it depends on the seed, which divides what is not divided already.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
from collections import defaultdict
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.feature_extraction.text import TfidfVectorizer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

_MEANS = (0.4914, 0.4822, 0.4465)
_DEVIATIONS = (0.2470, 0.2435, 0.2616)
_WORDS = 5000
_LENGTH = 32  # characters of an example


def _folder() -> Path:
    return Path(os.environ["FEDOPT_DATA"])


@cache
def cifar(num_clients: int, seed: int) -> tuple[TensorDataset, TensorDataset]:
    """CIFAR-10, standardised; its files hold images as strips of 500, in lossless WebP."""
    return _cifar_part("train"), _cifar_part("test")


def _cifar_part(part: str) -> TensorDataset:
    with np.load(_folder() / "CIFAR10" / f"{part}.npz") as arrays:
        strips, ends, scale = arrays["strips"], arrays["offsets"], arrays["step"]
        targets = torch.from_numpy(arrays["labels"].astype(np.int64))
    files = (io.BytesIO(strips[a:b].tobytes()) for a, b in pairwise(ends))
    pixels = np.concatenate([np.asarray(Image.open(f)).reshape(-1, 32, 32, 3) for f in files])
    images = torch.from_numpy(pixels * scale.astype(np.uint8)).permute(0, 3, 1, 2).float().div_(255)
    means, deviations = (torch.tensor(v).view(1, 3, 1, 1) for v in (_MEANS, _DEVIATIONS))
    return TensorDataset(images.sub_(means).div_(deviations).contiguous(), targets)


def digits(num_clients: int, seed: int, by: float) -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's digits, divided as the package does, with inputs in [0, by]."""
    images, labels = load_digits(return_X_y=True)
    inputs = torch.from_numpy(images.astype(np.float32) / 16 * by).view(-1, 1, 8, 8)
    ranks = np.eye(10, dtype=np.int64)[labels].cumsum(axis=0)[np.arange(len(labels)), labels]
    test, targets = torch.from_numpy(ranks % 5 == 0), torch.from_numpy(labels)
    train, test_set = (TensorDataset(inputs[part], targets[part]) for part in (~test, test))
    return train, test_set


@cache
def newsgroups(num_clients: int, seed: int) -> tuple[TensorDataset, TensorDataset]:
    """20 Newsgroups by date: TF-IDF of the training posts' 5,000 most frequent words, norm 1."""
    (train, targets), (test, test_targets) = _posts("train"), _posts("test")
    vectors = TfidfVectorizer(
        max_features=_WORDS, stop_words="english", sublinear_tf=True, dtype=np.float32
    ).fit(train)
    inputs, test_inputs = (
        torch.from_numpy(vectors.transform(posts).toarray()) for posts in (train, test)
    )
    return TensorDataset(inputs, targets), TensorDataset(test_inputs, test_targets)


def _posts(part: str) -> tuple[list[str], Tensor]:
    with lzma.open(_folder() / "20Newsgroups" / f"{part}.jsonl.xz", "rt", encoding="utf-8") as file:
        posts = [json.loads(line) for line in file]
    groups = sorted({post["label"] for post in posts})
    return [p["text"] for p in posts], torch.tensor([groups.index(p["label"]) for p in posts])


@cache
def shakespeare(num_clients: int, seed: int) -> tuple[list[TensorDataset], TensorDataset]:
    """The roles that speak most, each one client; the last fifth of each one's text is the test.

    An example is 32 characters and the 32 that follow each of them.
    """
    with gzip.open(_folder() / "Shakespeare" / "tinyshakespeare.txt.gz", "rt") as file:
        text = file.read()
    alphabet = sorted(set(text))
    speeches: defaultdict[str, str] = defaultdict(str)
    for speech in text.split("\n\n"):
        role, colon, words = speech.partition(":\n")
        if colon:
            speeches[role] += f"{words}\n"
    longest = sorted(speeches.values(), key=len, reverse=True)[:num_clients]
    codes = [torch.tensor([alphabet.index(letter) for letter in words]) for words in longest]
    cuts = [len(code) * 4 // 5 for code in codes]
    train = [_windows(code[:cut]) for code, cut in zip(codes, cuts, strict=True)]
    test = [_windows(code[cut:]) for code, cut in zip(codes, cuts, strict=True)]
    parts = zip(*(part.tensors for part in test), strict=True)
    return train, TensorDataset(*map(torch.cat, parts))


def _windows(code: Tensor) -> TensorDataset:
    rows = (len(code) - 1) // _LENGTH
    return TensorDataset(*(code[i : i + rows * _LENGTH].view(rows, _LENGTH) for i in (0, 1)))


class NextCharacter(nn.Module):
    """An LSTM that says after each character which comes next: [n, L] to [n, characters, L]."""

    def __init__(self, characters: int = 65, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 16)
        self.lstm = nn.LSTM(16, width, batch_first=True)
        self.scores = nn.Linear(width, characters)

    def forward(self, text: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(text))
        scores: Tensor = self.scores(states)
        return scores.transpose(1, 2)

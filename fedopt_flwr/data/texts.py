"""Texts with two classes as rows of word numbers: SST-2, MR and IMDB."""

from __future__ import annotations

import csv
import gzip
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import torch

from ..errors import DataError
from .client_data import Source, TensorData
from .files import configured_root

Labelled = list[tuple[str, int]]  # texts and their classes, 0 negative and 1 positive
PADDING, UNKNOWN = 0, 1  # word numbers; the most frequent word has 2
_LARGEST_VOCABULARY = 10**6
_LONGEST = 10**5
_WORD = re.compile(r"\w+|[^\w\s]")


def sst2(path: Path | None, vocabulary: int = 10_000, length: int = 32) -> Source:
    """SST2/ or SST-2/ with train.tsv, and test.tsv or, where that has no labels, dev.tsv (.gz too).

    A header names the columns `label` and `text` or `sentence`.
    """
    folder = _folder(path, "sst2", "SST2", "SST-2")
    test = _read_tsv(folder / "test.tsv") or _read_tsv(folder / "dev.tsv")
    return _numbered(_read_tsv(folder / "train.tsv"), test, folder, vocabulary, length)


def mr(path: Path | None, vocabulary: int = 10_000, length: int = 32) -> Source:
    """MR/rt_polarity.tsv (.gz too), or rt-polaritydata/rt-polarity.pos and .neg as published.

    It has no division of its own: every tenth text of each class is for the test.
    """
    folder = _folder(path, "mr", "MR", "rt-polaritydata")
    texts = _read_tsv(folder / "rt_polarity.tsv") or [
        (line, label)
        for label, file in enumerate((folder / "rt-polarity.neg", folder / "rt-polarity.pos"))
        if file.exists()
        for line in file.read_text("latin-1").splitlines()
    ]
    train: Labelled = []
    test: Labelled = []
    for label in (0, 1):
        for place, item in enumerate(item for item in texts if item[1] == label):
            (test if place % 10 == 9 else train).append(item)
    return _numbered(train, test, folder, vocabulary, length)


def imdb(path: Path | None, vocabulary: int = 10_000, length: int = 256) -> Source:
    """aclImdb/ with train and test, pos and neg: a file for each review, as published."""
    folder = _folder(path, "imdb", "aclImdb")
    train, test = (
        [
            (_read_text(file), label)
            for label, kind in enumerate(("neg", "pos"))
            for file in sorted((folder / part / kind).glob("*.txt"))
        ]
        for part in ("train", "test")
    )
    return _numbered(train, test, folder, vocabulary, length)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(
            f"data file: {str(file)!r} cannot be read: {error}; must be UTF-8"
        ) from error


def _folder(path: Path | None, name: str, *folders: str) -> Path:
    root = configured_root(path)
    found = next((root / folder for folder in folders if (root / folder).is_dir()), None)
    if found is None:
        raise DataError(
            f"data.name: {name!r} is not in {str(root)!r}; it must hold a folder "
            f"{' or '.join(folders)}; put it there, or set data.path or $FEDOPT_DATA"
        )
    return found


def _read_tsv(file: Path) -> Labelled:
    """Return the rows of a table, plain or packed; none where it is absent or has no labels."""
    packed = file.with_name(f"{file.name}.gz")
    place = packed if packed.exists() else file
    if not place.exists():
        return []
    read: Callable[..., IO[str]] = gzip.open if place == packed else open
    try:
        with read(place, "rt", encoding="utf-8") as lines:
            rows = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
        if not rows or "label" not in rows[0]:
            return []
        column = "text" if "text" in rows[0] else "sentence"
        if any(row[column] is None for row in rows):
            raise ValueError("a line without a text")
        return [(row[column], ("0", "1").index(row["label"])) for row in rows]
    except (OSError, EOFError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise DataError(
            f"data file: {str(place)!r} cannot be read: {type(error).__name__}: {error}; must be "
            "UTF-8 with tabs, a header 'label' and 'text', and labels 0 or 1"
        ) from error


def _numbered(
    train: Labelled, test: Labelled, folder: Path, vocabulary: int, length: int
) -> Source:
    """Number the most frequent words of the training texts, and cut or pad texts to `length`."""
    for name, value, largest in (
        ("vocabulary", vocabulary, _LARGEST_VOCABULARY),
        ("length", length, _LONGEST),
    ):
        if not isinstance(value, int) or not 3 <= value <= largest:
            raise DataError(
                f"data.options.{name}: got {value!r}; must be a whole number from 3 to {largest}"
            )
    for part, texts in (("training", train), ("test", test)):
        if len({label for _, label in texts}) < 2:
            raise DataError(
                f"data files: the {part} part in {str(folder)!r} lacks a class, or is not there; "
                f"it has {len(texts)} texts; put back what is missing"
            )
    counts = Counter(word for text, _ in train for word in _words(text))
    frequent = counts.most_common(vocabulary - 2)
    numbers = {word: number for number, (word, _) in enumerate(frequent, 2)}
    return Source(_part(train, numbers, length), _part(test, numbers, length), 2)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _part(texts: Labelled, numbers: dict[str, int], length: int) -> TensorData:
    rows = [_row([numbers.get(w, UNKNOWN) for w in _words(text)], length) for text, _ in texts]
    return TensorData(torch.tensor(rows), torch.tensor([label for _, label in texts]))


def _row(words: Sequence[int], length: int) -> list[int]:
    cut = list(words[:length])
    return cut + [PADDING] * (length - len(cut))

"""Texts as word numbers, TinyImageNet's folders, standardised npz images."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedopt_flwr import ConfigError, DataError, RunConfig, simulate
from fedopt_flwr.data import FederatedData, load_federated_data
from fedopt_flwr.models.networks import lstm

CPU = torch.device("cpu")


def load(name: str, path: Path, **options: Any) -> FederatedData:
    partition = {"kind": "iid", "min_examples": 0}
    data = {"name": name, "path": str(path), "options": options, "partition": partition}
    federation = {"num_clients": 1, "clients_per_round": 1}
    return load_federated_data(RunConfig(data=data, federation=federation))


def examples(part: Any) -> tuple[list[Any], list[int]]:
    inputs, labels = next(part.batches([torch.arange(part.num_examples)], CPU))
    return inputs.tolist(), labels.tolist()


def write_sst2(folder: Path, *, packed: bool, labelled_test: bool) -> None:
    folder.mkdir(parents=True)
    train = 'label\ttext\n1\tGood, good film\n0\tbad film\n0\ta "bad bad bad\n'
    dev = "sentence\tlabel\nfilm good\t1\nunseen\t0\n"
    test = "label\ttext\n0\tbad\n1\tgood\n" if labelled_test else "index\tsentence\n0\tbad\n"
    for name, text in (("train", train), ("dev", dev), ("test", test)):
        file = folder / f"{name}.tsv"
        if packed:
            (folder / f"{name}.tsv.gz").write_bytes(gzip.compress(text.encode()))
        else:
            file.write_text(text)


def test_words_are_numbered_by_how_often_they_are_trained_on(tmp_path: Path) -> None:
    """By hand: bad 4, good 2 and film 2 in the order of their first; then , a and a quote."""
    write_sst2(tmp_path / "SST2", packed=True, labelled_test=True)
    data = load("sst2", tmp_path, vocabulary=6, length=5)
    rows, labels = examples(data.clients[0])
    by_row = dict(zip(map(tuple, rows), labels, strict=True))
    assert by_row == {(3, 5, 3, 4, 0): 1, (2, 4, 0, 0, 0): 0, (1, 1, 2, 2, 2): 0}
    assert examples(data.test) == ([[2, 0, 0, 0, 0], [3, 0, 0, 0, 0]], [0, 1])
    assert (data.input_shape, data.num_classes) == ((5,), 2)


def test_the_dev_part_is_the_test_where_that_has_no_labels(tmp_path: Path) -> None:
    write_sst2(tmp_path / "SST-2", packed=False, labelled_test=False)
    data = load("sst2", tmp_path, vocabulary=6, length=3)
    assert examples(data.test) == ([[4, 3, 0], [1, 0, 0]], [1, 0])


def test_every_tenth_text_of_a_class_of_mr_is_for_the_test(tmp_path: Path) -> None:
    folder = tmp_path / "rt-polaritydata"
    folder.mkdir()
    for kind in ("pos", "neg"):
        lines = [f"{kind} caf\xe9 n{i}" for i in range(21)]
        (folder / f"rt-polarity.{kind}").write_text("\n".join(lines), encoding="latin-1")
    data = load("mr", tmp_path, vocabulary=100, length=4)
    assert data.clients[0].num_examples == 38
    assert data.test is not None
    rows, labels = examples(data.test)
    assert labels == [0, 0, 1, 1]
    assert all(row[2] == 1 and row[3] == 0 for row in rows)  # n9 and n19 are never trained on
    assert len({row[1] for row in rows}) == 1  # "café" is one word
    assert rows[0][1] > 1


def test_imdb_is_read_from_its_folders(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for kind, text in (("pos", "fine fine"), ("neg", "dull")):
            folder = tmp_path / "aclImdb" / part / kind
            folder.mkdir(parents=True)
            (folder / "0_7.txt").write_text(text)
    data = load("imdb", tmp_path, vocabulary=10, length=3)
    assert examples(data.test) == ([[3, 0, 0], [2, 2, 0]], [0, 1])


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("label\ttext\n2\tgood\n", {}, r"train.tsv' cannot be read: ValueError"),
        ("label\ttext\n0\tbad\n1", {}, r"train.tsv' cannot be read: .*a line without a text"),
        ("label\ttext\n1\tgood\n", {}, r"the training part in .* lacks a class.*it has 1 texts"),
        ("text\nx\n", {}, r"it has 0 texts"),
        (None, {"length": 0}, r"data.options.length: got 0; must be a whole number from 3"),
        (None, {"vocabulary": 2.5}, r"data.options.vocabulary: got 2.5"),
        (None, {"words": 3}, r"unknown 'words'"),
    ],
)
def test_texts_that_cannot_be_used_say_why(
    tmp_path: Path, text: str | None, options: dict[str, Any], message: str
) -> None:
    write_sst2(tmp_path / "SST2", packed=False, labelled_test=True)
    if text is not None:
        (tmp_path / "SST2" / "train.tsv").write_text(text)
    with pytest.raises((DataError, ConfigError), match=message):
        load("sst2", tmp_path, **options)


def test_absent_texts_say_where_they_are_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.name: 'imdb' is not in .*a folder aclImdb"):
        load("imdb", tmp_path)
    (tmp_path / "SST2").mkdir()
    (tmp_path / "SST2" / "train.tsv.gz").write_bytes(b"\x1f\x8bno archive")
    with pytest.raises(DataError, match=r"train.tsv.gz' cannot be read"):
        load("sst2", tmp_path)


def test_an_lstm_reads_the_state_after_the_last_word_whatever_the_padding() -> None:
    torch.manual_seed(0)
    model = lstm((6,), 2, vocabulary=9, embedding=3, width=4)
    short, longer = (torch.tensor([[5, 7, *([0] * n)]]) for n in (1, 4))
    assert torch.equal(model(short), model(longer))
    states, _ = model.lstm(model.embedding(torch.tensor([[5, 7]])))  # type: ignore[operator]
    assert torch.allclose(model(longer), model.scores(states[:, -1]))  # type: ignore[operator]
    assert model(torch.zeros(1, 6, dtype=torch.int64)).isfinite().all()  # no word at all
    with pytest.raises(ValueError, match=r"shape \(1, 8, 8\); must be word numbers"):
        lstm((1, 8, 8), 2)


def test_texts_train(tmp_path: Path) -> None:
    """Two words that decide: an LSTM separates them."""
    folder = tmp_path / "SST2"
    folder.mkdir()
    rows = [f"{i % 2}\t{'good' if i % 2 else 'bad'} film number {i}" for i in range(80)]
    for part in ("train", "test"):
        (folder / f"{part}.tsv").write_text("\n".join(["label\ttext", *rows]))
    result = simulate(
        {
            "algorithm": {"name": "fedavg", "client_learning_rate": 1.0},
            "federation": {"num_clients": 4, "clients_per_round": 4, "num_rounds": 15},
            "data": {"name": "sst2", "path": str(tmp_path), "options": {"length": 8}},
            "model": {"name": "lstm", "options": {"width": 16}},
        }
    )
    assert result.rounds[-1].test_accuracy == 1.0


def write_tiny_imagenet(root: Path) -> np.ndarray:
    """Three classes, of which the sorted order is not that of the file; returns a colour each."""
    folder = root / "tiny-imagenet-200"
    colours = np.array([[200, 30, 30], [30, 200, 30], [30, 30, 200]], dtype=np.uint8)
    names = ["n03", "n01", "n02"]
    (folder / "val" / "images").mkdir(parents=True)
    (folder / "wnids.txt").write_text("\n".join(names))
    lines = []
    for name, colour in zip(names, colours, strict=True):
        images = folder / "train" / name / "images"
        images.mkdir(parents=True)
        picture = Image.fromarray(np.broadcast_to(colour, (64, 64, 3)).copy())
        for i in range(2):
            picture.save(images / f"{name}_{i}.JPEG", quality=95)
        picture.save(folder / "val" / "images" / f"val_{name}.JPEG", quality=95)
        lines.append(f"val_{name}.JPEG\t{name}\t0\t0\t63\t63")
    Image.new("L", (64, 64), 128).save(folder / "train" / "n01" / "images" / "n01_9.JPEG")
    (folder / "val" / "val_annotations.txt").write_text("\n".join(lines))
    return colours


def test_tiny_imagenet_is_read_from_its_folders(tmp_path: Path) -> None:
    colours = write_tiny_imagenet(tmp_path)
    data = load("tiny_imagenet", tmp_path)
    assert data.input_shape == (3, 64, 64)
    assert data.num_classes == 3
    assert np.bincount(data.clients[0].targets()).tolist() == [3, 2, 2]  # one grey among them
    assert data.test is not None
    inputs, labels = next(data.test.batches([torch.arange(3)], CPU))
    assert labels.tolist() == [2, 0, 1]  # n03, n01, n02 in the order of their names
    means, deviations = [0.4802, 0.4481, 0.3975], [0.2770, 0.2691, 0.2821]
    expected = (colours / 255 - means) / deviations
    assert np.abs(inputs.mean(dim=(2, 3)).numpy() - expected).max() < 0.03  # JPEG
    (tmp_path / "tiny-imagenet-200" / "wnids.txt").unlink()
    with pytest.raises(DataError, match=r"'tiny_imagenet' cannot be read from .*wnids.txt"):
        load("tiny_imagenet", tmp_path)


def test_an_image_of_another_size_is_named(tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path)
    odd = tmp_path / "tiny-imagenet-200" / "train" / "n02" / "images" / "n02_0.JPEG"
    Image.new("RGB", (32, 32)).save(odd)
    with pytest.raises(DataError, match=r"n02_0.JPEG has shape \(32, 32, 3\)"):
        load("tiny_imagenet", tmp_path)


def write_npz(root: Path) -> np.ndarray:
    pixels = np.arange(2 * 2 * 2 * 3, dtype=np.uint8).reshape(2, 2, 2, 3)
    for part in ("train", "test"):
        np.savez(root / f"{part}.npz", x=pixels, y=np.array([0, 1]))
    return pixels


def test_npz_images_are_standardised_by_given_numbers(tmp_path: Path) -> None:
    pixels = write_npz(tmp_path)
    means, deviations = [0.1, 0.2, 0.3], [0.5, 0.25, 2.0]
    data = load("npz", tmp_path, means=means, deviations=deviations)
    expected = ((pixels / 255 - means) / deviations).transpose(0, 3, 1, 2)
    assert data.test is not None
    inputs, _ = next(data.test.batches([torch.arange(2)], CPU))
    assert np.allclose(inputs.numpy(), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("means", "deviations"), [([0.1], [0.2]), ([0.1] * 3, []), ([0.1] * 3, [0.2, 0.0, 0.2])]
)
def test_numbers_that_do_not_fit_the_channels_are_refused(
    tmp_path: Path, means: list[float], deviations: list[float]
) -> None:
    write_npz(tmp_path)
    with pytest.raises(DataError, match=r"data.options: got means .* for each channel of images"):
        load("npz", tmp_path, means=means, deviations=deviations)

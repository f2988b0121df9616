"""Image sets in files: packed, unpacked, broken, absent, real."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fedopt_flwr import ConfigError, DataError, RunConfig
from fedopt_flwr.data import load_federated_data

CPU = torch.device("cpu")


def write_idx(path: Path, values: np.ndarray) -> None:
    header = struct.pack(">BBBB", 0, 0, 8, values.ndim) + struct.pack(
        f">{values.ndim}I", *values.shape
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wb") as file:
        file.write(header + values.astype(np.uint8).tobytes())


def write_mnist(
    root: Path, folder: str = "MNIST", prefix: tuple[str, str] = ("train", "t10k")
) -> None:
    for part, count in zip(prefix, (40, 10), strict=True):
        images = np.arange(count * 784).reshape(count, 28, 28) % 256
        write_idx(root / folder / "raw" / f"{part}-images-idx3-ubyte.gz", images)
        write_idx(root / folder / "raw" / f"{part}-labels-idx1-ubyte.gz", np.arange(count) % 10)


def test_packed_files_in_a_read_only_folder_are_unpacked_into_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mnist(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for folder in (tmp_path / "MNIST" / "raw", tmp_path / "MNIST", tmp_path):
        folder.chmod(0o555)
    monkeypatch.setenv("FEDOPT_DATA", str(tmp_path))
    config = RunConfig(
        data={"name": "mnist"}, federation={"num_clients": 3, "clients_per_round": 3}
    )
    for _ in range(2):  # the second time from the cache
        data = load_federated_data(config)
        assert sum(c.num_examples for c in data.clients) == 40
        assert data.input_shape == (1, 28, 28)
    assert sorted(tmp_path.rglob("*")) == before
    (raw,) = Path(os.environ["XDG_CACHE_HOME"]).glob("fedopt-flwr/data/unpacked/*/MNIST/raw")
    assert len(list(raw.iterdir())) == 4


def test_two_folders_with_packed_files_of_the_same_names_are_told_apart(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_mnist(tmp_path / name)
    federation = {"num_clients": 3, "clients_per_round": 3}
    labels = tmp_path / "two" / "MNIST" / "raw" / "t10k-labels-idx1-ubyte.gz"
    write_idx(labels, np.full(10, 7))
    found = []
    for name in ("one", "two"):
        data = load_federated_data(
            RunConfig(data={"name": "mnist", "path": tmp_path / name}, federation=federation)
        )
        _, targets = next(data.test.batches([torch.arange(10)], CPU))
        found.append(targets.tolist())
    assert found == [list(range(10)), [7] * 10]


def test_an_archive_that_is_broken_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    (root / "cifar-10-python.tar.gz").write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"cifar-10-python.tar.gz' cannot be unpacked"):
        load_federated_data(RunConfig(data={"name": "cifar10", "path": root}))
    assert not list(Path(os.environ["XDG_CACHE_HOME"]).glob("fedopt-flwr/data/unpacked/*"))


def test_emnist_images_are_turned_upright(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path, "EMNIST", ("emnist-mnist-train", "emnist-mnist-test"))
    monkeypatch.setenv("FEDOPT_DATA", str(tmp_path))
    config = RunConfig(
        data={"name": "emnist", "options": {"split": "mnist"}, "partition": {"kind": "iid"}},
        federation={"num_clients": 2, "clients_per_round": 2},
    )
    data = load_federated_data(config)
    image = next(data.test.batches([torch.tensor([0])], CPU))[0][0, 0]
    stored = torch.from_numpy(np.arange(784).reshape(28, 28) % 256).float() / 255
    torch.testing.assert_close(image, (stored.T - 0.1736) / 0.3317)


def test_a_broken_packed_file_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mnist(tmp_path)
    broken = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte.gz"
    broken.write_bytes(broken.read_bytes()[:200])
    monkeypatch.setenv("FEDOPT_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz' cannot be unpacked"):
        load_federated_data(RunConfig(data={"name": "mnist"}))
    cache = Path(os.environ["XDG_CACHE_HOME"])
    assert not [
        p for p in cache.rglob("*") if p.is_file() and "images" in p.name and "train" in p.name
    ]


def test_missing_files_say_where_to_put_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchvision.datasets

    def offline(self: object) -> None:
        raise RuntimeError("no network")

    monkeypatch.setattr(torchvision.datasets.MNIST, "download", offline)
    config = RunConfig(data={"name": "mnist", "path": tmp_path})
    with pytest.raises(DataError, match=r"download failed \(no network\); put MNIST/raw/\*-ubyte"):
        load_federated_data(config)


def test_real_mnist_loads_from_packed_files(real_data: Path) -> None:
    data = load_federated_data(RunConfig(data={"name": "mnist", "partition": {"kind": "iid"}}))
    assert sum(c.num_examples for c in data.clients) == 60_000
    assert data.test.num_examples == 10_000
    images = next(data.test.batches([torch.arange(10_000)], CPU))[0]
    assert abs(float(images.mean())) < 0.05
    assert abs(float(images.std()) - 1) < 0.05
    assert np.bincount(data.test.targets()).tolist() == [
        980,
        1135,
        1032,
        1010,
        982,
        892,
        958,
        1028,
        974,
        1009,
    ]


def mnist(root: Path) -> RunConfig:
    return RunConfig(
        data={"name": "mnist", "path": root, "partition": {"kind": "iid"}},
        federation={"num_clients": 2, "clients_per_round": 2},
    )


def plain(root: Path, part: str, data: bytes) -> None:
    """Put bytes in the place of a packed file."""
    raw = root / "MNIST" / "raw"
    (raw / f"{part}-ubyte.gz").unlink()
    (raw / f"{part}-ubyte").write_bytes(data)


def unpacked(root: Path) -> None:
    for path in sorted((root / "MNIST" / "raw").glob("*.gz")):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()


def cut(name: str, keep: int) -> Callable[[Path], None]:
    def spoil(root: Path) -> None:
        path = root / "MNIST" / "raw" / f"{name}-ubyte"
        path.write_bytes(path.read_bytes()[:keep])

    return spoil


def labels(values: list[int]) -> Callable[[Path], None]:
    def spoil(root: Path) -> None:
        write_idx(root / "labels.gz", np.array(values))
        data = gzip.decompress((root / "labels.gz").read_bytes())
        (root / "MNIST" / "raw" / "train-labels-idx1-ubyte").write_bytes(data)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (cut("train-images-idx3", 0), "ValueError"),
        (cut("train-images-idx3", 1000), "shape '\\[40, 28, 28\\]' is invalid"),
        (cut("t10k-labels-idx1", 3), "cannot be used"),
        (labels([1] * 30), "40 images and 30 labels from 1 to 1; there are 10 classes"),
        (labels([1] * 39 + [200]), "40 images and 40 labels from 1 to 200"),
    ],
)
def test_broken_files_are_named_and_not_taken_for_absent(
    tmp_path: Path, spoil: Callable[[Path], None], text: str
) -> None:
    write_mnist(tmp_path)
    unpacked(tmp_path)
    assert load_federated_data(mnist(tmp_path)).num_classes == 10
    spoil(tmp_path)
    with pytest.raises(DataError, match=rf"data files: those of MNIST in '{tmp_path}'.*{text}"):
        load_federated_data(mnist(tmp_path))


def test_packed_files_that_are_wrong_are_named_where_they_came_from(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    write_idx(tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte.gz", np.full(40, 77))
    with pytest.raises(DataError, match=rf"those of MNIST in '{tmp_path}' .*from 77 to 77"):
        load_federated_data(mnist(tmp_path))


@pytest.mark.parametrize("where", ["/proc/here", "a file"])
def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    write_mnist(tmp_path)
    if where == "a file":
        where = str(tmp_path / "file")
        Path(where).write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", where)
    with pytest.raises(
        DataError, match=rf"ubyte.gz' cannot be unpacked into the cache '{where}/.*XDG_CACHE_HOME"
    ):
        load_federated_data(mnist(tmp_path))


@pytest.mark.parametrize("split", ["foo", 3])
def test_an_unknown_split_is_named_with_those_there_are(split: object) -> None:
    config = RunConfig(data={"name": "emnist", "options": {"split": split}})
    with pytest.raises(ConfigError, match=rf"data.options.split: unknown '{split}'.*letters"):
        load_federated_data(config)


def test_letters_are_counted_from_zero(tmp_path: Path) -> None:
    write_mnist(tmp_path, "EMNIST", ("emnist-letters-train", "emnist-letters-test"))
    raw = tmp_path / "EMNIST" / "raw"
    for part, count in (("train", 40), ("test", 10)):
        values = np.arange(count) % 26 + 1
        write_idx(raw / f"emnist-letters-{part}-labels-idx1-ubyte.gz", values)
    config = RunConfig(
        data={
            "name": "emnist",
            "path": tmp_path,
            "options": {"split": "letters"},
            "partition": {"kind": "iid"},
        },
        federation={"num_clients": 2, "clients_per_round": 2},
    )
    data = load_federated_data(config)
    assert data.test.targets().tolist() == list(range(10))
    assert data.num_classes == 26


def write_cifar(root: Path) -> np.ndarray:
    """An archive in CIFAR-10's layout; return the pixels of its test batch, [n, channels, h, w]."""
    rng, folder = np.random.default_rng(0), "cifar-10-batches-py"
    pixels = rng.integers(0, 256, (10, 3, 32, 32)).astype(np.uint8)
    batch = {"data": pixels.reshape(10, 3072), "labels": list(range(10))}
    files = dict.fromkeys([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"], batch)
    files["batches.meta"] = {"label_names": [str(i) for i in range(10)]}
    root.mkdir()
    with tarfile.open(root / "cifar-10-python.tar.gz", "w:gz") as archive:
        for name, content in files.items():
            data = pickle.dumps(content)
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return pixels


def test_a_cifar_archive_becomes_standardised_channels_first_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchvision.datasets.cifar

    pixels = write_cifar(tmp_path / "data")
    trusting = lambda *_, **__: True  # noqa: E731  # these are not the bytes it knows
    monkeypatch.setattr(torchvision.datasets.cifar, "check_integrity", trusting)
    monkeypatch.setattr(
        torchvision.datasets.CIFAR10, "_check_integrity", lambda self: is_there(self)
    )
    config = RunConfig(
        data={"name": "cifar10", "path": tmp_path / "data", "partition": {"kind": "iid"}},
        federation={"num_clients": 2, "clients_per_round": 2},
    )
    data = load_federated_data(config)
    mean, deviation = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2470, 0.2435, 0.2616])
    expected = (pixels / 255 - mean.reshape(3, 1, 1)) / deviation.reshape(3, 1, 1)
    images, targets = next(data.test.batches([torch.arange(10)], CPU))
    np.testing.assert_allclose(images.numpy(), expected, atol=1e-5)
    assert targets.tolist() == list(range(10))
    assert sum(client.num_examples for client in data.clients) == 50
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["cifar-10-python.tar.gz"]


def is_there(dataset: object) -> bool:
    return (Path(dataset.root) / "cifar-10-batches-py" / "test_batch").is_file()

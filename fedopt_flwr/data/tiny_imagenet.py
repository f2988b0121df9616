"""TinyImageNet: 200 classes of 64x64 images, in the folders that it is published in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import DataError
from .client_data import DatasetData, Source
from .files import configured_root

_FOLDER = "tiny-imagenet-200"
_MEANS, _DEVIATIONS = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)  # of its training images


class _Images(Dataset[Any]):
    """Bytes in memory, 1.2 GB for the training part; as float32 they would be four times that."""

    def __init__(self, pixels: Tensor, labels: Tensor) -> None:
        self._pixels, self._labels = pixels, labels
        self._means, self._deviations = (
            torch.tensor(values).view(3, 1, 1) for values in (_MEANS, _DEVIATIONS)
        )

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
        image = self._pixels[position].float().div_(255)
        return image.sub_(self._means).div_(self._deviations), self._labels[position]


def tiny_imagenet(path: Path | None) -> Source:
    """tiny-imagenet-200/ with wnids.txt, train/WNID/images/*.JPEG, and val/images with
    val_annotations.txt, which is the test part: the published one has no labels."""
    root = configured_root(path) / _FOLDER
    try:
        names = (root / "wnids.txt").read_text(encoding="utf-8").split()
        numbers = {name: number for number, name in enumerate(sorted(names))}
        train = [
            (file, number)
            for name, number in numbers.items()
            for file in sorted((root / "train" / name / "images").glob("*.JPEG"))
        ]
        lines = (root / "val" / "val_annotations.txt").read_text(encoding="utf-8").splitlines()
        test = [
            (root / "val" / "images" / file, numbers[name])
            for file, name in (line.split("\t")[:2] for line in lines)
        ]
        if not train or not test:
            raise ValueError(f"{len(train)} training images, {len(test)} of val")
        return Source(_part(train), _part(test), len(names))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"data.name: 'tiny_imagenet' cannot be read from {str(root)!r}: "
            f"{type(error).__name__}: {error}; unpack tiny-imagenet-200.zip there, or set "
            "data.path or $FEDOPT_DATA"
        ) from error


def _part(files: list[tuple[Path, int]]) -> DatasetData:
    from torchvision.datasets.folder import pil_loader

    pixels = torch.empty((len(files), 3, 64, 64), dtype=torch.uint8)
    for place, (file, _) in enumerate(files):
        image = np.asarray(pil_loader(str(file)))  # some are grey
        if image.shape != (64, 64, 3):
            raise ValueError(f"{file} has shape {image.shape}, not 64 x 64")
        pixels[place] = torch.from_numpy(image.copy()).permute(2, 0, 1)
    labels = np.array([label for _, label in files], dtype=np.int64)
    return DatasetData(_Images(pixels, torch.from_numpy(labels)), labels)

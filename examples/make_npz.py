"""Turn the CIFAR-10 strips or the FEMNIST digits of a data folder into npz files for `fedopt`.

    python examples/make_npz.py cifar10 OUTPUT
    python examples/make_npz.py femnist OUTPUT

reads $FEDOPT_DATA/CIFAR10/{train,test}.npz or $FEDOPT_DATA/FEMNIST_digits/femnist_digits.npz and
writes OUTPUT/train.npz and OUTPUT/test.npz. FEMNIST keeps its clients: every fifth image of a
client goes to the test set; paper becomes 0 and ink 255, as in MNIST.
Then: fedopt simulate --set data.name=npz --set data.path=OUTPUT --set model.name=cnn ...
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image


def cifar10(source: Path) -> dict[str, dict[str, np.ndarray]]:
    """Decode both parts: uint8 images [n, 32, 32, 3] and labels [n]."""
    parts = {}
    for part in ("train", "test"):
        with np.load(source / "CIFAR10" / f"{part}.npz") as archive:
            strips, offsets = archive["strips"], archive["offsets"]
            images = [
                np.asarray(Image.open(io.BytesIO(strips[start:end].tobytes())))
                for start, end in pairwise(offsets)
            ]
            pixels = np.concatenate([image.reshape(-1, 32, 32, 3) for image in images])
            x = (pixels * archive["step"]).astype(np.uint8)
            parts[part] = {"x": x, "y": archive["labels"].astype(np.int64)}
    return parts


def femnist(source: Path) -> dict[str, dict[str, np.ndarray]]:
    """Split each client's images and turn the grey scale around."""
    with np.load(source / "FEMNIST_digits" / "femnist_digits.npz") as archive:
        x, y = 255 - archive["x"], archive["y"].astype(np.int64)
        client = archive["client"].astype(np.int64)
    rank = np.empty(len(y), dtype=np.int64)  # of an image among its client's, in shuffled order
    order = np.random.default_rng(0).permutation(len(y))
    for owner in np.unique(client):
        rows = order[client[order] == owner]
        rank[rows] = np.arange(len(rows))
    test = rank % 5 == 4
    return {
        "train": {"x": x[~test], "y": y[~test], "client": client[~test]},
        "test": {"x": x[test], "y": y[test]},
    }


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=["cifar10", "femnist"])
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    source = os.environ.get("FEDOPT_DATA")
    if not source:
        sys.exit("FEDOPT_DATA: not set; name the folder that holds CIFAR10/ or FEMNIST_digits/")
    try:
        parts = {"cifar10": cifar10, "femnist": femnist}[arguments.name](Path(source))
    except FileNotFoundError as error:
        sys.exit(f"FEDOPT_DATA: {error.filename!r} is not there")
    arguments.output.mkdir(parents=True, exist_ok=True)
    for part, arrays in parts.items():
        np.savez_compressed(arguments.output / f"{part}.npz", **arrays)
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        print(f"{arguments.output / part}.npz: {shapes}")


if __name__ == "__main__":
    main()

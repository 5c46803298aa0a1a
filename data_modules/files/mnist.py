"""Read the files of MNIST and of Fashion-MNIST, which has the same format; fetch them if they are missing."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets import MNIST, FashionMNIST
from torchvision.datasets.mnist import read_image_file, read_label_file

from mtl.checks import require

from .download import fetch_archive
from .reading import parsing

SOURCES = {"mnist": MNIST, "fashion_mnist": FashionMNIST}  # torchvision has the official addresses and checksums
CLASSES, SIDE = 10, 28
VAL_EVERY = 6  # one in this many training images is for validation


def prepare(folder: Path, source: str, download: bool, base_url: str | None = None) -> None:
    """Put the four files of ``source`` into ``folder``/raw; do nothing if they are there. Raises InputError."""
    dataset, raw = SOURCES[source], folder / "raw"
    for name, md5 in dataset.resources:
        site = base_url or dataset.mirrors[0]
        fetch_archive(raw / name.removesuffix(".gz"), raw / name, site, f"md5:{md5}", download)


def read(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Return images ``[N, 28, 28]`` (uint8) and classes ``[N]`` (int64) of ``part``, "train" or "t10k"."""
    files = [folder / "raw" / f"{part}-{name}" for name in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    with parsing(files[0]), parsing(files[1]):
        images, labels = read_image_file(str(files[0])), read_label_file(str(files[1]))
        if images.shape != (len(labels), SIDE, SIDE) or not len(labels) or int(labels.max()) >= CLASSES:
            raise ValueError(f"images {list(images.shape)} and {len(labels)} labels")
    return images, labels


def read_splits(folder: Path, generator: torch.Generator) -> dict[str, tuple[Tensor, Tensor]]:
    """Return images and classes, as ``read`` does, of train, val and test.

    "test" has the official test images, "val" a random sixth of the training images, and "train" the others. Raises
    InputError if there are too few.
    """
    images, labels = read(folder, "train")
    order, count = torch.randperm(len(images), generator=generator), len(images) // VAL_EVERY
    require(count >= 1, f"{folder}: {len(images)} images are too few for training and validation")
    parts = {"train": order[count:], "val": order[:count]}
    return {split: (images[rows], labels[rows]) for split, rows in parts.items()} | {"test": read(folder, "t10k")}

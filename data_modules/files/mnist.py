"""Read the files of MNIST and of Fashion-MNIST, which has the same format; fetch them if they are missing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets import MNIST, FashionMNIST

from mtl.checks import require

from .download import obtain
from .reading import read_bytes

SOURCES = {"mnist": MNIST, "fashion_mnist": FashionMNIST}  # torchvision has the official addresses and checksums
CLASSES, SIDE = 10, 28
IMAGES, LABELS = 2051, 2049  # the numbers that files of images and of labels begin with


def prepare(folder: Path, source: str, download: bool, base_url: str | None = None) -> None:
    """Put the four files of ``source`` into ``folder``/raw; do nothing if they are there. Raises InputError."""
    dataset, raw = SOURCES[source], folder / "raw"
    for name, md5 in dataset.resources:
        url = f"{(base_url or dataset.mirrors[0]).rstrip('/')}/{name}"
        obtain(raw / name.removesuffix(".gz"), raw / name, url, f"md5:{md5}", download)


def read(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Return images ``[N, 28, 28]`` (uint8) and classes ``[N]`` (int64) of ``part``, "train" or "t10k"."""
    raw = folder / "raw"
    images_file, labels_file = raw / f"{part}-images-idx3-ubyte", raw / f"{part}-labels-idx1-ubyte"
    images, labels = read_idx(images_file, IMAGES, (SIDE, SIDE)), read_idx(labels_file, LABELS)
    require(
        len(images) == len(labels) > 0 and int(labels.max()) < CLASSES,
        f"{images_file} has {len(images)} images and {labels_file.name} {len(labels)} labels: expected a label in 0..9 "
        "for each image; delete both and start again",
    )
    return images, labels.to(torch.int64)


def read_idx(file: Path, magic: int, shape: Sequence[int] = ()) -> Tensor:
    """Return the entries ``[N, *shape]`` (uint8) of a file: big-endian 32-bit numbers, then one byte a value.

    The numbers must be ``magic``, N and ``shape``. Raises InputError if they are not, or if the length does not fit.
    """
    content = read_bytes(file)
    header = 4 * (2 + len(shape))
    numbers = [int.from_bytes(content[start : start + 4], "big") for start in range(0, header, 4)]
    found, count, *sizes = numbers
    expected = " x ".join(map(str, shape)) + " pixels" if shape else "one byte"
    good = found == magic and sizes == list(shape) and count > 0
    require(
        good and len(content) == header + count * math.prod(shape),
        f"{file} is damaged: it has {len(content)} bytes and begins with the numbers {numbers}; expected {magic}, how "
        f"many entries follow, {[*shape]}, and {expected} for each; delete it and start again",
    )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=header).view(count, *shape)

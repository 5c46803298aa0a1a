"""Read the files of MNIST and of Fashion-MNIST, which has the same format; fetch them if they are missing."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets import MNIST, FashionMNIST
from torchvision.datasets.mnist import read_image_file, read_label_file

from data_modules.files.archive import extract_gzip
from data_modules.files.cache import locked
from data_modules.files.download import fetch
from mtl.types import InputError, require

SOURCES = {"mnist": MNIST, "fashion_mnist": FashionMNIST}  # torchvision has the official addresses and checksums
CLASSES = 10


def prepare(folder: Path, source: str, download: bool, base_url: str | None = None) -> None:
    """Put the four files of ``source`` into ``folder``/raw; do nothing if they are there. Raises InputError."""
    dataset, raw = SOURCES[source], folder / "raw"
    if all((raw / name.removesuffix(".gz")).exists() for name, _ in dataset.resources):
        return
    raw.mkdir(parents=True, exist_ok=True)
    with locked(raw / ".fetch.lock", f"fetching {source} into {raw}"):
        for name, md5 in dataset.resources:
            file, archive = raw / name.removesuffix(".gz"), raw / name
            if file.exists():
                continue
            url = f"{(base_url or dataset.mirrors[0]).rstrip('/')}/{name}"
            by_hand = f"get {url} elsewhere and put it at {archive}, or unpacked at {file}"
            if download:
                fetch(url, archive, md5=md5, by_hand=by_hand)
            require(archive.exists(), f"{file} is missing and data.download=false: set it to true, or {by_hand}")
            extract_gzip(archive, file)


def read(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Return images ``[N, 28, 28]`` (uint8) and classes ``[N]`` (int64) of ``part``, "train" or "t10k"."""
    raw = folder / "raw"
    images_file, labels_file = raw / f"{part}-images-idx3-ubyte", raw / f"{part}-labels-idx1-ubyte"
    try:
        images, labels = read_image_file(str(images_file)), read_label_file(str(labels_file))
    except Exception as error:  # torchvision fails with various exceptions on damaged files
        raise InputError(
            f"{images_file} or {labels_file.name} is damaged ({error}): delete both and start again"
        ) from None
    good = len(images) == len(labels) > 0 and int(labels.min()) >= 0 and int(labels.max()) < CLASSES
    require(
        good,
        f"{images_file} has {len(images)} images and {labels_file.name} {len(labels)} labels: expected a label in 0..9 "
        "for each image; delete both and start again",
    )
    return images, labels.to(torch.int64)

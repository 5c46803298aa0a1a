"""Digits as one task: the images of MNIST and the house numbers of SVHN (COMET 2023, supplement S1.1)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from scipy.io import loadmat
from torch import Tensor
from torchvision.datasets import SVHN

from mtl.options import Address, FilePath, NonEmpty, validated
from mtl.types import Batch, DataSpec, Image, TaskSpec

from .base import TensorDataModule
from .files import mnist
from .files.cache import cached
from .files.download import fetch
from .files.identity import stamp
from .files.images import pixel_scale
from .files.reading import parsing
from .splits import SPLITS, random_split, require_rows

MNIST_ROWS = (50_000, 10_000, 10_000)  # train, val, test
SVHN_ROWS = (480_420, 75_000, 75_000)
SIDE = 32
CACHE_VERSION = 1  # of SVHN's cache; increase it when the content changes
Part = Literal["train", "extra", "test"]  # of SVHN
SVHN_PARTS: tuple[Part, ...] = get_args(Part)
BORDER_PIXELS = 2  # black pixels added to each side of MNIST's 28 x 28 images


class DigitsDataModule(TensorDataModule):
    """Serve the images of MNIST and SVHN; the task ``digit`` is which of the ten digits an image shows.

    All images of MNIST are pooled and split at random into 50,000 / 10,000 / 10,000, those of ``svhn_parts`` into
    480,420 / 75,000 / 75,000 (630,420 in train, extra and test). Each split joins that of MNIST and that of SVHN. Other
    numbers of images are split in the same proportions. The splits depend on ``seed`` only. Input: ``image``
    ``[B, 3, 32, 32]`` (uint8); MNIST's images get a black border of 2 pixels and their grey level in all three
    channels. All data is kept in memory: 2.2 GB, and 4.5 GB while loading.
    """

    random_split = True

    @validated
    def __init__(
        self,
        data_dir: FilePath,
        svhn_parts: NonEmpty[Part] = SVHN_PARTS,
        download: bool = True,
        standardize: bool = True,
        mnist_url: Address | None = None,
        svhn_url: Address | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.standardize = standardize
        self.parts = [part for part in SVHN_PARTS if part in svhn_parts]  # in a fixed order, on which the split depends
        self.data_dir, self.download = data_dir, download
        self.mnist, self.svhn = self.data_dir / "MNIST", self.data_dir / "SVHN"
        self.mnist_url, self.svhn_url = mnist_url, svhn_url

    def prepare_data(self) -> None:
        mnist.prepare(self.mnist, "mnist", self.download, self.mnist_url)
        for part in self.parts:
            official, name, md5 = SVHN.split_list[part]
            url = official if self.svhn_url is None else f"{self.svhn_url}/{name}"
            if not (self.svhn / name).exists():
                fetch(url, self.svhn / name, f"md5:{md5}", self.download)
        for part in self.parts:
            self._read_svhn(part)

    def _read_svhn(self, part: str) -> tuple[Tensor, Tensor]:
        """Return images ``[N, 3, 32, 32]`` (uint8) and digits ``[N]`` (int64), from the cache if possible."""
        file = self.svhn / SVHN.split_list[part][1]
        key = (CACHE_VERSION, *stamp(file))
        content = cached(self.data_dir / "cache" / f"svhn-{part}.pt", lambda: parse_svhn(file), key)
        return content["image"], content["digit"]

    def load(self) -> tuple[DataSpec, dict[str, Batch]]:
        grey, grey_digits = concat_parts([mnist.read(self.mnist, part) for part in ("train", "t10k")])
        color, color_digits = concat_parts([self._read_svhn(part) for part in self.parts])
        grey_rows = split_images("MNIST", len(grey), MNIST_ROWS, self.generator(0))
        color_rows = split_images(f"SVHN ({', '.join(self.parts)})", len(color), SVHN_ROWS, self.generator(1))
        splits = {}
        for name in SPLITS:
            first, second = grey_rows[name], color_rows[name]
            image = torch.empty(len(first) + len(second), 3, SIDE, SIDE, dtype=torch.uint8)
            image[: len(first)] = to_color(grey[first])
            torch.index_select(color, 0, second, out=image[len(first) :])  # torch.cat would copy twice
            splits[name] = Batch({"image": image}, {"digit": torch.cat([grey_digits[first], color_digits[second]])})
        mean, std = pixel_scale(splits["train"].inputs["image"], self.standardize)
        task = TaskSpec("digit", "multiclass", mnist.CLASSES)
        return DataSpec({"image": Image(3, SIDE, SIDE, mean, std)}, [task]), splits


def concat_parts(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    images, labels = zip(*parts, strict=True)
    return torch.cat(images), torch.cat(labels)


def to_color(images: Tensor) -> Tensor:
    """Return ``images [N, 28, 28]`` as ``[N, 3, 32, 32]``, with a black border and the grey level in each channel."""
    return F.pad(images, [BORDER_PIXELS] * 4)[:, None].expand(-1, 3, -1, -1)


def split_images(name: str, count: int, published: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
    """Split ``count`` row indices at random into train, val and test of the ``published`` sizes or, for another count,
    proportions. ``name`` is the data set's name in messages. Raises InputError if a split would be empty.
    """
    parts = random_split(count, dict(zip(SPLITS, published, strict=True)), generator)
    require_rows(parts, f"{name}: {count} images leave none for")
    return parts


def parse_svhn(file: Path) -> dict[str, Tensor]:
    """Return ``image [N, 3, 32, 32]`` (uint8) and ``digit [N]`` (int64, 0..9) of a file ``*_32x32.mat``."""
    with parsing(file), warnings.catch_warnings():
        warnings.simplefilter("error")  # scipy only warns about some kinds of damage
        content = loadmat(file, variable_names=["X", "y"])
        image = torch.from_numpy(np.ascontiguousarray(content["X"].transpose(3, 2, 0, 1)))
        digit = torch.from_numpy(content["y"].reshape(-1).astype(np.int64)) % 10  # SVHN labels the digit 0 as 10
        if image.dtype != torch.uint8 or image.shape != (len(digit), 3, SIDE, SIDE):
            raise ValueError(f"images {list(image.shape)} of {image.dtype} and {len(digit)} labels")
        return {"image": image, "digit": digit}

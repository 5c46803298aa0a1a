"""Digits of two kinds as one task: MNIST's and the house numbers of SVHN (COMET 2023, supplement S1.1)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from data_modules.base import TensorDataModule
from data_modules.files import mnist, svhn
from data_modules.images import pixel_statistics
from data_modules.splits import SPLITS
from mtl.types import Batch, DataSpec, Image, TaskSpec, require

logger = logging.getLogger(__name__)

MNIST_ROWS = (50_000, 10_000, 10_000)  # train, val, test
SVHN_ROWS = (480_420, 75_000, 75_000)
SIDE = svhn.SIDE
BORDER = 2  # pixels that MNIST's images of 28 x 28 lack on each side


class DigitsDataModule(TensorDataModule):
    """Serve the images of MNIST and SVHN; task ``digit``: which of ten it shows.

    All images of MNIST are pooled and split anew at random into 50,000 / 10,000 / 10,000, those of ``svhn_parts``
    into 480,420 / 75,000 / 75,000 (train, extra and test together: 630,420); train, val and test join the splits of
    both. Other numbers of images are split by the same shares. The splits depend on ``seed`` alone. Input: ``image``
    ``[B, 3, 32, 32]`` of uint8; MNIST's images get a black border of 2 pixels and their grey level in all three
    channels. Everything is in memory: 2.2 GB, 4.5 GB while it is loaded.
    """

    def __init__(
        self,
        data_dir: str,
        svhn_parts: Sequence[str] = svhn.PARTS,
        download: bool = True,
        mnist_url: str | None = None,
        svhn_url: str | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        parts = list(svhn_parts)
        good = 0 < len(parts) == len(set(parts)) and set(parts) <= set(svhn.PARTS)
        require(good, f"data.svhn_parts={parts}: must name some of {', '.join(svhn.PARTS)}, each once")
        self.parts = [part for part in svhn.PARTS if part in parts]  # in one order, as the split depends on it
        self.data_dir = Path(data_dir).expanduser()
        self.mnist, self.svhn = self.data_dir / "MNIST", self.data_dir / "SVHN"
        self.download, self.mnist_url, self.svhn_url = download, mnist_url, svhn_url

    def prepare_data(self) -> None:
        """Fetch, unpack and parse what is not there yet; safe to run in several processes and to kill."""
        mnist.prepare(self.mnist, "mnist", self.download, self.mnist_url)
        for part in self.parts:
            svhn.prepare(self.svhn, part, self.download, self.svhn_url)
        for part in self.parts:
            self._read_svhn(part)

    def _read_svhn(self, part: str) -> tuple[Tensor, Tensor]:
        return svhn.read(self.svhn, part, self.data_dir / "cache")

    def load(self) -> tuple[DataSpec, dict[str, Batch]]:
        """Return the description and the splits; every image is in exactly one of them."""
        grey, grey_digits = join([mnist.read(self.mnist, part) for part in ("train", "t10k")])
        colour, colour_digits = join([self._read_svhn(part) for part in self.parts])
        grey_rows = resplit("MNIST", len(grey), MNIST_ROWS, self._generator(0))
        colour_rows = resplit(f"SVHN ({', '.join(self.parts)})", len(colour), SVHN_ROWS, self._generator(1))
        splits = {}
        for name, first, second in zip(SPLITS, grey_rows, colour_rows, strict=True):
            image = torch.empty(len(first) + len(second), 3, SIDE, SIDE, dtype=torch.uint8)
            image[: len(first)] = to_colour(grey[first])
            torch.index_select(colour, 0, second, out=image[len(first) :])  # joining two copies takes twice the memory
            splits[name] = Batch({"image": image}, {"digit": torch.cat([grey_digits[first], colour_digits[second]])})
        mean, std = pixel_statistics(splits["train"].inputs["image"])
        task = TaskSpec("digit", "multiclass", mnist.CLASSES)
        return DataSpec({"image": Image(3, SIDE, SIDE, mean, std)}, [task]), splits

    def _generator(self, purpose: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1_000_003 + purpose)


def join(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return images and labels of all ``parts``, one after the other."""
    images, labels = zip(*parts, strict=True)
    return torch.cat(images), torch.cat(labels)


def to_colour(images: Tensor) -> Tensor:
    """Return ``images [N, 28, 28]`` as ``[N, 3, 32, 32]``: a black border, and the grey level in each channel."""
    return F.pad(images, [BORDER] * 4)[:, None].expand(-1, 3, -1, -1)


def resplit(name: str, count: int, published: Sequence[int], generator: torch.Generator) -> list[Tensor]:
    """Return the rows of train, val and test among ``count`` rows, at random; ``published`` are sizes, or else shares.

    ``name`` says in messages whose rows they are.
    """
    total = sum(published)
    if count != total:
        logger.warning("%s: %d images, and %d in the published split; split by its shares", name, count, total)
    held_out = [round(count * size / total) for size in published[1:]]
    sizes = [count - sum(held_out), *held_out]
    require(min(sizes) >= 1, f"{name}: {count} images are too few for train, val and test")
    return list(torch.randperm(count, generator=generator).split(sizes))

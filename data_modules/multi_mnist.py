"""Multi-MNIST and Multi-Fashion: two images on one canvas, one task each (Sabour et al. 2017; DSelect-k, COMET)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from mtl.options import Address, FilePath, validated
from mtl.types import Batch, DataSpec, Image, TaskSpec

from .base import TensorDataModule
from .files.images import pixel_scale
from .files.mnist import CLASSES, SIDE, prepare, read_splits
from .splits import SPLITS, Rows

SHIFT, CANVAS = 4, 36
FOLDERS = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}
CLASS_NAMES = {  # of the classes
    "mnist": tuple(map(str, range(CLASSES))),
    "fashion_mnist": (
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
}


class MultiMNISTDataModule(TensorDataModule):
    """Serve pairs of images of ``source``, drawn uniformly, one at the top left and one at the bottom right of 36 x 36.

    Input: ``image`` ``[B, 1, 36, 36]`` (uint8). Each image is shifted by 4 pixels from the centre; where they overlap,
    the grey levels are added and clipped at 255. Tasks ``top_left`` and ``bottom_right``: the classes of the two
    images. ``rows`` are the sizes of train, val and test, which share no source image: test draws from the official
    test images, validation from a random sixth of the training images. The draws depend on ``seed`` only.
    Networks standardize the pixels; without ``standardize`` they only divide them by 255.
    """

    @validated
    def __init__(
        self,
        data_dir: FilePath,
        source: Literal["mnist", "fashion_mnist"] = "mnist",
        rows: Rows = (100_000, 20_000, 20_000),
        download: bool = True,
        standardize: bool = True,
        base_url: Address | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.standardize = standardize
        self.source, self.rows = source, rows
        self.folder = data_dir / FOLDERS[self.source]
        self.download, self.base_url = download, base_url

    def prepare_data(self) -> None:
        prepare(self.folder, self.source, self.download, self.base_url)

    def load(self) -> tuple[DataSpec, dict[str, Batch]]:
        parts, splits = read_splits(self.folder, self.generator(0)), {}
        for number, (name, size) in enumerate(zip(SPLITS, self.rows, strict=True), start=1):
            images, labels = parts[name]
            pairs = torch.randint(len(images), (2, size), generator=self.generator(number))
            splits[name] = compose_canvases(images, labels, pairs)
        mean, std = pixel_scale(splits["train"].inputs["image"], self.standardize)
        classes = CLASS_NAMES[self.source]
        tasks = [TaskSpec(name, "multiclass", CLASSES, classes=classes) for name in ("top_left", "bottom_right")]
        spec = DataSpec({"image": Image(1, CANVAS, CANVAS, mean, std)}, tasks)
        return spec, splits


def compose_canvases(images: Tensor, labels: Tensor, pairs: Tensor) -> Batch:
    """Return a Batch of N canvases; ``pairs [2, N]`` index ``images [M, 28, 28]`` and ``labels [M]``."""
    first, second = pairs
    canvas = torch.zeros(pairs.shape[1], 1, CANVAS, CANVAS, dtype=torch.uint8)
    canvas[:, 0, :SIDE, :SIDE] = images[first]  # centred it would start at (4, 4); shifted by 4 it starts at (0, 0)
    corner = canvas[:, 0, 2 * SHIFT :, 2 * SHIFT :]
    corner += torch.minimum(images[second], 255 - corner)
    return Batch({"image": canvas}, {"top_left": labels[first], "bottom_right": labels[second]})

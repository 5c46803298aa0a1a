"""CelebA: attributes of faces, one binary task each (Liu et al. 2015; COMET 2023, supplement S1)."""

from __future__ import annotations

import logging
import time
from typing import Any, Literal

import torch
from torch import Tensor

from mtl.options import Chosen, FilePath, Some, validated
from mtl.types import Batch, DataSpec, Image, TaskSpec

from .base import TensorDataModule
from .files import celeba as celeba_files
from .files.cache import cached
from .files.images import pixel_scale, reduced
from .splits import SPLITS

logger = logging.getLogger(__name__)

FORMAT = 1  # of the cache; increase it when the content changes


class CelebADataModule(TensorDataModule):
    """Serve the aligned images in their official partition; each of ``attributes`` is a binary task, in that order.

    Input: ``image`` ``[B, 3, 218 / scale, 178 / scale]`` (uint8), sides rounded up. At full size, the 202,599 images
    take 23.6 GB of memory and of disk; at ``scale`` 2, the default, 5.9 GB, and four 3 x 3 convolutions with pooling
    still leave 4 x 3 features of 109 x 89 pixels. The images are decoded once; the result is cached in ``data_dir``.
    Files are expected in ``data_dir``/celeba, laid out as for torchvision's ``CelebA``; ``download`` fetches missing
    ones from Google Drive.
    """

    @validated
    def __init__(
        self,
        data_dir: FilePath,
        attributes: celeba_files.Attribute | Some[celeba_files.Attribute],
        scale: Chosen[Literal[1, 2, 4, 8]] = 2,
        download: bool = True,
        standardise: bool = True,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.standardise = standardise
        self.attributes = [attributes] if isinstance(attributes, str) else attributes
        self.scale, self.download, self.data_dir = scale, download, data_dir
        self.folder = self.data_dir / "celeba"

    def prepare_data(self) -> None:
        celeba_files.prepare(self.folder, self.download)
        self._read()

    def _read(self) -> dict[str, Tensor]:
        """Return ``<split>_image [N, 3, H, W]`` and ``<split>_attributes [N, 40]`` of each split, all uint8."""
        key = (FORMAT, self.scale, *celeba_files.source_key(self.folder))
        return cached(self.data_dir / "cache" / "celeba.pt", self._parse, key)

    def _parse(self) -> dict[str, Tensor]:
        partition = celeba_files.read_partition(self.folder / celeba_files.PARTITION_FILE)
        attributes = celeba_files.read_attributes(self.folder / celeba_files.ATTRIBUTES_FILE, list(partition))
        paths = [self.folder / celeba_files.IMAGES / name for name in partition]
        part = torch.tensor(list(partition.values()))
        # Sort by split before decoding: the splits are then views, and the images need no copy
        order = part.argsort(stable=True)
        sizes = part.bincount(minlength=len(SPLITS)).tolist()
        images = celeba_files.decode_all([paths[index] for index in order.tolist()], self.scale)
        content = {}
        for name, image, marks in zip(SPLITS, images.split(sizes), attributes[order].split(sizes), strict=True):
            content |= {f"{name}_image": image, f"{name}_attributes": marks}
        return content

    def load(self) -> tuple[DataSpec, dict[str, Batch]]:
        start = time.perf_counter()
        content, splits = self._read(), {}
        columns = {name: celeba_files.ATTRIBUTES.index(name) for name in self.attributes}
        for name in SPLITS:
            marks = content[f"{name}_attributes"].float()
            targets = {attribute: marks[:, column].contiguous() for attribute, column in columns.items()}
            splits[name] = Batch({"image": content[f"{name}_image"]}, targets)
        mean, std = pixel_scale(content["train_image"], self.standardise)
        spec = DataSpec(
            {"image": Image(3, *reduced(celeba_files.SIZE, self.scale), mean, std)},
            [TaskSpec(name, "binary", classes=("no", "yes")) for name in self.attributes],
        )
        counts = ", ".join(f"{len(batch)} {name}" for name, batch in splits.items())
        logger.info("CelebA: %s images in %.1f s", counts, time.perf_counter() - start)
        return spec, splits

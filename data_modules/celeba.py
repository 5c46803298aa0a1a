"""CelebA: attributes of faces, one binary task each (Liu et al. 2015; COMET 2023, supplement S1)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import polars as pl
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torchvision.datasets import CelebA
from torchvision.datasets.utils import download_file_from_google_drive

from mtl.checks import InputError, require
from mtl.options import FilePath, NonEmpty, validated
from mtl.types import Batch, DataSpec, Image, TaskSpec

from .base import TensorDataModule
from .files.cache import cached, locked
from .files.download import move_missing, unpacked
from .files.identity import stamp
from .files.images import decode_image, pixel_scale, reduced_size
from .files.reading import parsing, quote, read_lines, repair
from .splits import SPLITS

logger = logging.getLogger(__name__)

CACHE_VERSION = 1  # of the cache; increase it when the content changes
IMAGES, ARCHIVE = "img_align_celeba", "img_align_celeba.zip"
ATTRIBUTES_FILE, PARTITION_FILE = "list_attr_celeba.txt", "list_eval_partition.txt"
SIZE = (218, 178)  # height and width of the images
IMAGES_PER_CHUNK = 100  # images that a thread decodes at a time
SITE = "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html"
ATTRIBUTE_NAMES = """
    5_o_Clock_Shadow Arched_Eyebrows Attractive Bags_Under_Eyes Bald Bangs Big_Lips Big_Nose Black_Hair Blond_Hair
    Blurry Brown_Hair Bushy_Eyebrows Chubby Double_Chin Eyeglasses Goatee Gray_Hair Heavy_Makeup High_Cheekbones Male
    Mouth_Slightly_Open Mustache Narrow_Eyes No_Beard Oval_Face Pale_Skin Pointy_Nose Receding_Hairline Rosy_Cheeks
    Sideburns Smiling Straight_Hair Wavy_Hair Wearing_Earrings Wearing_Hat Wearing_Lipstick Wearing_Necklace
    Wearing_Necktie Young
"""
ATTRIBUTES = tuple(ATTRIBUTE_NAMES.split())
Attribute: Any = Literal.__getitem__(ATTRIBUTES)


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
        attributes: Attribute | NonEmpty[Attribute],
        scale: Literal[1, 2, 4, 8] = 2,
        download: bool = True,
        standardize: bool = True,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.standardize = standardize
        self.attributes = [attributes] if isinstance(attributes, str) else attributes
        self.scale, self.download, self.data_dir = scale, download, data_dir
        self.folder = self.data_dir / "celeba"

    def prepare_data(self) -> None:
        if not all((self.folder / name).exists() for name in (ATTRIBUTES_FILE, PARTITION_FILE, IMAGES)):
            with locked(self.folder / ".fetch.lock", f"fetching CelebA into {self.folder}"):
                self._fetch()
        self._read()

    def _fetch(self) -> None:
        folder, images = self.folder, self.folder / IMAGES
        for name in (ATTRIBUTES_FILE, PARTITION_FILE, *([] if images.is_dir() else [ARCHIVE])):
            if not (folder / name).exists():
                require(self.download, f"{folder / name} is missing and data.download=false: {_by_hand(folder)}")
                _download(folder, name)
        if not images.is_dir():
            with unpacked(folder / ARCHIVE) as content:
                move_missing(content, folder)
        require(images.is_dir(), f"{folder / ARCHIVE} contains no folder {IMAGES}: {_by_hand(folder)}")

    def _read(self) -> dict[str, Tensor]:
        """Return ``<split>_image [N, 3, H, W]`` and ``<split>_attributes [N, 40]`` of each split, all uint8."""
        lists = stamp(self.folder / ATTRIBUTES_FILE, self.folder / PARTITION_FILE)
        count = sum(file.suffix == ".jpg" for file in (self.folder / IMAGES).iterdir())
        return cached(self.data_dir / "cache" / "celeba.pt", self._parse, (CACHE_VERSION, self.scale, count, *lists))

    def _parse(self) -> dict[str, Tensor]:
        partition = read_partition(self.folder / PARTITION_FILE)
        attributes = read_attributes(self.folder / ATTRIBUTES_FILE, list(partition))
        paths = [self.folder / IMAGES / name for name in partition]
        part = torch.tensor(list(partition.values()))
        # Sort by split before decoding: the splits are then views, and the images need no copy
        order = part.argsort(stable=True)
        sizes = part.bincount(minlength=len(SPLITS)).tolist()
        images = decode_all([paths[index] for index in order.tolist()], self.scale)
        content: dict[str, Tensor] = {}
        for name, image, values in zip(SPLITS, images.split(sizes), attributes[order].split(sizes), strict=True):
            content |= {f"{name}_image": image, f"{name}_attributes": values}
        return content

    def load(self) -> tuple[DataSpec, dict[str, Batch]]:
        start = time.perf_counter()
        content, splits = self._read(), {}
        columns = {name: ATTRIBUTES.index(name) for name in self.attributes}
        for name in SPLITS:
            values = content[f"{name}_attributes"].float()
            targets = {attribute: values[:, column].contiguous() for attribute, column in columns.items()}
            splits[name] = Batch({"image": content[f"{name}_image"]}, targets)
        mean, std = pixel_scale(content["train_image"], self.standardize)
        spec = DataSpec(
            {"image": Image(3, *reduced_size(SIZE, self.scale), mean, std)},
            [TaskSpec(name, "binary", classes=("no", "yes")) for name in self.attributes],
        )
        counts = ", ".join(f"{len(batch)} {name}" for name, batch in splits.items())
        logger.info("CelebA: %s images in %.1f s", counts, time.perf_counter() - start)
        return spec, splits


def _download(folder: Path, name: str) -> None:
    """Fetch the official file ``name`` from Google Drive and check its md5. Raises InputError."""
    [(identity, md5)] = [(identity, md5) for identity, md5, file in CelebA.file_list if file == name]
    try:
        download_file_from_google_drive(identity, folder, name, md5)
    except Exception as error:  # no gdown, no network, daily quota of the file exceeded, wrong checksum
        (folder / name).unlink(missing_ok=True)
        reason = quote(str(error), 200)
        raise InputError(f"cannot download {name} from Google Drive: {reason}; {_by_hand(folder)}") from error


def _by_hand(folder: Path) -> str:
    return (
        f"get {ARCHIVE}, {ATTRIBUTES_FILE} and {PARTITION_FILE} from {SITE} (Align&Cropped Images, Anno, Eval) and put "
        f"them into {folder}; the images may also be unpacked already, in {folder / IMAGES}"
    )


def read_partition(file: Path) -> dict[str, int]:
    """Return the split of each image: 0 train, 1 val, 2 test. Raises InputError."""
    with parsing(file):
        parts_by_image = {name: int(part) for name, part in map(str.split, read_lines(file)["line"])}
    parts = {*parts_by_image.values()}
    require(parts == {0, 1, 2}, f"{file} must have images of 0, 1 and 2 (train, val, test). {repair(file)}")
    return parts_by_image


def read_attributes(file: Path, names: Sequence[str]) -> Tensor:
    """Return the attributes of the images ``names``, in their order: ``[N, 40]`` uint8, 1 if an image has it."""
    with parsing(file):
        cells = read_lines(file)["line"].str.extract_all(r"\S+")
        if cells[1].to_list() != [*ATTRIBUTES] or cells[2:].list.first().to_list() != names:
            raise ValueError(f"other attributes or images than {PARTITION_FILE}")
        values = cells[2:].list.slice(1).list.to_array(len(ATTRIBUTES)).explode() == "1"
        return torch.from_numpy(values.cast(pl.UInt8).to_numpy(writable=True)).view(-1, len(ATTRIBUTES))


def decode_all(files: Sequence[Path], scale: int) -> Tensor:
    """Return the images of ``files`` at 1/``scale`` of full size, ``[N, 3, H, W]`` uint8. Raises InputError."""
    images = torch.empty(len(files), 3, *reduced_size(SIZE, scale), dtype=torch.uint8)

    def fill(start: int) -> None:
        for index, file in enumerate(files[start : start + IMAGES_PER_CHUNK], start):
            again = f"Delete {file.parent} and start again, with {ARCHIVE} as it was published"
            images[index] = decode_image(file, SIZE, "RGB", again, scale).permute(2, 0, 1)

    starts = range(0, len(files), IMAGES_PER_CHUNK)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # threads suffice: Pillow's decoder releases Python's lock
        done = pool.map(fill, starts)
        for _ in track(done, "decoding CelebA", len(starts), console=Console(stderr=True)):
            pass
    return images

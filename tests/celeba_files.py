"""Write files in CelebA's layout: images with a smooth gradient, each of its own colour."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from mtl.data_modules.celeba import ATTRIBUTES, SIZE
from PIL import Image

from tests.file_server import zipped


def marks(number: int) -> list[int]:
    """Return the 40 attributes of image ``number`` as 0 or 1; both values occur among any five images in a row."""
    return [(number >> (1 + index % 2)) % 2 if index % 3 else number % 2 for index in range(len(ATTRIBUTES))]


def colour(number: int) -> tuple[int, int, int]:
    """Return the mean colour of image ``number``; it differs between the first 200."""
    return 40 + 10 * (number % 16), 40 + 10 * (number // 16), 100 + 7 * (number % 5)


def picture(number: int, height: int = SIZE[0], width: int = SIZE[1]) -> Image.Image:
    """Return image ``number``: its colour, brighter towards the bottom right."""
    ramp = np.linspace(-15, 15, height)[:, None] + np.linspace(-15, 15, width)
    return Image.fromarray((ramp[..., None] + colour(number)).round().clip(0, 255).astype(np.uint8))


def write_celeba(folder: Path, sizes: Sequence[int], archived: bool = False) -> None:
    """Write images 0, 1, ... and the two lists; ``sizes`` are the numbers of train, val and test images.

    Images are written to a folder, or to an archive if ``archived``. The splits alternate until each is complete.
    """
    images = folder / "img_align_celeba"
    images.mkdir(parents=True, exist_ok=True)
    left, parts = list(sizes), []
    while any(left):
        for part in (part for part in range(3) if left[part]):
            left[part] -= 1
            parts.append(part)
    names = [f"{number + 1:06d}.jpg" for number in range(len(parts))]
    for number, name in enumerate(names):
        picture(number).save(images / name, quality=95)
    rows = [f"{name} " + " ".join(f"{2 * mark - 1:2d}" for mark in marks(n)) for n, name in enumerate(names)]
    lines = [str(len(names)), " ".join(ATTRIBUTES) + " ", *rows]
    (folder / "list_attr_celeba.txt").write_text("\n".join(lines) + "\n")
    lines = [f"{name} {part}" for name, part in zip(names, parts, strict=True)]
    (folder / "list_eval_partition.txt").write_text("\n".join(lines) + "\n")
    if archived:
        zipped(folder / "img_align_celeba.zip", folder, "img_align_celeba")
        shutil.rmtree(images)

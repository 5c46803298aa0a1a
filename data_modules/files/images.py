"""Decode image files, and measure their pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .reading import parsing

NUM_LEVELS = 256
PIXELS_PER_SLICE = 1 << 22  # pixels counted at a time


def decode_image(file: Path, size: tuple[int, int], mode: str, again: str, scale: int = 1) -> Tensor:
    """Return an image of the ``size`` (height, width) at 1/``scale`` of it, rounded up: ``[H, W]`` or ``[H, W, 3]``.

    ``mode``: that of Pillow, "L" or "RGB". ``again`` says in messages how to repair the file. Raises InputError.
    """
    with parsing(file, again), Image.open(file) as image:
        if (image.height, image.width) != size:
            raise ValueError(f"{image.height} x {image.width} pixels instead of {size[0]} x {size[1]}")
        image.draft(mode, (size[1] // scale, size[0] // scale))  # scaled by the decoder: fast, no aliasing
        height, width = reduced_size(size, scale)
        return torch.from_numpy(np.array(image.convert(mode).resize((width, height), Image.Resampling.BOX)))


def reduced_size(size: tuple[int, int], scale: int) -> tuple[int, int]:
    """Return height and width at 1/``scale`` of ``size``, rounded up as in JPEG decoders."""
    return -(-size[0] // scale), -(-size[1] // scale)


def pixel_scale(pixels: Tensor, standardize: bool = True) -> tuple[float, float]:
    """Return mean and standard deviation of ``pixels [N, C, H, W]`` (uint8), scaled to [0, 1].

    Both are computed from the integer histogram of the 256 values: exact, and without a float copy of the pixels.
    Without ``standardize`` they are 0 and 1.
    """
    if not standardize:
        return 0.0, 1.0
    slices = pixels.flatten().split(PIXELS_PER_SLICE)
    counts = torch.stack([torch.bincount(part, minlength=NUM_LEVELS) for part in slices]).sum(0).tolist()
    total = sum(counts)
    mean = sum(value * count for value, count in enumerate(counts)) / total
    square = sum(value**2 * count for value, count in enumerate(counts)) / total
    return mean / (NUM_LEVELS - 1), max(square - mean**2, 0.0) ** 0.5 / (NUM_LEVELS - 1)

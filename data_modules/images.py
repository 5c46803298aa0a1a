"""Describe the pixels of a data set."""

from __future__ import annotations

import torch
from torch import Tensor

VALUES = 256
SLICE = 1 << 22  # pixels that are counted at a time


def pixel_statistics(pixels: Tensor) -> tuple[float, float]:
    """Return mean and deviation of uint8 ``pixels [N, C, H, W]``, scaled to [0, 1].

    From how often each value occurs, in whole numbers: exact for any number of pixels, and none becomes a float.
    """
    slices = pixels.flatten().split(SLICE)
    counts = torch.stack([torch.bincount(part, minlength=VALUES) for part in slices]).sum(0).tolist()
    total = sum(counts)
    mean = sum(value * count for value, count in enumerate(counts)) / total
    square = sum(value**2 * count for value, count in enumerate(counts)) / total
    return mean / (VALUES - 1), max(square - mean**2, 0.0) ** 0.5 / (VALUES - 1)

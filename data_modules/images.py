"""The scale of a data set's pixels."""

from __future__ import annotations

import torch
from torch import Tensor

VALUES = 256
SLICE = 1 << 22  # pixels counted at a time


def pixel_scale(pixels: Tensor, standardise: bool = True) -> tuple[float, float]:
    """Return mean and standard deviation of ``pixels [N, C, H, W]`` (uint8), scaled to [0, 1]; else (0, 1).

    Both are computed from the integer histogram of the 256 values: exact, and without a float copy of the pixels.
    """
    if not standardise:
        return 0.0, 1.0
    slices = pixels.flatten().split(SLICE)
    counts = torch.stack([torch.bincount(part, minlength=VALUES) for part in slices]).sum(0).tolist()
    total = sum(counts)
    mean = sum(value * count for value, count in enumerate(counts)) / total
    square = sum(value**2 * count for value, count in enumerate(counts)) / total
    return mean / (VALUES - 1), max(square - mean**2, 0.0) ** 0.5 / (VALUES - 1)

"""Write files in SVHN's format, with random pixels."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from scipy.io import savemat


def write_svhn(folder: Path, sizes: Mapping[str, int], first: int = 0) -> dict[str, str]:
    """Write a file with ``sizes[part]`` images for each part; return their md5 sums by part.

    Images are numbered across the parts, starting at ``first``. The red channel of the last two pixels of image n
    encodes n; its label is 1 + n % 10.
    """
    folder.mkdir(parents=True, exist_ok=True)
    random, sums = np.random.default_rng(0), {}
    for part, size in sizes.items():
        number = np.arange(first, first + size)
        pixels = random.integers(256, size=(32, 32, 3, size), dtype=np.uint8)
        pixels[31, 31, 0], pixels[31, 30, 0] = number % 250, number // 250
        file = folder / f"{part}_32x32.mat"
        savemat(file, {"X": pixels, "y": (1 + number % 10).astype(np.uint8)[:, None]}, do_compression=True)
        sums[part] = hashlib.md5(file.read_bytes()).hexdigest()
        first += size
    return sums

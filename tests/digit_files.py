"""Write files in the formats of MNIST and SVHN, with random pixels."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from scipy.io import savemat


def write_digits(folder: Path, train: int = 120, test: int = 40, compressed: bool = False) -> list[str]:
    """Write the four files into ``folder`` and return their names; the last two pixels of image n encode n."""
    folder.mkdir(parents=True, exist_ok=True)
    generator, names = torch.Generator().manual_seed(0), list[str]()
    for part, size, base in (("train", train, 0), ("t10k", test, train)):
        images = torch.randint(256, (size, 28, 28), generator=generator, dtype=torch.uint8)
        number = torch.arange(size) + base
        images[:, 27, 27], images[:, 27, 26] = (number % 250).to(torch.uint8), (number // 250).to(torch.uint8)
        labels = torch.randint(10, (size,), generator=generator, dtype=torch.uint8)
        for name, header, content in (
            (f"{part}-images-idx3-ubyte", struct.pack(">IIII", 2051, size, 28, 28), images),
            (f"{part}-labels-idx1-ubyte", struct.pack(">II", 2049, size), labels),
        ):
            data = header + content.numpy().tobytes()
            if compressed:
                name, data = f"{name}.gz", gzip.compress(data, mtime=0)
            (folder / name).write_bytes(data)
            names.append(name)
    return names


def write_svhn(folder: Path, sizes: Mapping[str, int]) -> None:
    """Write a file with ``sizes[part]`` images for each part.

    Images are numbered across the parts. The red channel of the last two pixels of image n encodes n; its label is
    1 + n % 10.
    """
    folder.mkdir(parents=True, exist_ok=True)
    random, first = np.random.default_rng(0), 0
    for part, size in sizes.items():
        number = np.arange(first, first + size)
        pixels = random.integers(256, size=(32, 32, 3, size), dtype=np.uint8)
        pixels[31, 31, 0], pixels[31, 30, 0] = number % 250, number // 250
        content = {"X": pixels, "y": (1 + number % 10).astype(np.uint8)[:, None]}
        savemat(folder / f"{part}_32x32.mat", content, do_compression=True)
        first += size

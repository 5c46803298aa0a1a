"""Write files in MNIST's format, with random pixels."""

from __future__ import annotations

import gzip
import hashlib
import struct
from pathlib import Path

import torch

NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def write_digits(folder: Path, train: int = 120, test: int = 40, compressed: bool = False) -> dict[str, str]:
    """Write the four files into ``folder`` and return their md5 sums; the last two pixels of image n encode n."""
    folder.mkdir(parents=True, exist_ok=True)
    generator, sums = torch.Generator().manual_seed(0), {}
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
            sums[name] = hashlib.md5(data).hexdigest()
    return sums

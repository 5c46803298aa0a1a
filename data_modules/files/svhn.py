"""Read the files of SVHN's cropped digits (Netzer et al. 2011); fetch them if they are missing."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from scipy.io import loadmat
from torch import Tensor
from torchvision.datasets import SVHN

from .cache import cached, versions
from .download import fetch
from .reading import parsing

FORMAT = 1  # of the cache; increase it when the content changes
Part = Literal["train", "extra", "test"]
PARTS: tuple[Part, ...] = get_args(Part)
SIDE = 32


def prepare(folder: Path, part: str, download: bool, base_url: str | None = None) -> None:
    """Put the file of ``part`` into ``folder``; do nothing if it is there. Raises InputError."""
    official, name, md5 = SVHN.split_list[part]
    url = official if base_url is None else f"{base_url.rstrip('/')}/{name}"
    if not (folder / name).exists():
        fetch(url, folder / name, f"md5:{md5}", download)


def read(folder: Path, part: str, cache: Path) -> tuple[Tensor, Tensor]:
    """Return images ``[N, 3, 32, 32]`` (uint8) and digits ``[N]`` (int64) of ``part``.

    The file is parsed once; the result is kept in the folder ``cache``. Raises InputError.
    """
    file = folder / SVHN.split_list[part][1]
    content = cached(cache / f"svhn-{part}.pt", lambda: parse(file), (FORMAT, *versions(file)))
    return content["image"], content["digit"]


def parse(file: Path) -> dict[str, Tensor]:
    """Return ``image [N, 3, 32, 32]`` (uint8) and ``digit [N]`` (int64, 0..9) of a file ``*_32x32.mat``."""
    with parsing(file), warnings.catch_warnings():
        warnings.simplefilter("error")  # scipy only warns about some kinds of damage
        content = loadmat(file, variable_names=["X", "y"])
        image = torch.from_numpy(np.ascontiguousarray(content["X"].transpose(3, 2, 0, 1)))
        digit = torch.from_numpy(content["y"].reshape(-1).astype(np.int64)) % 10  # SVHN labels the digit 0 as 10
        if image.dtype != torch.uint8 or image.shape != (len(digit), 3, SIDE, SIDE):
            raise ValueError(f"images {list(image.shape)} of {image.dtype} and {len(digit)} labels")
        return {"image": image, "digit": digit}

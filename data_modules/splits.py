"""Split rows into train, val and test: by shares, by sizes, or stratified."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from mtl.types import Batch

from .options import MOST, refused

SPLITS = ("train", "val", "test")


def check_shares(split: object, own_files: Collection[str] = ()) -> list[float]:
    """Return ``split`` as three floats; raise InputError unless they are shares that sum to 1.

    A share must be positive, unless its split is one of ``own_files``, whose rows come from a file of their own.
    """
    shares = list(split) if isinstance(split, list | tuple) else []
    if len(shares) == 3 and all(map(_is_share, shares)) and math.isclose(sum(shares), 1.0):
        empty = [name for name, share in zip(SPLITS, shares, strict=True) if share == 0 and name not in own_files]
        if not empty:
            return [float(share) for share in shares]
    raise refused("split", split, "three positive shares (train, val, test) that sum to 1")


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def check_rows(rows: object) -> list[int]:
    """Return ``rows`` as a list; raise InputError unless they are three positive sizes."""
    sizes = list(rows) if isinstance(rows, list | tuple) else []
    good = [size for size in sizes if isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= MOST]
    if len(sizes) == len(good) == len(SPLITS):
        return good
    raise refused("rows", rows, f"three sizes from 1 to {MOST}, for train, val and test")


def split_rows(rows: Batch, sizes: Sequence[int]) -> dict[str, Batch]:
    """Cut ``rows`` into consecutive train, val and test rows of the given sizes."""
    parts = torch.arange(len(rows)).split(list(sizes))
    return {name: rows.select(index) for name, index in zip(SPLITS, parts, strict=True)}


def stratified_split(stratum: Tensor, shares: Sequence[float], generator: torch.Generator) -> list[Tensor]:
    """Return the row indices of each split, shuffled.

    Each split gets its share of every stratum, rounded to whole rows. ``stratum [N]`` is the int64 stratum of each row.
    """
    shuffled = torch.randperm(len(stratum), generator=generator)
    own = stratum[shuffled]
    size = torch.bincount(own)
    # rank of each shuffled row within its stratum: 0, 1, ..., size - 1
    rank = torch.empty_like(own)
    order = own.argsort(stable=True)
    rank[order] = torch.arange(len(own)) - (size.cumsum(0) - size)[own[order]]
    bounds = torch.tensor(shares, dtype=torch.float64).cumsum(0)[:-1]
    ends = (bounds[:, None] * size).round().long()  # [splits - 1, strata]: first rank of the next split
    part = (rank >= ends[:, own]).sum(0)
    return [shuffled[part == number] for number in range(len(shares))]

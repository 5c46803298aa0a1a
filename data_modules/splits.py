"""Split rows into train, val and test: by shares, by sizes, or stratified."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mtl.types import Batch, require

SPLITS = ("train", "val", "test")


def check_shares(split: Sequence[float]) -> list[float]:
    """Return ``split`` as three floats; raise InputError unless they are positive and sum to 1."""
    shares = list(split) if hasattr(split, "__iter__") else []
    fits = len(shares) == 3 and all(is_share(share) and share > 0 for share in shares)
    require(
        fits and math.isclose(sum(shares), 1.0),
        f"data.split={split}: must be three positive shares (train, val, test) that sum to 1",
    )
    return [float(share) for share in shares]


def is_share(value: object) -> bool:
    """Return whether ``value`` is a number in [0, 1]."""
    return isinstance(value, int | float) and 0 <= value <= 1


def check_rows(rows: Sequence[int]) -> None:
    """Raise InputError unless ``rows`` are three positive sizes."""
    good = len(rows) == 3 and all(isinstance(size, int) and size >= 1 for size in rows)
    require(good, f"data.rows={list(rows)}: must be three sizes of at least 1, for train, val and test")


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

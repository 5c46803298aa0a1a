"""Split rows into train, val and test: by shares, by sizes, or stratified."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from mtl.checks import format_value, require
from mtl.options import Long, Share
from mtl.types import Batch

SPLITS = ("train", "val", "test")
SHARES = "three positive shares (train, val, test) that sum to 1"


def _whole(shares: tuple[float, float, float]) -> tuple[float, float, float]:
    if not math.isclose(sum(shares), 1.0):
        raise ValueError(f"must be {SHARES}")
    return shares


Shares = Annotated[tuple[Share, Share, Share], Field(strict=False), AfterValidator(_whole)]
Rows = Annotated[tuple[Long, Long, Long], Field(strict=False)]


def by_split(shares: Sequence[float], own_files: Collection[str] = ()) -> dict[str, float]:
    """Return the share of each split; raise InputError if a share is 0 and the split is not in ``own_files``."""
    found = dict(zip(SPLITS, shares, strict=True))
    empty = [name for name, share in found.items() if share == 0 and name not in own_files]
    require(not empty, f"data.split={format_value(shares)}: must be {SHARES}; {', '.join(empty)} would have no rows")
    return found


def files_to_read(paths: Mapping[str, Path], wanted: Sequence[str]) -> dict[str, Path]:
    """Return the file of each ``wanted`` split that has its own; also train's, if a wanted split has none."""
    rest = any(split not in paths for split in wanted)
    return {split: file for split, file in paths.items() if split in wanted or (rest and split == "train")}


def divided(order: Tensor, shares: Mapping[str, float], where: str) -> dict[str, Tensor]:
    """Cut the indices ``order [N]`` by ``shares``; raise InputError, which begins with ``where``, if one has no row."""
    bounds = torch.tensor([*shares.values()], dtype=torch.float64).cumsum(0)
    ends = (bounds[:-1] / bounds[-1] * len(order)).round().long().tolist()
    parts = dict(zip(shares, order.tensor_split(ends), strict=True))
    empty = [name for name, part in parts.items() if not len(part)]
    require(not empty, f"{where}, data.split leaves none for {', '.join(empty)}")
    return parts


def proportional(count: int, proportions: Sequence[int], name: str) -> list[int]:
    """Return sizes of train, val and test that sum to ``count``. Raises InputError, about ``name``, if one is 0."""
    held_out = [round(count * part / sum(proportions)) for part in proportions[1:]]
    sizes = [count - sum(held_out), *held_out]
    require(min(sizes) >= 1, f"{name}: {count} are too few for train, val and test")
    return sizes


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

"""Draw distinct numbers and split rows by stratum, vectorised and seeded."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mtl.types import require


def draw_distinct(sizes: Tensor, counts: Tensor, generator: torch.Generator) -> Tensor:
    """Draw ``counts[s]`` distinct numbers from each block ``s`` of ``sizes[s]`` numbers, every subset alike.

    Blocks follow one another: block ``s`` begins at ``sizes[:s].sum()``. Both ``[S]`` int64, counts <= sizes.
    Returns ``[counts.sum()]``, in random order within a block.
    """
    starts = sizes.cumsum(0) - sizes
    dense = counts * 4 > sizes  # here repeats are so frequent that listing all numbers is cheaper
    pool = _list_blocks(starts[dense], sizes[dense])
    short = counts.masked_fill(dense, 0)
    while bool(short.any()):
        block = torch.repeat_interleave(torch.where(short > 0, short + short // 4 + 8, 0))
        place = torch.rand(len(block), generator=generator, dtype=torch.float64) * sizes[block]
        place = torch.minimum(place.long(), sizes[block] - 1)  # the product can round up to the size
        pool, _ = unique(torch.cat([pool, starts[block] + place]))
        owner = torch.searchsorted(starts, pool, right=True) - 1
        have = torch.bincount(owner, minlength=len(sizes))
        short = (counts - have).clamp(min=0)
    owner = torch.searchsorted(starts, pool, right=True) - 1
    # the distinct numbers of a block are a random subset of it; keep a random part of them
    order = (owner + torch.rand(len(pool), generator=generator, dtype=torch.float64)).argsort(stable=True)
    owner = owner[order]
    have = torch.bincount(owner, minlength=len(sizes))
    place = torch.arange(len(pool)) - (have.cumsum(0) - have)[owner]
    return pool[order[place < counts[owner]]]


def unique(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sorted distinct values, and for each value its place among them."""
    distinct, place = torch.unique(values, return_inverse=True)
    return distinct, place


def _list_blocks(starts: Tensor, sizes: Tensor) -> Tensor:
    owner = torch.repeat_interleave(sizes)
    return torch.arange(len(owner)) - (sizes.cumsum(0) - sizes)[owner] + starts[owner]


def stratified_split(stratum: Tensor, shares: Sequence[float], generator: torch.Generator) -> list[Tensor]:
    """Return the row indices of each share, in random order; each value of ``stratum [N]`` is split alike."""
    shuffled = torch.randperm(len(stratum), generator=generator)
    own = stratum[shuffled]
    size = torch.bincount(own)
    place = torch.empty_like(own)
    order = own.argsort(stable=True)
    place[order] = torch.arange(len(own)) - (size.cumsum(0) - size)[own[order]]
    bounds = torch.tensor(shares, dtype=torch.float64).cumsum(0)[:-1]
    last = (bounds[:, None] * size).round().long()  # [splits - 1, strata]: the first place of the next split
    part = (place >= last[:, own]).sum(0)
    return [shuffled[part == number] for number in range(len(shares))]


def check_shares(split: Sequence[float]) -> list[float]:
    """Return ``split`` as shares of train, val and test; raise InputError unless they are positive and sum to 1."""
    shares = list(split) if hasattr(split, "__iter__") else []
    fits = len(shares) == 3 and all(is_share(share) and share > 0 for share in shares)
    require(
        fits and math.isclose(sum(shares), 1.0),
        f"data.split={split}: must be three positive shares (train, val, test) that sum to 1",
    )
    return [float(share) for share in shares]


def is_share(value: object) -> bool:
    """Say whether ``value`` is a number in [0, 1]."""
    return isinstance(value, int | float) and 0 <= value <= 1

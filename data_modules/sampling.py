"""Draw distinct numbers at random: vectorised and reproducible from a generator."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_distinct(sizes: Tensor, counts: Tensor, generator: torch.Generator) -> Tensor:
    """Draw ``counts[s]`` distinct numbers from each block ``s`` of ``sizes[s]`` numbers.

    Every subset of a block is equally likely. The blocks are consecutive: block ``s`` starts at ``sizes[:s].sum()``.
    Both arguments are ``[S]`` int64, with counts <= sizes. Returns ``[counts.sum()]``: the blocks in order, the numbers
    of a block in random order.
    """
    starts = sizes.cumsum(0) - sizes
    dense = counts * 4 > sizes  # random draws would repeat often here: listing all numbers of the block is cheaper
    pool = _list_blocks(starts[dense], sizes[dense])
    short = counts.masked_fill(dense, 0)
    while bool(short.any()):
        block = torch.repeat_interleave(torch.where(short > 0, short + short // 4 + 8, 0))
        offset = torch.rand(len(block), generator=generator, dtype=torch.float64) * sizes[block]
        offset = torch.minimum(offset.long(), sizes[block] - 1)  # the product can round up to the size
        pool, _ = unique(torch.cat([pool, starts[block] + offset]))
        owner = torch.searchsorted(starts, pool, right=True) - 1
        have = torch.bincount(owner, minlength=len(sizes))
        short = (counts - have).clamp(min=0)
    owner = torch.searchsorted(starts, pool, right=True) - 1
    # The pool of a block is a random subset, but may be too large: shuffle each block and keep its first counts[s]
    order = (owner + torch.rand(len(pool), generator=generator, dtype=torch.float64)).argsort(stable=True)
    owner = owner[order]
    have = torch.bincount(owner, minlength=len(sizes))
    rank = torch.arange(len(pool)) - (have.cumsum(0) - have)[owner]
    return pool[order[rank < counts[owner]]]


def unique(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sorted distinct values ``[U]``, and for each of ``values [N]`` its index among them, ``[N]``."""
    distinct, index = torch.unique(values, return_inverse=True)
    return distinct, index


def _list_blocks(starts: Tensor, sizes: Tensor) -> Tensor:
    owner = torch.repeat_interleave(sizes)
    return torch.arange(len(owner)) - (sizes.cumsum(0) - sizes)[owner] + starts[owner]

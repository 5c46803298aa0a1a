"""Assign the rows of a table to the splits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from mtl.checks import InputError, require

from .splits import SPLITS, divided
from .tables.columns import as_text, cell
from .tables.kinds import check_type
from .tables.row_source import Block, RowSource

SALT = 0x5EED  # a made-up table is often drawn from ``default_rng(0)``, and its split must not repeat its numbers
Marks = Callable[[Block], "np.ndarray[Any, Any]"]  # the number of the split of each row of a block [count]


@dataclass(frozen=True)
class SplitRows:
    """The rows of one split: the rows of each block of ``source`` whose mark is ``number``; without marks, all."""

    source: RowSource
    blocks: Sequence[Block]
    counts: Tensor  # [blocks] rows of the split
    marks: Marks | None = None
    number: int = 0

    @staticmethod
    def every(source: RowSource, rows: int | None = None) -> SplitRows:
        """Return all rows of ``source`` in blocks of at most ``rows``. Raises InputError if there are none."""
        require(source.count > 0, f"{source.here} has no rows")
        blocks = source.blocks(rows)
        return SplitRows(source, blocks, torch.tensor([block.count for block in blocks]))

    def __len__(self) -> int:
        return int(self.counts.sum())

    def read(self, number: int, columns: Sequence[str], rows: Tensor | None = None) -> pl.DataFrame:
        """Return ``columns`` of the rows of block ``number``; ``rows [N]`` selects and orders them."""
        block = self.blocks[number]
        frame = self.source.read(block, columns)
        if self.marks is not None:
            frame = frame.filter(pl.Series(self.marks(block) == self.number))
        return frame if rows is None else frame[rows.numpy()]

    def frames(self, columns: Sequence[str]) -> Iterator[tuple[pl.DataFrame, str]]:
        """Yield ``columns`` of the rows of each block that has some, with the name of its file."""
        for number, block in enumerate(self.blocks):
            if self.counts[number]:
                yield self.read(number, columns), block.file


def split_by(
    marks: Marks, names: Sequence[str], source: RowSource, rows: int | None, reason: str
) -> dict[str, SplitRows]:
    """Return the splits ``names``, whose rows have the marks 0, 1, ... Raises InputError if one has no row."""
    blocks, empty = source.blocks(rows), np.zeros((0, len(names)), dtype=np.int64)
    counts = np.concatenate([empty, *(np.bincount(marks(block), minlength=len(names))[None] for block in blocks)])
    lacking = [name for name, total in zip(names, counts.sum(0).tolist(), strict=True) if not total]
    require(not lacking, f"{source.here}, {reason} {', '.join(lacking)}")
    return {
        name: SplitRows(source, blocks, torch.from_numpy(counts[:, number].copy()), marks, number)
        for number, name in enumerate(names)
    }


def marks_in(source: RowSource, column: str) -> Marks:
    """Return the index in ``SPLITS`` that the cells of ``column`` name. Raises InputError for the first bad cell."""

    def marks(block: Block) -> np.ndarray[Any, Any]:
        rows = source.read(block, [column])
        check_type(rows[column], block.file, f" to {', '.join(SPLITS)}")
        names = as_text(rows[column])
        bad = (names.is_null() | ~names.is_in(SPLITS)).arg_true()
        if len(bad):
            raise InputError(f"{cell(rows, column, bad[0], block.file)}; accepted are {', '.join(SPLITS)}")
        return names.replace_strict(list(SPLITS), range(len(SPLITS)), return_dtype=pl.Int64).to_numpy()

    return marks


def exact_marks(order: Tensor, shares: Mapping[str, float], where: str) -> Marks:
    """Cut all rows, in the ``order [N]``, by ``shares``, to the row. Raises InputError for an empty split."""
    all_marks = np.empty(len(order), dtype=np.int64)
    for number, part in enumerate(divided(order, shares, where).values()):
        all_marks[part.numpy()] = number
    return lambda block: all_marks[block.first : block.first + block.count]


def random_marks(seed: int, shares: Sequence[float], block: Block) -> np.ndarray[Any, Any]:
    """Draw for each row of a block an index into ``shares``: ``[count]``, int64; memory is needed for the block alone.

    Row i of all files uses the i-th number of a generator, so the result does not depend on the blocks.
    """
    bounds = np.cumsum(shares)[:-1] / sum(shares)
    numbers = np.random.PCG64([seed, SALT]).advance(block.first).random_raw(block.count)
    return np.searchsorted(bounds, numbers / 2.0**64, side="right")

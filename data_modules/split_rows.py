"""Assign the rows of a table to the splits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from mtl.checks import InputError, require

from .splits import SPLITS, divided, stratified_split
from .tables.columns import as_text, cell, parse
from .tables.dates import SECONDS_PER_DAY, dates
from .tables.kinds import ColumnOptions, check_type, format_of
from .tables.row_source import Block, RowSource

SALT = 0x5EED  # a made-up table is often drawn from ``default_rng(0)``, and its split must not repeat its numbers
Marks = Callable[[Block], "np.ndarray[Any, Any]"]  # the number of the split of each row of a block [count]


@dataclass(frozen=True)
class SplitRows:
    """The rows of one split: the rows of each block of ``source`` whose mark is ``number``; without marks, all."""

    source: RowSource
    blocks: Sequence[Block]
    counts: Tensor  # [blocks] rows of the split
    marks: Sequence[np.ndarray[Any, Any]] | None = None  # [count] of each block, int8: a byte for each row
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
            frame = frame.filter(pl.Series(self.marks[number] == self.number))
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
    blocks, most = source.blocks(rows), len(names) + 1  # marks beyond the names are of rows in no split
    numbers = [marks(block).astype(np.int8) for block in blocks]
    each = [np.bincount(block, minlength=most)[None, : len(names)] for block in numbers]
    counts = np.concatenate([np.zeros((0, len(names)), dtype=np.int64), *each])
    lacking = [name for name, total in zip(names, counts.sum(0).tolist(), strict=True) if not total]
    require(not lacking, f"{source.here}, {reason} {', '.join(lacking)}")
    return {
        name: SplitRows(source, blocks, torch.from_numpy(counts[:, number].copy()), numbers, number)
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
    return _marks_of(list(divided(order, shares, where).values()))


def rare_rows(source: RowSource, columns: Sequence[str], share: float) -> Tensor | None:
    """Return the stratum of each row ``[N]``: which of ``columns`` have, of two values, the one below ``share``.

    None if no column has such a value.
    """
    found = []
    for column in columns:
        kind = source.schema[column]
        if kind.is_nested() or kind == pl.Object:  # an error when the labels are read
            continue
        text = pl.concat([as_text(source.read(block, [column])[column]) for block in source.blocks(None)])
        counts = text.drop_nulls().value_counts(sort=True)
        if len(counts) == 2 and counts["count"][1] < share * len(text.drop_nulls()):
            found.append((text == counts[column][1]).fill_null(False).to_numpy())
    if not found:
        return None
    return torch.from_numpy(np.unique(np.stack(found, 1), axis=0, return_inverse=True)[1].reshape(-1))


def even_marks(strata: Tensor, shares: Mapping[str, float], generator: torch.Generator) -> Marks:
    """Cut all rows at random by ``shares``, so that each split has its share of every stratum of ``strata [N]``."""
    total = sum(shares.values())
    return _marks_of(stratified_split(strata, [share / total for share in shares.values()], generator))


def _marks_of(parts: Sequence[Tensor]) -> Marks:
    """Return the marks of rows whose numbers, in all files together, each split has."""
    all_marks = np.empty(sum(map(len, parts)), dtype=np.int64)
    for number, part in enumerate(parts):
        all_marks[part.numpy()] = number
    return lambda block: all_marks[block.first : block.first + block.count]


def time_marks(source: RowSource, column: str, shares: Mapping[str, float], gap: float, given: ColumnOptions) -> Marks:
    """Cut the rows by ``shares`` in the order of their times, as ``column`` has them; rows of one time stay together.

    ``gap``: the rows of so many days at the start of each split but the first are in no split; if the column holds
    numbers, in its units. The times of all rows are in memory, 8 bytes for each; so is the column while it is read, if
    it is text. Raises InputError for a bad cell.
    """

    blocks = source.blocks(None)
    texts, form = source.schema[column] == pl.String, ""
    every = pl.concat([source.read(block, [column]) for block in blocks]) if texts else pl.DataFrame()
    if texts and parse(every[column]).null_count():  # dates, in the one format that fits those of all files
        form = format_of(every[column], given, "date", lambda row: cell(every, column, row, source.here))

    def read(block: Block) -> np.ndarray[Any, Any]:
        rows = source.read(block, [column])
        check_type(rows[column], block.file, "", "date")
        _check_filled(rows, column, block, "data.split_by=time needs the time of each row")
        times = parse(rows[column])
        if times.null_count():
            found = dates(rows, column, block.file, None, form)
            times = found.dt.timestamp("ms") / (1000 * SECONDS_PER_DAY)
        return times.to_numpy()

    times = np.sort(np.concatenate([read(block) for block in blocks]))
    ends = np.cumsum(list(shares.values()))[:-1] / sum(shares.values())
    starts = times[(ends * len(times)).round().astype(int).clip(max=len(times) - 1)]  # of all splits but the first

    def marks(block: Block) -> np.ndarray[Any, Any]:
        own = read(block)
        numbers = np.searchsorted(starts, own, side="right")
        waits = own < np.concatenate([[-np.inf], starts + gap])[numbers]
        return np.where(waits, len(shares), numbers)

    return marks


def group_marks(source: RowSource, column: str, shares: Mapping[str, float], seed: int) -> Marks:
    """Draw for each group, the rows with the same cell of ``column``, the split of all its rows.

    The draw depends on ``seed`` and the text of the cell alone, so ``shares`` hold approximately if there are many
    groups. Raises InputError for an empty cell.
    """
    bounds = np.cumsum(list(shares.values()))[:-1] / sum(shares.values())

    def drawn(group: str) -> float:
        return int.from_bytes(blake2b(f"{seed} {group}".encode(), digest_size=8).digest()) / 2.0**64

    def marks(block: Block) -> np.ndarray[Any, Any]:
        rows = source.read(block, [column])
        check_type(rows[column], block.file, " to single values", "date")
        rows = rows.with_columns(as_text(rows[column]).replace("", None))
        _check_filled(rows, column, block, "data.split_by=group needs the group of each row")
        text = rows[column]
        groups = text.unique()
        numbers = np.searchsorted(bounds, [drawn(group) for group in groups], side="right")
        return text.replace_strict(groups, numbers, return_dtype=pl.Int64).to_numpy()

    return marks


def _check_filled(rows: pl.DataFrame, column: str, block: Block, why: str) -> None:
    empty = rows[column].is_null().arg_true()
    if len(empty):
        raise InputError(f"{cell(rows, column, empty[0], block.file)}: {why}")


def random_marks(seed: int, shares: Sequence[float], block: Block) -> np.ndarray[Any, Any]:
    """Draw for each row of a block an index into ``shares``: ``[count]``, int64; memory is needed for the block alone.

    Row i of all files uses the i-th number of a generator, so the result does not depend on the blocks.
    """
    bounds = np.cumsum(shares)[:-1] / sum(shares)
    numbers = np.random.PCG64([seed, SALT]).advance(block.first).random_raw(block.count)
    return np.searchsorted(bounds, numbers / 2.0**64, side="right")

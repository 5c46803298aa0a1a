"""Assign the rows of a table to the splits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from mtl.checks import require
from mtl.types import ROW

from .files.cloud import FILE
from .splits import SPLITS, require_rows
from .tables.cells import Cells, as_text, parse_numbers
from .tables.columns.date import SECONDS_PER_DAY
from .tables.inference import find_format
from .tables.molecules import find_scaffolds
from .tables.options import TableOptions
from .tables.row_source import Block, RowSource

MAX_RARE_SETS = 8  # columns with a rare value whose sets of rare values are strata


@dataclass(frozen=True)
class SplitRows:
    """The rows of one split: those of each block of ``source`` whose number is ``number``; without numbers, all."""

    source: RowSource
    blocks: Sequence[Block]
    counts: Tensor  # [blocks] rows of the split
    numbers: Sequence[np.ndarray[Any, Any]] | None = None  # [count] of each block, int8: the split of each row
    number: int = 0

    @staticmethod
    def every(source: RowSource, rows: int | None = None) -> SplitRows:
        """Return all rows of ``source`` in blocks of at most ``rows``. Raises InputError if there are none."""
        require(source.count > 0, f"{source.location} has no rows")
        blocks = source.blocks(rows)
        return SplitRows(source, blocks, torch.tensor([block.count for block in blocks]))

    def __len__(self) -> int:
        return int(self.counts.sum())

    def read(self, number: int, columns: Sequence[str], rows: Tensor | None = None) -> pl.DataFrame:
        """Return ``columns`` of the rows of block ``number``; ``rows [N]`` selects and orders them."""
        block = self.blocks[number]
        frame = self.source.read(block, columns)
        if self.numbers is not None:
            frame = frame.filter(pl.Series(self.numbers[number] == self.number))
        return frame if rows is None else frame[rows.numpy()]

    def frames(self, columns: Sequence[str]) -> Iterator[tuple[pl.DataFrame, str]]:
        """Yield ``columns`` of the rows of each block that has some, with the name of its file."""
        for number, block in enumerate(self.blocks):
            if self.counts[number]:
                yield self.read(number, columns), block.file

    def row_info(self, slices: Sequence[str]) -> pl.DataFrame:
        """Return the number of each row, that in its file, the file if there are several, and its ``slices``."""
        parts, cells = list[pl.DataFrame](), [pl.col(column).alias(f"slice_{column}") for column in slices]
        for frame, _ in self.frames(slices or self.source.columns[:1]):  # without a column there are no rows
            files = [pl.col(FILE).cast(pl.String).alias("file")] if FILE in frame.columns else []
            parts.append(frame.select(pl.col(ROW).cast(pl.Int64).alias("file_row"), *files, *cells))
        return pl.concat(parts, how="vertical_relaxed").with_row_index("row_id").cast({"row_id": pl.Int64})


def assign_rows(source: RowSource, parts: Mapping[str, Tensor], rows: int | None, reason: str) -> dict[str, SplitRows]:
    """Return the rows of each split, whose indices among the rows of all files ``parts`` has, in blocks of ``rows``.

    Raises InputError, which begins with ``reason``, if a split has no row.
    """
    require_rows(parts, reason)
    numbers = np.full(source.count, -1, dtype=np.int8)  # a row may be in no split
    for number, part in enumerate(parts.values()):
        numbers[part.numpy()] = number
    blocks = source.blocks(rows)
    by_block = [numbers[block.first : block.first + block.count] for block in blocks]
    counts = torch.tensor([[int((block == number).sum()) for number in range(len(parts))] for block in by_block])
    return {name: SplitRows(source, blocks, counts[:, i], by_block, i) for i, name in enumerate(parts)}


def read_cells(source: RowSource, column: str) -> Iterator[Cells]:
    """Yield the cells of ``column`` of each file."""
    for block in source.blocks(None):
        yield Cells(source.read(block, [column]), column, block.file)


def read_splits(source: RowSource, column: str) -> dict[str, Tensor]:
    """Return the indices of the rows of each split, as ``column`` names it; raise InputError for an invalid cell."""
    names = []
    for cells in read_cells(source, column):
        cells.check_type(f" to {', '.join(SPLITS)}")
        text = as_text(cells.column)
        cells.refuse(text.is_null() | ~text.is_in(SPLITS), f"; accepted are {', '.join(SPLITS)}")
        names.append(text)
    split_of_row = pl.concat(names)
    return {name: torch.from_numpy((split_of_row == name).arg_true().to_numpy().astype(np.int64)) for name in SPLITS}


def read_rare_classes(source: RowSource, columns: Sequence[str], fraction: float) -> Tensor | None:
    """Return the stratum of each row ``[N]``: which of ``columns`` have, of two values, the one below ``fraction``.

    If many columns have such a value, the stratum is the rarest one in the row: nearly each row would have a set of its
    own, and one row cannot be divided. None if no column has such a value.
    """
    rare = []
    for column in columns:
        kind = source.schema[column]
        if kind.is_nested() or kind == pl.Object:  # an error when the labels are read
            continue
        text = pl.concat([as_text(cells.column) for cells in read_cells(source, column)])
        counts = text.drop_nulls().value_counts(sort=True)
        if len(counts) == 2 and counts["count"][1] < fraction * len(text.drop_nulls()):
            rare.append((text == counts[column][1]).fill_null(False).to_numpy())
    if not rare:
        return None
    if len(rare) > MAX_RARE_SETS:
        rare.sort(key=lambda is_rare: int(is_rare.sum()))
        return torch.from_numpy(np.column_stack([*rare, np.ones(len(rare[0]), bool)]).argmax(1))
    return torch.from_numpy(np.unique(np.stack(rare, 1), axis=0, return_inverse=True)[1].reshape(-1))


def read_times(source: RowSource, column: str, options: TableOptions) -> Tensor:
    """Return the time of each row ``[N]``, float64: days, or the numbers that the column holds.

    While the column is read it is in memory. Raises InputError for an invalid cell.
    """
    date_format = ""
    if source.schema[column] == pl.String:
        rows = pl.concat([cells.frame for cells in read_cells(source, column)])
        if parse_numbers(rows[column]).null_count():  # dates, in the one format that fits those of all files
            date_format = find_format(Cells(rows, column, source.location), options, "date")
    times = []
    for cells in read_cells(source, column):
        cells.check_type("", "date")
        cells.refuse(cells.column.is_null(), ": data.split.by=time needs the time of each row")
        numbers = parse_numbers(cells.column)
        if numbers.null_count():
            numbers = cells.dates(date_format).dt.timestamp("ms") / (1000 * SECONDS_PER_DAY)
        times.append(numbers.cast(pl.Float64))
    return torch.from_numpy(pl.concat(times).to_numpy().copy())


def read_groups(source: RowSource, column: str, by: str = "group") -> Tensor:
    """Return the group of each row ``[N]``, int64: rows with the same cell of ``column`` are a group.

    With ``by="scaffold"``, rows whose molecules have the same scaffold are; empty and unreadable cells count as
    molecules without rings. While the column is read it is in memory. Raises InputError for an empty cell, or if no
    cell is a molecule.
    """
    texts = []
    for cells in read_cells(source, column):
        cells.check_type(" to single values", "date")
        if by == "scaffold":
            texts.append(find_scaffolds(as_text(cells.column)))
            continue
        cells = replace(cells, frame=cells.frame.with_columns(as_text(cells.column).replace("", None)))
        cells.refuse(cells.column.is_null(), ": data.split.by=group needs the group of each row")
        texts.append(cells.column)
    text = pl.concat(texts)
    has_some = text.null_count() < len(text)
    require(has_some, f"{source.location}, column {column!r}: data.split.by=scaffold needs molecules; no cell is one")
    return torch.from_numpy(text.fill_null("").rank("dense").to_numpy().astype(np.int64))

"""Learn vocabularies, scales and classes from training rows: all at once, or block by block.

There are two passes, which read only the columns that they need. The first counts values, to find the kind of each
column; the second measures numbers and dates. Rows in memory are a single block. Memory grows with the number of
distinct values in columns that are or may be categorical. polars' own streaming engine is not used, since it adds
numbers in an order that depends on its threads; here all processes and repeated runs learn exactly the same values.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import polars as pl

from mtl.checks import InputError, require
from mtl.types import TaskSpec

from .columns import MISSING, BadCells, Scaling, Vocabulary, advice, as_text, cell, numbers, parse
from .dates import AGE, dates, parse_dates, part_names, parts_of
from .encoder import NUMERIC, TableEncoder, ignoring, listing
from .kinds import ROWS_PER_VALUE, Given, Kind, Parse, check_type, kind_of, words
from .labels import Labels
from .lists import Elements, listed
from .statistics import Counts, Moments

logger = logging.getLogger(__name__)

# Named columns of the training rows in blocks, none of them empty, each with the name of its file
Blocks = Callable[[Sequence[str]], Iterator[tuple[pl.DataFrame, str]]]


@dataclass
class Column:
    """The current knowledge about an input column; ``kind`` is None until it can be inferred from the cells.

    ``rows``: the number of training rows. ``empty``: texts that do not count as elements of a list.
    """

    name: str
    given: Given
    rows: int
    empty: Sequence[str]
    bad: BadCells | None
    kind: Kind | None = None
    first: pl.Series | None = None  # the first cell
    varies: bool = False
    counts: Counts = field(default_factory=Counts)
    longest: int = 1  # list
    newest: datetime | None = None
    parts: dict[str, Counts] = field(default_factory=dict)  # of dates
    moments: Moments = field(default_factory=Moments)

    def count(self, frame: pl.DataFrame, where: str) -> None:
        """Count the values of a block of training rows."""
        column = frame[self.name]
        if self.first is None:
            check_type(column, where, ignoring(self.name), None)
            self.first, self.kind = column[:1], self.given.kind(column)
            check_type(column, where, ignoring(self.name), self.kind)
        self.varies = self.varies or pl.concat([self.first, column]).n_unique() > 1
        if self.kind == "date":
            self._note(dates(frame, self.name, where, self.bad and BadCells()))
        elif self.kind == "list":
            lists = listed(column, self.given.lists.get(self.name, ""), self.empty)
            self.longest = max(self.longest, int(lists.list.len().max() or 0))
            self.counts.add(lists.list.unique().explode().drop_nulls())
        elif self.kind != "numeric":
            self.counts.add(column)
            if self.kind is None and column.dtype.is_numeric():
                values = parse(column)
                few = self.counts.fewest * ROWS_PER_VALUE <= self.rows + ROWS_PER_VALUE
                if not (few and bool((values == values.round()).all())):  # cannot be categorical
                    self.kind, self.counts = "numeric", Counts()

    def _note(self, parsed: pl.Series) -> None:
        newest = parsed.max()
        if isinstance(newest, datetime):
            self.newest = max(newest, self.newest or newest)

    def settle(self, blocks: Blocks) -> None:
        """Infer the kind, now that all values are counted. Raises InputError, which names the first bad cell."""
        if self.kind is None and self.varies:
            table = self.counts.table()
            self.kind = kind_of(self.name, table, self.given.on_bad, lambda parse_cells: self._bad(blocks, parse_cells))
            if self.kind == "date":
                self._note(parse_dates(table["value"]))

    def _bad(self, blocks: Blocks, parse_cells: Parse) -> str:
        """Describe the first cell that ``parse_cells`` cannot read."""
        return self._find(blocks, lambda column: column.is_not_null() & parse_cells(column).is_null())

    def _find(self, blocks: Blocks, wanted: Callable[[pl.Series], pl.Series]) -> str:
        """Describe the first cell that is ``wanted``."""
        for frame, where in blocks([self.name]):
            found = wanted(frame[self.name]).arg_true()
            if len(found):
                return cell(frame, self.name, found[0], where)
        return f"column {self.name!r}"

    @property
    def measured(self) -> bool:
        """Whether the second pass needs the column."""
        return self.varies and self.kind in ("numeric", "date")

    def measure(self, frame: pl.DataFrame, where: str) -> None:
        """Measure the numbers or the dates of a block. Raises InputError, which names the first bad cell."""
        if self.kind == "numeric":
            self.moments.add(numbers(frame, self.name, where, self.bad))
            return
        found = dates(frame, self.name, where, self.bad)
        require(self.newest is not None, f"{where}, column {self.name!r}: no cell of the training rows is a date")
        assert self.newest is not None
        *parts, age = parts_of(found, self.newest)
        for part in parts:
            self.parts.setdefault(part.name, Counts()).add(part)
        self.moments.add(age.fill_null(float("nan")))

    def teach(self, encoder: TableEncoder, blocks: Blocks, where: str) -> str:
        """Add the learnt encoding to ``encoder``; return a description of the column for the console."""
        name = self.name
        if not self.varies:
            return f"{name} left out: constant in the training rows"
        if self.kind == "free text":
            table = self.counts.table().drop_nulls("value")
            logger.warning(
                "%s: column %r looks like free text (%.1f words on average, %.0f%% of the cells distinct) and is "
                "ignored; data.categorical=[%s] uses it as ids",
                where, name, words(table), 100 * len(table) / table["count"].sum(), name,
            )  # fmt: skip
            return f"{name} left out: free text"
        if self.kind == "numeric":
            scaling = encoder.numeric[name] = self._scaling(blocks)
            return f"{name}: numeric, mean {scaling.mean:.4g}, standard deviation {scaling.std:.4g}"
        require(name != NUMERIC, f"{where}: rename the column {NUMERIC!r}, a name that is in use")
        if self.kind == "list":
            length = self.longest if self.given.max_length is None else min(self.longest, self.given.max_length)
            vocabulary, separator = self._vocabulary(self.counts), self.given.lists.get(name, "")
            encoder.elements[name] = Elements(vocabulary, length, separator)
            return f"{name}: lists of up to {length} of {vocabulary.size - 1} elements"
        if self.kind == "date":
            assert self.newest is not None
            encoder.dates[name] = self.newest
            varying = {part: found for part, found in self.parts.items() if len(found.table().drop_nulls("value")) > 1}
            encoder.categorical.update({part: self._vocabulary(found) for part, found in varying.items()})
            encoder.numeric[f"{name} {AGE}"] = self._scaling(blocks)
            kinds = [part.removeprefix(f"{name} ") for part in varying]
            return f"{name}: date as {', '.join([*kinds, AGE])} (days before {self.newest})"
        vocabulary = encoder.categorical[name] = self._vocabulary(self.counts)
        return f"{name}: {vocabulary.size - 1} categories"

    def _vocabulary(self, counts: Counts) -> Vocabulary:
        """Return the categories with enough training rows, in sorted order."""
        table = counts.table()
        text = table.select(value=as_text(table["value"]).fill_null(MISSING), count="count")
        sums = text.group_by("value").agg(pl.col("count").sum())
        return Vocabulary(sorted(sums.filter(pl.col("count") >= self.given.min_count)["value"].to_list()))

    def _scaling(self, blocks: Blocks) -> Scaling:
        """Return the scaling of the measured numbers. Raises InputError, which names a cell that is too large."""
        found = self.moments
        if not (math.isfinite(found.mean) and math.isfinite(found.std)):
            largest = max(abs(found.least), abs(found.largest))
            large = self._find(blocks, lambda column: parse(column).abs() == largest)
            raise InputError(
                f"{large} is so large that the mean or the standard deviation of the column overflows; "
                f"{advice(self.name)}"
            )
        return Scaling(found.mean, found.std if found.std > 0 else 1.0, found.gaps)


def learn(
    blocks: Blocks,
    rows: int,
    columns: Sequence[str],
    labels: Sequence[Labels],
    where: str,
    given: Given,
    **reading: Any,
) -> tuple[TableEncoder, list[TaskSpec]]:
    """Learn the encoder of ``columns`` and the tasks from the training rows, of which there are ``rows``.

    Constant columns and free text are left out. ``where`` names the table in messages; ``reading``: separator,
    null_values and from_text. Raises InputError.
    """
    encoder = TableEncoder({}, {}, {}, {}, given.on_bad, **reading)
    bad = encoder.bad if given.on_bad == "missing" else None
    found = [Column(name, given, rows, encoder.empty, bad) for name in columns]
    targets = [task.collector() for task in labels]
    for frame, file in blocks([*columns, *(task.column for task in labels)]):
        for task, target in zip(labels, targets, strict=True):
            task.collect(target, frame, file)
        for column in found:
            column.count(frame, file)
    specs = [task.conclude(target, where) for task, target in zip(labels, targets, strict=True)]
    for column in found:
        column.settle(blocks)
        if column.measured and column.kind == "date":
            taken = [part for part in part_names(column.name) if part in columns]
            named = f"the date {column.name!r} becomes parts of this name"
            require(not taken, f"{where}: rename the column {listing(taken)}: {named}")
    measured = [column for column in found if column.measured]
    for frame, file in blocks([column.name for column in measured]) if measured else ():
        for column in measured:
            column.measure(frame, file)
    summary = [column.teach(encoder, blocks, where) for column in found]
    require(bool(summary), f"{where}: no column is left as input")
    good = bool(encoder.categorical or encoder.numeric or encoder.elements)
    require(good, f"{where}: every input column is constant in the training rows, or free text")
    logger.info("inputs: %s", "; ".join(summary))
    return encoder, specs

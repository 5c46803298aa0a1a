"""What is learnt about one input column from blocks of training rows: its kind, then its categories or its scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import polars as pl

from mtl.checks import InputError, require

from .cells import MISSING, Cells, Remarks, as_text, parse, parse_dates
from .dates import AGE, PARTS, parts_of
from .encoder import NUMERIC, TableEncoder, ignoring
from .histograms import Histogram, number_counts, of_training
from .kinds import MOST, Kind, format_of, given_kind, is_named, kind_of
from .lists import ListEncoder, listed
from .options import TableOptions
from .scale import Scale, advice
from .statistics import Counts, Moments, bounds_of, edges_of
from .vocabulary import Vocabulary

# Named columns of the training rows in blocks, none of them empty, each with the name of its file
Blocks = Callable[[Sequence[str]], Iterator[tuple[pl.DataFrame, str]]]
MANY = 10_000  # distinct numbers or dates that are counted
ROWS_PER_WORD = 2  # a word of a single training row teaches only that row's label
WORDS = 1 << 16  # words and letter groups of a column that have an id, the most frequent ones,
LONGEST = 256  # and that are read from a text, if the options say nothing else


@dataclass
class ColumnLearner:
    """The current knowledge about an input column; ``kind`` is None until it can be inferred from the cells.

    ``empty``: texts that do not count as elements of a list. ``counts``: how often each value occurs; None if the
    column has too many values that are no categories. ``problem``: why its kind cannot be inferred.
    """

    name: str
    options: TableOptions
    empty: Sequence[str]
    remarks: Remarks
    kind: Kind | None = None
    why: str = ""
    form: str = ""
    repeats: bool = False  # whole numbers that the network sees both as categories and as numbers
    problem: str = ""
    first: pl.Series | None = None  # the first cell
    varies: bool = False
    missing: int = 0
    counts: Counts | None = field(default_factory=Counts)
    elements: Counts = field(default_factory=Counts)  # list, text
    longest: int = 1  # list, text
    has_text: bool = False  # of kind text: whether some cell is neither a number nor a date
    alike: Sequence[Counts] = ()  # of the columns with the same vocabulary: a target and its lists
    newest: datetime | None = None
    parts: dict[str, Counts] = field(default_factory=dict)  # of dates
    moments: Moments = field(default_factory=Moments)
    range: tuple[float, float] = (-math.inf, math.inf)  # numbers and ages beyond are outliers
    edges: list[float] = field(default_factory=list)  # of bins of the numbers or ages
    binned: Any = 0  # counts of the numbers, or dates, by bin, see ``Histogram``

    def count(self, frame: pl.DataFrame, where: str) -> None:
        """Count the values of a block of training rows."""
        cells = Cells(frame, self.name, where, Remarks(self.options.on_invalid))  # the second pass reports them
        column = cells.column
        if self.first is None:
            cells.check_type(ignoring(self.name), None)
            self.first, self.kind = column[:1], given_kind(column, self.options)
            self.repeats = self.options.of(self.name).ids
            cells.check_type(ignoring(self.name), self.kind)
            target = self.options.of(self.name).target
            self.why = f"compared with {target}" if target else "given" if self.name in self.options.named else ""
            kind = "number" if self.repeats else self.kind
            self.form = format_of(cells, self.options, kind)
        self.varies = self.varies or pl.concat([self.first, column]).n_unique() > 1
        self.missing += column.null_count()
        if self.kind in ("list", "text"):
            lists = listed(column, self._separator, self.empty)
            longest: Any = lists.list.len().max() or 0
            self.longest = max(self.longest, int(longest))
            self.elements.add(lists.list.unique().explode().drop_nulls())
            self.counts = None
            if self.kind == "text" and not self.has_text:
                texts = as_text(column)
                bare = parse(texts).is_null() & parse_dates(texts).is_null() & texts.is_not_null()
                self.has_text = bool(bare.any())
        elif self.kind == "date":
            self._note(cells.dates(self.form))
        if self.kind in ("number", "date") and self.counts is not None and self.counts.fewest > MANY:
            self.counts = None
        if self.counts is not None:
            self.counts.add(column)
            if self.kind is None and column.dtype.is_numeric() and not self._may_be_categories(column):
                self.kind = "number"

    def _may_be_categories(self, numbers: pl.Series) -> bool:
        values = parse(numbers)
        assert self.counts is not None
        return bool((values == values.round()).all()) and (self.counts.fewest <= MOST or is_named(self.name))

    def _note(self, parsed: pl.Series) -> None:
        newest = parsed.max()
        if isinstance(newest, datetime):
            self.newest = max(newest, self.newest or newest)

    def decide_kind(self, blocks: Blocks, sample: pl.Series) -> None:
        """Infer the kind, now that all values are counted, and what an outlier is, from a ``sample`` of the cells."""
        if self.kind == "text" and self.varies and not self.has_text:
            first = self._find(blocks, lambda cells: cells.is_not_null())
            self.problem = (
                f"{first} is not text, nor is any other cell of the column: choose another kind in data.columns"
            )
        if self.kind is None and self.varies and self.counts is not None:
            table = self.counts.table()
            try:
                found = kind_of(self.name, table, self.options, lambda wanted: self._find(blocks, wanted))
            except InputError as error:
                self.problem = str(error)
                return
            self.kind, self.why, self.form, self.repeats = found.kind, found.why, found.form, found.repeats
            if self.kind == "date":
                self._note(parse_dates(table["value"], self.form))
        if self.kind == "date" and self.newest is not None:
            values = parts_of(parse_dates(sample, self.form), self.newest)[-1]
        elif self.kind == "number" or self.repeats:
            values = parse(sample, self.form)
        else:
            return
        self.range = bounds_of(values)
        self.edges = edges_of(values.clip(*self.range))

    def _find(self, blocks: Blocks, wanted: Callable[[pl.Series], pl.Series]) -> str:
        """Describe the first cell that is ``wanted``."""
        for frame, where in blocks([self.name]):
            found = wanted(frame[self.name]).arg_true()
            if len(found):
                return Cells(frame, self.name, where).describe(found[0])
        return f"column {self.name!r}"

    @property
    def _separator(self) -> str | None:
        return None if self.kind == "text" else self.options.of(self.name).separator or ""

    @property
    def used(self) -> bool:
        return self.varies and self.kind not in ("identifier", "free text")

    @property
    def is_parsed(self) -> bool:
        """Whether cells are read as numbers or dates, in the format ``form``."""
        return self.kind != "category" or self.repeats

    @property
    def measured(self) -> bool:
        """Whether the second pass needs the column."""
        return self.varies and (self.kind in ("number", "date") or self.repeats)

    def measure(self, frame: pl.DataFrame, where: str) -> None:
        """Measure the numbers or the dates of a block. Raises InputError, which names the first bad cell."""
        cells = Cells(frame, self.name, where, self.remarks)
        if self.kind == "number" or self.repeats:
            values = cells.numbers(self.form)
            self.moments.add(values, *self.range)
            self.binned = self.binned + number_counts(values, self.edges)
            return
        found = cells.dates(self.form)
        require(self.newest is not None, f"{where}, column {self.name!r}: no cell of the training rows is a date")
        assert self.newest is not None
        *parts, age = parts_of(found, self.newest)
        for part in parts:
            self.parts.setdefault(part.name, Counts()).add(part)
        age = age.fill_null(float("nan"))
        self.moments.add(age, *self.range)
        self.binned = self.binned + number_counts(age, ())

    def to_encoder(self, encoder: TableEncoder, blocks: Blocks, where: str) -> None:
        """Add the learnt encoding to ``encoder``."""
        name = self.name
        if not self.used:
            return
        if self.form and self.is_parsed:
            encoder.formats[name] = self.form
        plain = self.kind == "number" and not self.repeats
        require(plain or name != NUMERIC, f"{where}: rename the column {NUMERIC!r}, a name that is in use")
        if self.repeats:
            assert self.counts is not None
            encoder.categorical[name] = self._vocabulary(self.counts)
            encoder.numeric[name] = self._scaling(blocks)
            return
        if plain:
            encoder.numeric[name] = self._scaling(blocks)
        elif self.kind in ("list", "text"):
            most = self.options.of(name).max_length or (LONGEST if self.kind == "text" else self.longest)
            vocabulary, target = self._vocabulary(self.elements), self.options.of(name).target
            encoder.elements[name] = ListEncoder(vocabulary, min(self.longest, most), self._separator, target)
        elif self.kind == "date":
            assert self.newest is not None
            encoder.dates[name] = self.newest
            span = self.moments.largest - self.moments.least  # days
            for (low, high, cycle), (part, counts) in zip(PARTS.values(), self.parts.items(), strict=True):
                values = counts.table()["value"]
                distinct = values.drop_nulls().len()
                if distinct > high - low or (distinct > 1 and span >= cycle):  # or hours from 8 to 18, say
                    encoder.categorical[part] = self._vocabulary(counts)
                elif distinct > 1:  # as categories, the other months would be unknown; all are on one scale
                    uniform, gaps = (high - low) / math.sqrt(12), values.null_count() > 0
                    encoder.numeric[part] = Scale((low + high) / 2, uniform, gaps, edges=[low, high])
            encoder.numeric[f"{name} {AGE}"] = self._scaling(blocks)
        else:
            assert self.counts is not None
            encoder.categorical[name] = self._vocabulary(self.counts)

    def histogram(self, encoder: TableEncoder, rows: int) -> Histogram:
        """Return the histogram of the ``rows`` training rows; ``encoder`` has the column."""
        if self.name in encoder.elements:
            values, known, missing = self.elements, encoder.elements[self.name].vocabulary, self.missing
        elif self.name in encoder.categorical and not self.repeats:
            assert self.counts is not None
            values, known, missing = self.counts, encoder.categorical[self.name], 0
        else:
            mean = encoder.numeric[self.name].mean if self.name in encoder.numeric else None
            return Histogram(self.binned.tolist(), rows, mean=mean)
        alike = _by_text(self.alike or [values]).rename({"count": "all"})
        return of_training(_by_text([values]).join(alike, on="value"), self._least, known, rows, missing)

    @property
    def _least(self) -> int:
        """The number of training rows that a category needs."""
        least = self.options.vocabulary.min_count
        return max(least, ROWS_PER_WORD) if self.kind == "text" else least

    def _vocabulary(self, counts: Counts) -> Vocabulary:
        """Return the ``max_size`` most frequent categories of at least ``min_count`` training rows, sorted."""
        least, most = self._least, self.options.vocabulary.max_size or (WORDS if self.kind == "text" else None)
        sums = _by_text(self.alike or [counts])
        enough = sums.filter(pl.col("count") >= least).sort(-pl.col("count").cast(pl.Int64), "value")
        return Vocabulary(sorted(enough["value"].head(most or len(enough)).to_list()))

    def _scaling(self, blocks: Blocks) -> Scale:
        """Return the scaling of the measured numbers. Raises InputError, which names a cell that is too large."""
        found = self.moments
        if not (math.isfinite(found.mean) and math.isfinite(found.std)):
            largest = max(abs(found.least), abs(found.largest))
            large = self._find(blocks, lambda column: parse(column, self.form).abs() == largest)
            raise InputError(
                f"{large} is so large that the mean or the standard deviation of the column overflows; "
                f"{advice(self.name)}"
            )
        # Later rows too may have dates such as 9999-12-31, which stand for none
        bounds = self.range if self.kind == "date" and math.isfinite(self.range[0]) else found.bounds
        return Scale(found.mean, found.std if found.std > 0 else 1.0, found.gaps, bounds, self.edges)


def _by_text(counts: Sequence[Counts]) -> pl.DataFrame:
    """Return how often each category occurs, in the columns value and count."""
    tables = [one.table() for one in counts]
    texts = [table.select(value=as_text(table["value"]).fill_null(MISSING), count="count") for table in tables]
    return pl.concat(texts).group_by("value").agg(pl.col("count").sum())

"""What one pass over the training rows says about a column: its kind, and how often its values occur."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial

import polars as pl

from mtl.checks import InputError

from .cells import Cells, as_text, ignore_hint, parse_dates, parse_numbers
from .inference import MAX_VALUES_WITH_IDS, Kind, find_format, has_id_name, infer_kind, stated_kind
from .options import ELEMENT_KINDS, TableOptions
from .statistics import Counts

# Named columns of the training rows in blocks, none of them empty, each with the name of its file
Blocks = Callable[[Sequence[str]], Iterator[tuple[pl.DataFrame, str]]]
MAX_DISTINCT_COUNTED = 10_000  # distinct numbers or dates that are counted


@dataclass
class Profile:
    """The current knowledge about an input column; ``kind`` is None until it can be inferred from the cells.

    ``counts``: how often each value occurs; None if the column has too many values that are no categories, or holds
    lists or texts. ``problem``: why it cannot be read as its kind.
    """

    name: str
    options: TableOptions
    kind: Kind | None = None
    why: str = ""
    format: str = ""
    repeats: bool = False  # whole numbers that the network sees both as categories and as numbers
    problem: str = ""
    first: pl.Series | None = None  # the first cell
    varies: bool = False
    missing: int = 0
    counts: Counts | None = field(default_factory=Counts)
    has_text: bool = False  # of kind text: whether some cell is neither a number nor a date
    newest: datetime | None = None  # of dates

    def add(self, cells: Cells) -> None:
        """Count the values of a block of training rows. Raises InputError, which names the first invalid cell."""
        column = cells.column
        if self.first is None:
            cells.check_type(ignore_hint(self.name), None)
            self.first, self.kind = column[:1], stated_kind(column, self.options)
            self.repeats = self.options.of(self.name).ids
            cells.check_type(ignore_hint(self.name), self.kind)
            target = self.options.of(self.name).target
            self.why = f"compared with {target}" if target else "given" if self.name in self.options.named else ""
            self.format = find_format(cells, self.options, "number" if self.repeats else self.kind)
        self.varies = self.varies or pl.concat([self.first, column]).n_unique() > 1
        self.missing += column.null_count()
        if self.kind in ELEMENT_KINDS:
            self.counts = None
            if self.kind == "text" and not self.has_text:
                texts = as_text(column)
                bare = parse_numbers(texts).is_null() & parse_dates(texts).is_null() & texts.is_not_null()
                self.has_text = bool(bare.any())
        elif self.kind == "date":
            self._note_newest(cells.dates(self.format))
        if self.kind in ("number", "date") and self.counts is not None and self.counts.fewest > MAX_DISTINCT_COUNTED:
            self.counts = None
        if self.counts is not None:
            self.counts.add(column)
            if self.kind is None and column.dtype.is_numeric() and not self._may_be_categories(column):
                self.kind = "number"

    def _may_be_categories(self, numbers: pl.Series) -> bool:
        values = parse_numbers(numbers)
        assert self.counts is not None
        has_ids = self.counts.fewest <= MAX_VALUES_WITH_IDS or has_id_name(self.name)
        return has_ids and bool((values == values.round()).all())

    def _note_newest(self, dates: pl.Series) -> None:
        newest = dates.max()
        if isinstance(newest, datetime):
            self.newest = max(newest, self.newest or newest)

    def decide_kind(self, blocks: Blocks) -> None:
        """Infer the kind, now that all values are counted; ``blocks`` reads the training rows again, for messages."""
        if not self.varies:
            return
        if self.kind is None and self.counts is not None:
            table = self.counts.table()
            try:
                describe = partial(describe_first, self.name, blocks)
                inferred = infer_kind(self.name, table, self.options, describe)
            except InputError as error:
                self.problem = str(error)
                return
            self.kind, self.why = inferred.kind, inferred.why
            self.format, self.repeats = inferred.format, inferred.repeats
            if self.kind == "date":
                self._note_newest(parse_dates(table["value"], self.format))
        if (self.kind == "text" and not self.has_text) or (self.kind == "date" and self.newest is None):
            first = describe_first(self.name, blocks, pl.Series.is_not_null)
            expected = f"{'text' if self.kind == 'text' else 'a date'}, nor is any other cell of the column"
            self.problem = f"{first} is not {expected}: choose another kind in data.columns"

    @property
    def used(self) -> bool:
        return self.varies and self.kind not in ("identifier", "free text")

    @property
    def is_parsed(self) -> bool:
        """Whether cells are read as numbers or dates, in ``format``."""
        return self.kind != "category" or self.repeats


def describe_first(name: str, blocks: Blocks, wanted: Callable[[pl.Series], pl.Series]) -> str:
    """Describe the first cell of the column ``name`` that is ``wanted``."""
    for frame, where in blocks([name]):
        rows = wanted(frame[name]).arg_true()
        if len(rows):
            return Cells(frame, name, where).describe(rows[0])
    return f"column {name!r}"

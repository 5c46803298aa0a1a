"""Learn vocabularies, scales and classes from training rows that pass by in blocks, once."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from mtl.checks import InputError, require
from mtl.types import TaskSpec

from .columns import (
    MISSING,
    Scaling,
    Vocabulary,
    as_text,
    cell,
    numbers,
    parse,
)
from .dates import parse_dates
from .encoder import NUMERIC, TableEncoder, ignoring
from .kinds import DISTINCT, NEARLY, ROWS_PER_VALUE, WORDS, Given
from .labels import Labels

logger = logging.getLogger(__name__)

Blocks = Callable[[], Iterator[tuple[pl.DataFrame, str]]]  # the training rows, and the file of each block
FEW = 1 << 16  # distinct values that are not worth merging


class Counts:
    """How often each value of a column occurs, in memory that grows with the number of distinct values only."""

    def __init__(self) -> None:
        self.parts: list[pl.DataFrame] = []
        self.merged, self.pending = 0, 0  # values in the first part, and in the others

    def add(self, column: pl.Series) -> None:
        if isinstance(column.dtype, pl.Categorical | pl.Enum):
            column = column.cast(pl.String)
        part = column.rename("value").value_counts()
        self.parts.append(part)
        self.pending += len(part)
        if self.pending > max(self.merged, FEW):
            self.table()

    def table(self) -> pl.DataFrame:
        """Return the distinct values, sorted, in the columns value and count."""
        whole = pl.concat(self.parts).group_by("value").agg(pl.col("count").sum()).sort("value")
        self.parts, self.merged, self.pending = [whole], len(whole), 0
        return whole


@dataclass
class Moments:
    """Number, mean, sum of squared deviations and range of the numbers of a column, and whether cells are empty."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    least: float = math.inf
    largest: float = -math.inf
    gaps: bool = False

    def add(self, values: pl.Series, times: pl.Series | None = None) -> None:
        """Add ``values`` (float64, NaN for empty cells), each as often as ``times`` says."""
        filled = values.is_not_nan()
        self.gaps |= not bool(filled.all())
        values = values.filter(filled)
        if not len(values):
            return
        weights = pl.repeat(1, len(values), eager=True) if times is None else times.filter(filled)
        count = int(weights.sum())
        mean = float((values * weights).sum()) / count
        squares = float(((values - mean) ** 2 * weights).sum())
        apart, both = mean - self.mean, self.count + count
        # The moments of two parts from those of each (Chan, Golub and LeVeque, 1979)
        self.squares += squares + apart * apart * self.count / both * count
        self.mean += apart * count / both
        self.count = both
        self.least = min(self.least, float(values.min()))
        self.largest = max(self.largest, float(values.max()))

    @property
    def std(self) -> float:
        """The standard deviation, without Bessel's correction; exactly 0 for a constant."""
        return math.sqrt(self.squares / self.count) if self.least < self.largest else 0.0


@dataclass
class Column:
    """What is known of an input column so far; ``kind``: categorical or numeric, None: to be inferred.

    A column of numbers is taken for categories as long as ``kind_of`` might still say so of all rows.
    """

    name: str
    kind: str | None
    rows: int  # of the training
    counts: Counts = field(default_factory=Counts)
    moments: Moments = field(default_factory=Moments)

    def add(self, frame: pl.DataFrame, where: str) -> None:
        """Add a block of training rows. Raises InputError, which names the first bad cell."""
        column = frame[self.name]
        if self.kind == "numeric":
            self.moments.add(numbers(frame, self.name, where))
            return
        self.counts.add(column)
        kind = column.dtype
        if self.kind is None and kind.is_numeric():
            whole = not kind.is_float() or bool((column == column.round()).all())
            few = max(self.counts.merged, len(self.counts.parts[-1])) * ROWS_PER_VALUE <= self.rows + ROWS_PER_VALUE
            if not (whole and few):
                self._to_numbers()

    def _to_numbers(self) -> None:
        table = self.counts.table()
        require(
            not (table["value"].dtype.is_float() and bool(table["value"].is_infinite().any())),
            f"column {self.name!r} has infinite numbers among the training rows: correct or empty them",
        )
        self.moments.add(parse(table["value"]).fill_null(float("nan")), table["count"])
        self.kind, self.counts = "numeric", Counts()

    def settle(self, blocks: Blocks) -> None:
        """Infer the kind, now that all rows are known; as ``kind_of``. Raises InputError for text that is a date."""
        if self.kind is not None:
            return
        table = self.counts.table()
        kind = table["value"].dtype
        self.kind = "categorical"
        if kind in (pl.Boolean, pl.Null) or self.constant:
            return
        table = table.with_columns(number=parse(table["value"])).drop_nulls("value")
        filled = int(table["count"].sum())
        if kind == pl.String:
            days = int(table.filter(parse_dates(table["value"]).is_not_null())["count"].sum())
            require(
                days < NEARLY * filled,
                f"column {self.name!r} holds dates, which cannot be streamed yet: use its parts as columns, or set "
                f"data.categorical=[{self.name}]{ignoring(self.name)}",
            )
        parsed = table.drop_nulls("number")
        readable = int(parsed["count"].sum())
        if readable / max(1, filled) < NEARLY:
            words = int((table["value"].str.count_matches(r"\S+") * table["count"]).sum())
            if words > WORDS * filled and len(table) > DISTINCT * filled:
                self.kind, self.counts = "free text", Counts()
            return
        if readable < filled:
            self._refuse(blocks)
        values = parsed["number"]
        if not bool((values == values.round()).all()) or values.n_unique() * ROWS_PER_VALUE > readable:
            self._to_numbers()

    def _refuse(self, blocks: Blocks) -> None:
        """Raise InputError for the first cell that cannot be read as a number; the message names the cell."""
        for frame, where in blocks():
            bad = (frame[self.name].is_not_null() & parse(frame[self.name]).is_null()).arg_true()
            if len(bad):
                raise InputError(
                    f"{cell(frame, self.name, bad[0], where)} is not a number, but most of the column is. Correct it, "
                    f"or set data.categorical=[{self.name}] or data.ignore=[{self.name}]"
                )

    @property
    def constant(self) -> bool:
        """Whether all cells of the training rows are the same."""
        if self.kind == "free text":
            return False
        if self.kind == "numeric":
            return self.moments.count == 0 or (self.moments.least == self.moments.largest and not self.moments.gaps)
        return len(self.counts.table()) < 2

    def vocabulary(self, min_count: int) -> Vocabulary:
        """Return the categories, as ``Vocabulary.of``."""
        table = self.counts.table()
        text = table.select(value=as_text(table["value"]).fill_null(MISSING), count="count")
        sums = text.group_by("value").agg(pl.col("count").sum())
        return Vocabulary(sorted(sums.filter(pl.col("count") >= min_count)["value"].to_list()))

    def scaling(self) -> Scaling:
        """Return the scaling of a numeric column, as ``Scaling.of``. Raises InputError if it overflows."""
        mean, std = self.moments.mean, self.moments.std
        require(
            math.isfinite(mean) and math.isfinite(std),
            f"column {self.name!r} has numbers so large that its mean or standard deviation overflows; correct them"
            f"{ignoring(self.name)}",
        )
        return Scaling(mean, std if std > 0 else 1.0, self.moments.gaps)


def learn(
    blocks: Blocks,
    rows: int,
    columns: Sequence[str],
    labels: Sequence[Labels],
    where: str,
    given: Given,
    **reading: Any,
) -> tuple[TableEncoder, list[TaskSpec]]:
    """Return what ``TableEncoder.learnt`` and ``Labels.learnt`` return of the same ``rows`` training rows.

    Means and standard deviations are equal up to rounding. Memory grows with the number of distinct values of the
    columns that are, or may still turn out to be, categorical. ``where`` names the table in messages.
    """
    kinds = dict.fromkeys(given.categorical, "categorical") | dict.fromkeys(given.numeric, "numeric")
    found = [Column(name, kinds.get(name), rows) for name in columns]
    targets: Mapping[str, Counts | Moments] = {
        task.name: Moments() if task.kind == "regression" else Counts() for task in labels
    }
    for frame, file in blocks():
        for column in found:
            column.add(frame, file)
        for task in labels:
            target = targets[task.name]
            target.add(frame[task.column] if isinstance(target, Counts) else task.numbers(frame, file))
    specs = [_spec(task, targets[task.name], where) for task in labels]
    for column in found:
        column.settle(blocks)
    return _encoder(found, where, given.min_count, **reading), specs


def _spec(task: Labels, target: Counts | Moments, where: str) -> TaskSpec:
    if isinstance(target, Counts):
        table = target.table()
        return task.of_counts(table["value"], table["count"], where)
    require(target.count > 0, f"{where}, column {task.column!r}: no training row has a label for task {task.name!r}")
    return task.of_moments(target.mean, target.std)


def _encoder(found: Sequence[Column], where: str, min_count: int, **reading: Any) -> TableEncoder:
    vocabularies, scalings, summary = dict[str, Vocabulary](), dict[str, Scaling](), list[str]()
    for column in found:
        name = column.name
        if column.constant:
            summary.append(f"{name} left out: constant in the training rows")
        elif column.kind == "free text":
            summary.append(f"{name} left out: free text")
            ignored = "%s: column %r looks like free text and is ignored; data.categorical=[%s] uses it as ids"
            logger.warning(ignored, where, name, name)
        elif column.kind == "categorical":
            require(name != NUMERIC, f"{where}: rename the column {NUMERIC!r}, a name that is in use")
            vocabularies[name] = column.vocabulary(min_count)
            summary.append(f"{name}: {vocabularies[name].size - 1} categories")
        else:
            scaling = scalings[name] = column.scaling()
            summary.append(f"{name}: numeric, mean {scaling.mean:.4g}, standard deviation {scaling.std:.4g}")
    require(bool(summary), f"{where}: no column is left as input")
    require(
        bool(vocabularies or scalings), f"{where}: every input column is constant in the training rows, or free text"
    )
    logger.info("inputs: %s", "; ".join(summary))
    return TableEncoder(vocabularies, scalings, **reading)

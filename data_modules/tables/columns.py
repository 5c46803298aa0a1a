"""Read the cells of a column, and turn columns into tensors."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from functools import cached_property

import polars as pl
import torch
from torch import Tensor

from mtl.checks import InputError
from mtl.types import ROW

from ..files.reading import quote
from .formats import dates_in_format, numbers_in_format

logger = logging.getLogger(__name__)

FILE = "\0file"  # column with the file of each row, if a table has the rows of several files; for messages
UNKNOWN = 0  # id of a category that the training rows do not have
SPELLINGS = {"": None, "True": "true", "TRUE": "true", "False": "false", "FALSE": "false"}
MISSING = "\0missing"  # the category of empty cells; the NUL keeps it apart from any text of a file


@dataclass
class BadCells:
    """Count by column the bad cells that become missing values; ``report`` logs one warning for each column."""

    found: dict[str, tuple[int, str]] = field(default_factory=dict)

    @staticmethod
    def handle(
        bad: BadCells | None, frame: pl.DataFrame, name: str, where: str, parsed: pl.Series, accepted: str
    ) -> None:
        """Count the nonempty cells that are null in ``parsed``; if ``bad`` is None, raise InputError instead."""
        wrong = (frame[name].is_not_null() & parsed.is_null()).arg_true()
        if not len(wrong):
            return
        first = f"{cell(frame, name, wrong[0], where)} is not {accepted}"
        if bad is None:
            raise InputError(
                f"{first}; {len(wrong)} of {len(frame)} cells of these rows are not. Correct or empty them"
            )
        count, example = bad.found.get(name, (0, first))
        bad.found[name] = (count + len(wrong), example)

    def report(self) -> None:
        """Log one warning for each column with bad cells, and forget them."""
        for count, example in self.found.values():
            others = f"It and {count - 1:,} other cell{'s' * (count > 2)} of this column are" if count > 1 else "It is"
            logger.warning("%s. %s treated as missing (data.on_invalid=missing)", example, others)
        self.found.clear()


def numbers(frame: pl.DataFrame, name: str, where: str, bad: BadCells | None = None, form: str = "") -> pl.Series:
    """Return a column as float64, NaN for empty cells.

    A cell that cannot be read as a number becomes NaN and is counted in ``bad``. Without ``bad`` it raises InputError;
    the message names the cell.
    """
    parsed = parse(frame[name], form)
    finite = parsed.set(parsed.is_infinite(), None)
    BadCells.handle(bad, frame, name, where, finite, expected_number(form))
    return finite.fill_null(float("nan"))


def expected_number(form: str) -> str:
    """Describe the numbers of a format, for messages."""
    return f"a number as in {form}" if form else "a number"


def cell(frame: pl.DataFrame, name: str, index: int, where: str) -> str:
    """Return file (``where``), column, row and content of a cell, for messages."""
    value = frame[name][index]
    content = quote(value) if isinstance(value, str) else repr(value)
    file = frame[FILE][index] if FILE in frame.columns else where
    return f"{file}, column {name!r}, row {frame[ROW][index]}: {content}"


def parse(column: pl.Series, form: str = "") -> pl.Series:
    """Return ``column`` as float64, null for cells that are empty or not a number; text is read as ``form``."""
    if column.dtype == pl.String:
        if form:
            return numbers_in_format(column, form)
        column = column.str.strip_chars()
    elif not (column.dtype.is_numeric() or column.dtype == pl.Boolean):
        return pl.Series(column.name, [None] * len(column), dtype=pl.Float64)
    return column.cast(pl.Float64, strict=False).fill_nan(None)


def named(frame: pl.DataFrame) -> list[str]:
    """Return the columns of the table itself, without the numbers and files of its rows."""
    return [name for name in frame.columns if name not in (ROW, FILE)]


def as_text(column: pl.Series) -> pl.Series:
    """Return each cell as text, null if it is empty, independently of the other cells and of the type of the column.

    So a file and a DataFrame have the same categories: 3, 3.0 and "3.0" are "3"; True, "True" and "TRUE" are "true".
    """
    if isinstance(column.dtype, pl.Datetime):
        column = column.dt.replace_time_zone(None).dt.to_string("%Y-%m-%d %H:%M:%S%.f")
    elif column.dtype.is_float():  # as digits, not 1e16
        whole = (column == column.round()) & (column.abs() < 2.0**63)
        column = column.cast(pl.String).zip_with(~whole.fill_null(False), column.cast(pl.Int64, strict=False).cast(str))
    text = column.cast(pl.String).str.strip_chars().replace(SPELLINGS)
    return text.str.replace(r"^(-?\d+)\.0+$", "$1").replace("-0", "0")


def value_of(text: pl.Series, booleans: bool) -> pl.Series:
    """Return the number or date that a text stands for, in one spelling; null if it is neither.

    So 07, +7, 7.00 and 7e0 are 7, and 2026-03-01 is that day's midnight. Digits are kept: two whole numbers beyond 2^53
    stay different. ``booleans``: true is 1, and false is 0.
    """
    if booleans:
        text = text.replace({"true": "1", "false": "0"})
    parts = text.str.extract_groups(r"^\+?(-?)0*(\d+?)(?:\.(\d*?)0*)?$").struct.unnest()
    sign, whole, fraction = parts.get_columns()
    digits = (sign + whole + ("." + fraction).replace(".", "").fill_null("")).replace("-0", "0")
    number = text.cast(pl.Float64, strict=False)
    other = as_text(number.set(~number.is_finite(), None))  # such as 7e0 and .5
    dates = dates_in_format(text, "").dt.to_string("%Y-%m-%d %H:%M:%S")
    return digits.fill_null(other).fill_null(dates)


@dataclass(frozen=True)
class CategoryEncoder:
    """The categories of the training rows, with ids from 1.

    Id 0 is for all others: unknown ones, those with fewer than ``min_count`` training rows, and those beyond the
    ``max_categories`` most frequent. A cell that is spelled like no category has the id of the only one that stands
    for the same number, date or boolean, if there is one: pandas reads the hours 00 to 23 as whole numbers.
    """

    values: list[str]
    added: int = 0  # how many, at the end, came after the network was built

    @property
    def size(self) -> int:
        return len(self.values) + 1

    @cached_property  # a server encodes few rows at a time
    def _ids(self) -> pl.DataFrame:
        return pl.DataFrame({"value": self.values, "id": range(1, self.size)}, schema={"value": str, "id": pl.Int64})

    @cached_property
    def _booleans(self) -> bool:
        return {*self.values} <= {MISSING, "true", "false"} or {*self.values} <= {MISSING, "0", "1"}

    @cached_property
    def _by_value(self) -> pl.DataFrame:
        found = self._ids.with_columns(of=value_of(self._ids["value"], self._booleans))
        return found.filter(pl.col("of").is_unique() & pl.col("of").is_not_null()).select("of", "id")

    def encode(self, column: pl.Series) -> Tensor:
        """Return the ids of the cells, ``[N]`` int64."""
        text = as_text(column).fill_null(MISSING).rename("value").to_frame()
        ids = text.join(self._ids, on="value", how="left", maintain_order="left")["id"]
        if ids.null_count():
            others = text.filter(ids.is_null()).unique()
            others = others.with_columns(of=value_of(others["value"], self._booleans))
            found = others.join(self._by_value, on="of").select("value", "id")
            ids = text.join(pl.concat([self._ids, found]), on="value", how="left", maintain_order="left")["id"]
        return torch.from_numpy(ids.fill_null(UNKNOWN).to_numpy(writable=True))


@dataclass(frozen=True)
class NumberEncoder:
    """Scale a numeric column to mean 0 and standard deviation 1; empty cells become 0.

    If training rows have empty cells, a second column marks the empty cells by 1. If they have outliers, all numbers
    are first moved into ``bounds``, so that a few large ones do not make all others nearly equal. ``edges`` divide the
    training rows into bins with about as many rows each, see ``edges_of``.
    """

    mean: float
    std: float
    gaps: bool  # whether the training rows have empty cells
    bounds: tuple[float, float] | None = None
    edges: list[float] = field(default_factory=list)

    def far(self, values: pl.Series) -> int:
        """Return how many ``values`` are further from those of the training rows than their range is wide.

        The range is that of ``edges``, without outliers; where there are none, 10 standard deviations.
        """
        near = self.mean - 5 * self.std, self.mean + 5 * self.std
        low, high = (self.edges[0], self.edges[-1]) if len(self.edges) > 1 else near
        numbers, width = values.to_numpy(), high - low  # polars counts NaN, an empty cell, as the largest number
        return int(((numbers < low - width) | (numbers > high + width)).sum())

    def mean_of(self, values: pl.Series) -> float | None:
        """Return the mean of ``values`` (NaN: empty) after they are moved into ``bounds``; None if all are empty."""
        filled = values.drop_nans().to_numpy()
        low, high = self.bounds or (-math.inf, math.inf)
        return float(filled.clip(low, high).mean()) if len(filled) else None

    @property
    def scaled_edges(self) -> tuple[float, ...]:
        """``edges`` as they would be encoded, distinct in float32."""
        scaled = torch.tensor(self.edges, dtype=torch.float64).sub(self.mean).div(self.std)
        return tuple(scaled.float().unique().tolist())

    def encode(self, values: pl.Series) -> list[Tensor]:
        """Return the scaled column ``[N]`` (float32), and the marks of empty cells if ``gaps``."""
        raw = torch.from_numpy(values.to_numpy(writable=True))
        empty = raw.isnan()
        raw = raw if self.bounds is None else raw.clamp(*self.bounds)
        scaled = ((raw - self.mean) / self.std).masked_fill(empty, 0.0).float()
        return [scaled, empty.float()] if self.gaps else [scaled]


def scaled(frame: pl.DataFrame, name: str, where: str, scaling: NumberEncoder, values: pl.Series) -> list[Tensor]:
    """Return the tensors ``[N]`` of a column whose numbers are ``values``; ``where`` names its file in messages.

    Raises InputError, which names the cell, if one is too far from the training rows.
    """
    columns = scaling.encode(values)
    if not bool(columns[0].isfinite().all()):
        index = int(columns[0].isfinite().int().argmin())
        raise InputError(
            f"{cell(frame, name, index, where)} is too far from the training rows, whose mean is "
            f"{scaling.mean:.4g} and standard deviation {scaling.std:.4g}: scaled by them it overflows; {advice(name)}"
        )
    return columns


def advice(name: str) -> str:
    return f"correct it, empty it, or leave the column out with data.ignore=[{name}]"

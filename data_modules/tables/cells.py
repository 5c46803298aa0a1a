"""Read the cells of a column as texts, numbers or dates."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from typing import Any

import polars as pl

from mtl.checks import InputError, require
from mtl.types import ROW

from ..files.cloud import FILE
from ..files.reading import quote
from .formats import dates_in_format, numbers_in_format
from .options import OnInvalid

logger = logging.getLogger(__name__)

SPELLINGS = {"": None, "True": "true", "TRUE": "true", "False": "false", "FALSE": "false"}
MISSING = "\0missing"  # the category of empty cells; the NUL keeps it apart from any text of a file
MAX_EXACT_INTEGER = 2.0**53  # whole numbers from here on may be rounded in Float64


@dataclass
class Remarks:
    """What is odd about the cells read so far, by column.

    ``on_invalid``: with "missing", a cell that should be a number or date and is not becomes a missing value, and
    ``invalid`` has the number of such cells and describes the first; with "error" it raises InputError.
    ``unusual``: the number of cells by (kind, input), see ``TableEncoder.unusual_cells``. ``warned``: the inputs of
    which a warning has said that most cells are unknown.
    """

    on_invalid: OnInvalid = "error"
    invalid: dict[str, tuple[int, str]] = field(default_factory=dict)
    unusual: Counter[tuple[str, str]] = field(default_factory=Counter)
    warned: set[str] = field(default_factory=set)

    def report_invalid(self) -> None:
        """Log one warning for each column with invalid cells, and forget them."""
        for count, example in self.invalid.values():
            others = f"It and {count - 1:,} other cell{'s' * (count > 2)} of this column are" if count > 1 else "It is"
            logger.warning("%s. %s treated as missing (data.on_invalid=missing)", example, others)
        self.invalid.clear()


@dataclass(frozen=True)
class Cells:
    """The cells of the column ``name`` in rows that messages call ``where``.

    ``null_values``: the texts that do not count as elements of a list.
    """

    frame: pl.DataFrame
    name: str
    where: str
    remarks: Remarks = field(default_factory=Remarks)
    null_values: Sequence[str] = ()

    @property
    def column(self) -> pl.Series:
        return self.frame[self.name]

    def describe(self, row: int) -> str:
        """Return file, column, row and content of a cell, for messages."""
        value = self.column[row]
        content = quote(value) if isinstance(value, str) else repr(value)
        file = self.frame[FILE][row] if FILE in self.frame.columns else self.where
        return f"{file}, column {self.name!r}, row {self.frame[ROW][row]}: {content}"

    def refuse(self, invalid: pl.Series, reason: str) -> None:
        """Raise InputError, which describes the first ``invalid`` cell and ends with ``reason``, if there is one."""
        rows = invalid.arg_true()
        if len(rows):
            raise InputError(f"{self.describe(rows[0])}{reason}")

    def numbers(self, number_format: str = "") -> pl.Series:
        """Return the cells as float64, NaN for empty cells and, if ``remarks`` allow them, for invalid ones.

        Raises InputError, which names the first invalid cell.
        """
        parsed = parse_numbers(self.column, number_format)
        finite = parsed.set(parsed.is_infinite(), None)
        self.note_invalid(finite, expected_number(number_format))
        return finite.fill_null(float("nan"))

    def dates(self, date_format: str = "") -> pl.Series:
        """Return the cells as datetimes, null for empty cells and, if ``remarks`` allow them, for invalid ones.

        Raises InputError, which names the first invalid cell.
        """
        parsed = parse_dates(self.column, date_format)
        self.note_invalid(parsed, expected_date(date_format))
        return parsed

    def note_invalid(self, parsed: pl.Series, accepted: str) -> None:
        """Count the cells that are not empty but null in ``parsed``, as ``remarks`` allow it; else raise InputError."""
        invalid = (self.column.is_not_null() & parsed.is_null()).arg_true()
        if not len(invalid):
            return
        first = f"{self.describe(invalid[0])} is not {accepted}"
        if self.remarks.on_invalid == "error":
            share = f"{len(invalid)} of {len(self.frame)}"
            raise InputError(f"{first}; {share} cells of these rows are not. Correct or empty them")
        count, example = self.remarks.invalid.get(self.name, (0, first))
        self.remarks.invalid[self.name] = (count + len(invalid), example)

    def check_type(self, hint: str, kind: str | None = "number") -> None:
        """Raise InputError if the type of the column does not fit one of ``kind``; None: any.

        ``hint`` ends the message. Text, numbers and booleans fit all: their cells are looked at later.
        """
        column, dtype = self.column, self.column.dtype
        fits = dtype in (pl.String, pl.Boolean, pl.Null, pl.Categorical, pl.Enum) or dtype.is_numeric()
        fits = fits or (is_date(column) and kind in (None, "date", "category"))
        fits = fits or (is_list(column) and kind in (None, "list"))
        others = {None: ", date, or list of texts or whole numbers", "date": ", or date", "list": ", or list of such"}
        neither = f"is neither text nor number{others.get(kind, '')}"
        require(fits, f"{self.where}, column {self.name!r}: its type {dtype} {neither}; convert it{hint}")
        largest: Any = column.abs().max() if kind == "category" and dtype.is_float() else 0.0
        rounded = f"it holds categories as {dtype}, some beyond 2^53, which have lost their last digits"
        message = f"{self.where}, column {self.name!r}: {rounded}; read it as text{hint}"
        require((largest or 0.0) < MAX_EXACT_INTEGER, message)


def ignore_hint(column: str) -> str:
    """Return the end of a message about a column."""
    return f", or leave it out with data.ignore=[{column}]"


def expected_number(number_format: str) -> str:
    """Describe the numbers of a format, for messages."""
    return f"a number as in {number_format}" if number_format else "a number"


def expected_date(date_format: str) -> str:
    """Describe the dates of a format, for messages."""
    return f"a date as in {date_format or '2026-03-01 or 2026-03-01 14:30'}"


def parse_numbers(column: pl.Series, number_format: str = "") -> pl.Series:
    """Return ``column`` as float64, null for cells that are empty or no number; text is read as ``number_format``."""
    if column.dtype == pl.String:
        if number_format:
            return numbers_in_format(column, number_format)
        column = column.str.strip_chars()
    elif not (column.dtype.is_numeric() or column.dtype == pl.Boolean):
        return pl.Series(column.name, [None] * len(column), dtype=pl.Float64)
    return column.cast(pl.Float64, strict=False).fill_nan(None)


def parse_dates(column: pl.Series, date_format: str = "") -> pl.Series:
    """Return ``column`` as datetimes, to the second; null for cells that are empty or no date.

    Text is read as ``date_format`` or ISO 8601. Time zones are dropped, so that times are local.
    """
    name, dtype = column.name, column.dtype
    if isinstance(dtype, pl.Datetime):
        return column.dt.replace_time_zone(None).dt.cast_time_unit("us").dt.truncate("1s")
    if dtype == pl.Date:
        return column.cast(pl.Datetime("us"))
    if dtype != pl.String:
        return pl.Series(name, [None] * len(column), dtype=pl.Datetime("us"))
    parsed = dates_in_format(column, date_format)
    return parsed.zip_with(parsed.is_not_null(), dates_in_format(column, "")) if date_format else parsed


def is_date(column: pl.Series) -> bool:
    """Return whether a column has a date or datetime type."""
    return column.dtype == pl.Date or isinstance(column.dtype, pl.Datetime)


def is_list(column: pl.Series) -> bool:
    """Return whether a column has a type of lists whose elements may become ids."""
    dtype = column.dtype
    if not isinstance(dtype, pl.List | pl.Array):
        return False
    inner = dtype.inner
    return (
        inner in (pl.String, pl.Boolean, pl.Null)
        or bool(inner and inner.is_integer())
        or isinstance(inner, pl.Categorical | pl.Enum)
    )


def data_columns(frame: pl.DataFrame) -> list[str]:
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


@lru_cache(maxsize=256)
def texts_of(values: tuple[Any, ...], dtype: pl.DataType) -> list[str | None]:
    """Return ``as_text`` of some values: of hundreds of columns of labels, most have the same ones."""
    return as_text(pl.Series(values, dtype=dtype)).to_list()


def digest_of(rows: pl.DataFrame) -> str:
    """Return a SHA-256 digest of the rows, in their order."""
    return sha256(rows.hash_rows(seed=0).to_numpy().tobytes()).hexdigest()

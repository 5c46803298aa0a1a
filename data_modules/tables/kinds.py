"""Find what the columns of a table hold: categories, numbers, dates, lists or free text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import polars as pl

from mtl.checks import InputError, require

from .columns import parse
from .dates import ACCEPTED, is_date, parse_dates
from .lists import is_list

Kind = Literal["categorical", "numeric", "date", "list", "free text"]
OnBad = Literal["error", "missing"]

NEARLY = 0.9  # a text column with at least this share of numbers (or dates) is a numeric (date) column with mistakes
ROWS_PER_VALUE = 10  # whole numbers that occur at least this often on average are taken for categories
WORDS = 3.0  # free text has more words than this in a cell, on average,
DISTINCT = 0.5  # and more than this share of its cells are distinct


@dataclass(frozen=True)
class Given:
    """The user's options for columns: the columns whose kind is given, and how to read them.

    ``lists``: the separator of each column whose cells are lists; "" if its cells are not text. ``min_count``: the
    number of training rows that a category needs for its own id. ``max_length``: the number of elements that are read
    from a list; None: the length of the longest list in the training rows. ``on_bad``: whether a cell that cannot be
    read as a number or date is an error or a missing value.
    """

    categorical: Collection[str] = ()
    numeric: Collection[str] = ()
    dates: Collection[str] = ()
    lists: Mapping[str, str] = field(default_factory=dict)
    min_count: int = 1
    max_length: int | None = None
    on_bad: OnBad = "error"

    NAMING: ClassVar[Sequence[str]] = ("categorical", "numeric", "dates", "lists")  # fields that name columns

    @property
    def columns(self) -> list[str]:
        """The columns whose kind is given."""
        return [name for option in self.NAMING for name in getattr(self, option)]

    def kind(self, column: pl.Series) -> Kind | None:
        """Return the kind of ``column`` that is given or follows from its type; None if it depends on the cells."""
        kinds: dict[Kind, Collection[str]] = {
            "categorical": self.categorical,
            "numeric": self.numeric,
            "date": self.dates,
            "list": self.lists,
        }
        for kind, names in kinds.items():
            if column.name in names:
                return kind
        if is_date(column):
            return "date"
        if is_list(column):
            return "list"
        return None if column.dtype == pl.String or column.dtype.is_numeric() else "categorical"


def check_type(column: pl.Series, where: str, hint: str, kind: Kind | None = "numeric") -> None:
    """Raise InputError if the type of a column does not fit one of ``kind``, None: any; ``hint`` ends the message.

    Text, numbers and booleans fit all: their cells are looked at later.
    """
    dtype = column.dtype
    fits = dtype in (pl.String, pl.Boolean, pl.Null, pl.Categorical, pl.Enum) or dtype.is_numeric()
    fits = fits or (is_date(column) and kind in (None, "date", "categorical"))
    fits = fits or (is_list(column) and kind in (None, "list"))
    others = {None: ", date, or list of texts or whole numbers", "date": ", or date", "list": ", or list of such"}
    neither = f"is neither text nor number{others.get(kind, '')}"
    require(fits, f"{where}, column {column.name!r}: its type {dtype} {neither}; convert it{hint}")


def kind_of(name: str, table: pl.DataFrame, on_bad: OnBad, first: Callable[[Parse], str]) -> Kind:
    """Return the kind of a column of texts or numbers from its distinct values, in the columns value and count.

    Categories are text, or whole numbers that repeat: at least ``ROWS_PER_VALUE`` rows per value on average. A text
    column holds dates if all its cells are dates, and free text if cells are long and nearly all distinct. For text
    that is mostly numbers or dates, InputError is raised, unless ``on_bad`` makes the other cells missing values, or
    the numbers are categories. ``first`` describes the first cell that cannot be parsed, for the message.
    """
    table = table.drop_nulls("value")
    values, filled = table["value"], int(table["count"].sum())

    def holds(parse_cells: Parse, accepted: str) -> pl.DataFrame | None:
        """Return the values that are ``accepted``, parsed, if nearly all cells are."""
        parsed = table.with_columns(parsed=parse_cells(values)).drop_nulls("parsed")
        share = int(parsed["count"].sum()) / max(1, filled)
        if share < NEARLY:
            return None
        if share < 1.0 and on_bad == "error":
            raise InputError(
                f"{first(parse_cells)} is not {accepted}, but most of the column is. Correct it, or set "
                f"data.on_bad=missing, data.categorical=[{name}] or data.ignore=[{name}]"
            )
        return parsed

    if values.dtype == pl.String and holds(parse_dates, ACCEPTED) is not None:
        return "date"
    numbers = holds(parse, "a number")
    if numbers is not None:
        found = numbers["parsed"]
        repeats = bool((found == found.round()).all()) and found.n_unique() * ROWS_PER_VALUE <= numbers["count"].sum()
        return "categorical" if repeats else "numeric"
    long = values.dtype == pl.String and words(table) > WORDS and len(table) > DISTINCT * filled
    return "free text" if long else "categorical"


def words(table: pl.DataFrame) -> float:
    """Return the average number of words in the cells of a table of distinct texts, in the columns value and count."""
    return float((table["value"].str.count_matches(r"\S+") * table["count"]).sum() / max(1, table["count"].sum()))


Parse = Callable[[pl.Series], pl.Series]

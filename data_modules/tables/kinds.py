"""Find what the columns of a table hold: categories, numbers, dates, lists or free text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import polars as pl

from mtl.checks import InputError, require

from ..options import refused
from .bad_cells import ERROR, MISSING
from .columns import cell, parse
from .dates import ACCEPTED, is_date, parse_dates
from .lists import is_list

Kind = Literal["categorical", "numeric", "date", "list", "free text"]

NEARLY = 0.9  # a text column with at least this share of numbers, or dates, is taken for those with mistakes
ROWS_PER_VALUE = 10  # whole numbers that occur at least this often on average are taken for categories
WORDS = 3.0  # free text has more words than this in a cell, on average,
DISTINCT = 0.5  # and more than this share of its cells are distinct


@dataclass(frozen=True)
class Given:
    """What the user says about the columns: the names of those whose kind is given, and how to read them.

    ``lists``: the separator of each column whose cells are lists, "" if they are no text. ``min_count``: how many
    training rows a category needs for an id of its own. ``max_length``: the most elements of a list that are read,
    None: as many as the longest list of the training rows has. ``on_bad``: "error" or "missing",
    what a cell becomes that cannot be read as a number or date.
    """

    categorical: Collection[str] = ()
    numeric: Collection[str] = ()
    dates: Collection[str] = ()
    lists: Mapping[str, str] = field(default_factory=dict)
    min_count: int = 1
    max_length: int | None = None
    on_bad: str = ERROR

    NAMING: ClassVar[Sequence[str]] = ("categorical", "numeric", "dates", "lists")  # those that name columns

    @property
    def columns(self) -> list[str]:
        """The columns whose kind is given."""
        return [name for option in self.NAMING for name in getattr(self, option)]


def separators(lists: Any) -> dict[str, str]:
    """Return the separator of each column of the option ``data.lists``, "" for null. Raises InputError."""
    good = lists is None or isinstance(lists, Mapping)
    good = good and all(
        isinstance(name, str) and (text is None or isinstance(text, str)) for name, text in (lists or {}).items()
    )
    if not good:
        raise refused(
            "lists", lists, "a mapping from columns to separators, as in {genres: '|'}; null if cells are lists"
        )
    return {name: text or "" for name, text in (lists or {}).items()}


def check_input(frame: pl.DataFrame, name: str, where: str, hint: str, kind: Kind | None = None) -> None:
    """Raise InputError if the type of a column does not fit an input of ``kind``, None: any; ``hint`` ends the message.

    Text, numbers and booleans fit all: their cells are looked at later.
    """
    column, dtype = frame[name], frame[name].dtype
    fits = dtype in (pl.String, pl.Boolean, pl.Null) or dtype.is_numeric()
    fits = fits or isinstance(dtype, pl.Categorical | pl.Enum)
    fits = fits or (is_date(column) and kind in (None, "date", "categorical"))
    fits = fits or (is_list(column) and kind in (None, "list"))
    others = {None: ", date, or list of texts or whole numbers", "date": ", or date", "list": ", or list of such"}
    neither = f"is neither text nor number{others.get(kind, '')}"
    require(
        fits,
        f"{where}, column {name!r}: its type {dtype} {neither}; convert it{hint}",
    )


def kind_of(frame: pl.DataFrame, name: str, where: str, given: Given) -> Kind:
    """Return the kind of a column of the training rows: the one ``given``, or else what its cells look like.

    Categories are text, booleans, and whole numbers that repeat: at least ``ROWS_PER_VALUE`` rows per value on average.
    Text is a date if all cells are, and free text if it is long and its cells are nearly all distinct. Raises
    InputError for text that is mostly numbers or dates, unless ``given.on_bad`` makes the rest missing values, or
    categories if the numbers are.
    """
    kinds: dict[Kind, Collection[str]] = {
        "categorical": given.categorical,
        "numeric": given.numeric,
        "date": given.dates,
        "list": given.lists,
    }
    column, dtype = frame[name], frame[name].dtype
    for kind, names in kinds.items():
        if name in names:
            return kind
    if is_date(column):
        return "date"
    if is_list(column):
        return "list"
    if dtype == pl.Boolean or isinstance(dtype, pl.Categorical | pl.Enum):
        return "categorical"
    if dtype == pl.String and _holds(frame, name, where, given, parse_dates(column), ACCEPTED):
        return "date"
    parsed = parse(column)
    if _holds(frame, name, where, given, parsed, "a number"):
        values = parsed.drop_nulls()
        repeats = bool((values == values.round()).all()) and values.n_unique() * ROWS_PER_VALUE <= len(values)
        return "categorical" if repeats else "numeric"
    return "free text" if is_free_text(column) else "categorical"


def _holds(frame: pl.DataFrame, name: str, where: str, given: Given, parsed: pl.Series, accepted: str) -> bool:
    """Return whether the cells of a column are what ``parsed`` says, which is null for those that are not.

    Raises InputError if nearly all are, unless ``given.on_bad`` makes the rest missing values.
    """
    column = frame[name]
    filled = len(column) - column.null_count()
    share = (len(parsed) - parsed.null_count()) / max(1, filled)
    if share < NEARLY:
        return False
    if share < 1.0 and given.on_bad != MISSING:
        bad = (column.is_not_null() & parsed.is_null()).arg_true()
        raise InputError(
            f"{cell(frame, name, bad[0], where)} is not {accepted}, but most of the column is. Correct it, or set "
            f"data.on_bad={MISSING}, data.categorical=[{name}] or data.ignore=[{name}]"
        )
    return True


def is_free_text(column: pl.Series) -> bool:
    """Return whether a column of texts is too long and too varied for categories: more than ``WORDS`` words in a cell.

    Names, addresses of computers, codes and other ids have fewer words; categories of several words repeat.
    """
    texts = column.drop_nulls()
    if texts.dtype != pl.String or len(texts) == 0:
        return False
    words = texts.str.count_matches(r"\S+").mean()
    assert isinstance(words, float)
    return words > WORDS and texts.n_unique() > DISTINCT * len(texts)


def describe_text(column: pl.Series) -> str:
    """Return how a column of free text looks."""
    texts = column.drop_nulls()
    words, share = texts.str.count_matches(r"\S+").mean(), texts.n_unique() / len(texts)
    return f"{words:.1f} words on average, {share:.0%} of the cells distinct"

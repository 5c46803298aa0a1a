"""Find what the columns of a table hold: categories, numbers, dates, lists, texts, identifiers or free text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import polars as pl

from mtl.checks import InputError

from .cells import Cells, expected_date, expected_number, is_date, is_list, parse_dates, parse_numbers
from .formats import DATE_FORMATS, Fit, best_fit, number_formats, some_values
from .options import ColumnKind, TableOptions

Kind = Literal[ColumnKind, "identifier", "free text"]

TWO_NUMBERS = r"\d\D+\d"  # a date has them in every format
# A text column of which at least this fraction are numbers (or dates) is a numeric (date) column with mistakes
MIN_PARSED_FRACTION = 0.9
ROW_NUMBER_NAME = re.compile(r"id|index|row|row number|unnamed \d+")  # names of columns that number the rows
# A column that is named like a row number and has fewer rows for each value is a number: no embedding of a single id
# could be learnt, but an id that grows with time says how late a row is
MIN_ROWS_PER_ID = 3
# A column of whole numbers whose values have MIN_ROWS_PER_VALUE rows on average is categorical if it has at most
# MAX_CATEGORIES values. From three up to MAX_VALUES_WITH_IDS of them have both an id and a place on a scale
MIN_ROWS_PER_VALUE = 10
MAX_CATEGORIES = 32
MAX_VALUES_WITH_IDS = 256
MIN_UNIQUE_FRACTION = 0.9  # of the cells of an identifier
MIN_WORDS = 3.0  # in a cell of free text, on average
MIN_DISTINCT_FRACTION = 0.5  # of the cells of free text
ID_WORDS = "id|ids|uid|uuid|guid|key|code|hash|zip|zipcode|postcode|sku|isbn|ean|asin"
ENTITIES = "user|customer|client|member|patient|account|item|product|article|movie|book|store|shop|seller|merchant"
ID_NAME = re.compile(
    rf"(id|uuid|guid|isbn|zip)( .*)?|(.* )?({ID_WORDS}|({ENTITIES})id)|{ENTITIES}|index|row|row number|unnamed \d+"
)


def stated_kind(column: pl.Series, options: TableOptions) -> Kind | None:
    """Return the kind of ``column`` that is given or follows from its type; None if it depends on the cells."""
    column_options = options.of(str(column.name))
    if column_options.kind is not None:
        return "category" if column_options.ids else column_options.kind  # it is both
    if column.name in options.targets.values():
        return "category"
    if is_date(column) or column_options.format in DATE_FORMATS:
        return "date"
    if is_list(column):
        return "list"
    return None if column.dtype == pl.String or column.dtype.is_numeric() else "category"


@dataclass(frozen=True)
class Inferred:
    """What a column holds, why, and the format of its dates or numbers.

    ``repeats``: whole numbers that are worth an id for each value, but whose order may mean something too.
    """

    kind: Kind
    why: str
    format: str = ""
    repeats: bool = False


def infer_kind(name: str, table: pl.DataFrame, options: TableOptions, first: Callable[[Parse], str]) -> Inferred:
    """Return what a column of texts or numbers holds from its distinct values, in the columns value and count.

    * Texts that are dates, or numbers, in one format are dates, or numbers as below.
    * Whole numbers in a column that is named like an identifier are an identifier if nearly all of them are distinct,
      and else categories (a number if the name is that of a row number, see ``MIN_ROWS_PER_ID``).
    * Other whole numbers with ``MIN_ROWS_PER_VALUE`` rows for each value are categories up to ``MAX_CATEGORIES`` values
      and numbers up to ``MAX_VALUES_WITH_IDS``; with more than two values they are read as both.
    * All other numbers are numbers.
    * Other texts are free text if they are long and mostly distinct, an identifier if nearly all of them are distinct,
      and else categories.

    Raises InputError if several formats fit equally many cells but read some of them differently, if dates are written
    in two formats, or if most but not all cells are numbers or dates and ``options.on_invalid`` is "error". ``first``
    describes the first cell of which a condition holds, for the message.
    """
    table = table.drop_nulls("value")
    values, filled, distinct = table["value"], int(table["count"].sum()), len(table)
    text, given_format = values.dtype == pl.String, options.of(name).format
    formats = None if given_format is None else [given_format]

    def read(
        parse_cells: Reader, formats: Sequence[str], expected: Callable[[str], str]
    ) -> tuple[str, pl.Series] | None:
        """Return the format that reads nearly all cells, and what it reads; None if there is none."""
        fit = best_fit(table, formats, parse_cells)
        if fit.fraction < MIN_PARSED_FRACTION:
            return None
        cell_format = single_format(fit, name, parse_cells, first)
        if fit.fraction < 1.0 and options.on_invalid == "error":
            invalid = first(lambda cells: cells.is_not_null() & parse_cells(cells, cell_format).is_null())
            unread = round((1 - fit.fraction) * filled)
            raise InputError(
                f"{invalid} is not {expected(cell_format)}, but most of the column is; {unread:,} of {filled:,} cells "
                f"are not. Correct it, or set data.on_invalid=missing, 'data.columns={{{name}: category}}' or "
                f"data.ignore=[{name}]"
            )
        return cell_format, fit.parsed

    cells_of_two_numbers = (values.str.contains(TWO_NUMBERS) * table["count"]).sum() if text else 0
    if text and formats is None and cells_of_two_numbers >= MIN_PARSED_FRACTION * max(1, filled):
        dates = read(parse_dates, ["", *DATE_FORMATS], expected_date)
        if dates is not None:
            return Inferred("date", "", dates[0])
        two = two_date_formats(values)
        if two:
            invalid = first(lambda cells: cells.is_not_null() & parse_dates(cells, two[0]).is_null())
            raise InputError(
                f"{invalid} is not {expected_date(two[0])}, as other cells are. "
                f"Write all in one way, or set 'data.columns={{{name}: category}}' or data.ignore=[{name}]"
            )
    numbers = read(parse_numbers, formats or ["", *(number_formats(values) if text else ())], expected_number)
    if numbers is not None:
        cell_format, parsed = numbers
        return infer_numeric(name, table, parsed, cell_format)
    if text and mean_words(table) > MIN_WORDS and distinct > MIN_DISTINCT_FRACTION * filled:
        return Inferred("free text", f"{mean_words(table):.1f} words on average")
    if distinct > MIN_UNIQUE_FRACTION * filled:
        return Inferred("identifier", "like an identifier")
    return Inferred("category", "")


def single_format(fit: Fit, name: str, parse_cells: Reader, first: Callable[[Parse], str]) -> str:
    """Return the only format that fits; raise InputError, with a cell that ``first`` describes, if there are two."""
    cell_format, *others = fit.formats
    if others:
        differ = first(lambda cells: ~parse_cells(cells, cell_format).eq_missing(parse_cells(cells, others[0])))
        raise InputError(
            f"{differ} may be written as {cell_format} or {others[0]}, and no other cell tells: give "
            f"'data.columns={{{name}: {{format: {quote_format(cell_format)}}}}}' or {quote_format(others[0])}"
        )
    return cell_format


def two_date_formats(values: pl.Series) -> list[str]:
    """Return the two formats in one of which nearly all texts are dates; [] if there are none."""
    unread, formats = some_values(values), list[str]()
    max_unread = (1 - MIN_PARSED_FRACTION) * len(unread)
    for _ in range(2):
        counts = {cell_format: parse_dates(unread, cell_format).count() for cell_format in ("", *DATE_FORMATS)}
        formats.append(max(counts, key=counts.__getitem__))
        if not counts[formats[-1]]:
            return []
        unread = unread.filter(parse_dates(unread, formats[-1]).is_null())
    return formats if len(unread) <= max_unread else []


def find_format(cells: Cells, options: TableOptions, kind: Kind | None) -> str:
    """Return the format of a column whose kind is given, from its first cells; "" if it has no other than the standard.

    Raises InputError, which describes a cell, if two formats fit.
    """
    cell_format, column = options.of(cells.name).format, cells.column
    if cell_format is not None:
        return cell_format
    if column.dtype != pl.String or kind not in ("number", "date"):
        return ""
    table = column.rename("value").drop_nulls().value_counts(sort=True)
    parse_cells: Reader = parse_dates if kind == "date" else parse_numbers
    formats = [*DATE_FORMATS] if kind == "date" else number_formats(table["value"])
    fit = best_fit(table, ["", *formats], parse_cells)

    def first(wanted: Parse) -> str:
        return cells.describe(int(wanted(column).arg_true()[0]))

    return single_format(fit, cells.name, parse_cells, first) if fit.fraction >= MIN_PARSED_FRACTION else ""


def infer_numeric(name: str, table: pl.DataFrame, parsed: pl.Series, cell_format: str) -> Inferred:
    """Return what a column of numbers holds; ``parsed`` are the values of ``table``, null for invalid cells."""
    numbers, count = parsed.drop_nulls(), int(table["count"].filter(parsed.is_not_null()).sum())
    distinct, why = numbers.n_unique(), ""
    if bool((numbers == numbers.round()).all()):
        if has_id_name(name):
            if distinct > MIN_UNIQUE_FRACTION * count:
                return Inferred("identifier", "like an identifier")
            if distinct * MIN_ROWS_PER_ID > count and ROW_NUMBER_NAME.fullmatch(split_name(name)):
                return Inferred("number", "an identifier with few rows each", cell_format)
            return Inferred("category", "named like an identifier", cell_format)
        if distinct <= MAX_VALUES_WITH_IDS and distinct * MIN_ROWS_PER_VALUE <= count:
            kind: Kind = "category" if distinct <= MAX_CATEGORIES else "number"
            return Inferred(kind, "whole numbers that repeat", cell_format, repeats=distinct > 2)
        why = "whole numbers" if distinct * MIN_ROWS_PER_VALUE <= count else ""
    return Inferred("number", why, cell_format)


def has_id_name(name: str) -> bool:
    """Return whether a column is named like an identifier: customer_id, OrderID, zip code, user."""
    return ID_NAME.fullmatch(split_name(name)) is not None


def split_name(name: str) -> str:
    """Return the words of a name in lower case: "order id" for OrderID and order_id."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", " ", name).strip().lower()


def mean_words(table: pl.DataFrame) -> float:
    """Return the average number of words in the cells of a table of distinct texts, in the columns value and count."""
    total: Any = (table["value"].str.count_matches(r"\S+") * table["count"]).sum()
    return float(total / max(1, table["count"].sum()))


def quote_format(cell_format: str) -> str:
    """Return a format as a value of the command line."""
    return cell_format if cell_format in DATE_FORMATS and "," not in cell_format else f'"{cell_format}"'


Parse = Callable[[pl.Series], pl.Series]
Reader = Callable[[pl.Series, str], pl.Series]  # with the format of the cells

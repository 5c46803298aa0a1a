"""Read dates and numbers that are written in other ways than 2026-03-01 and 1234.5.

A format is an example: ``dd/mm/yyyy``, or ``1.234,5 kg`` for numbers with a decimal comma and the unit kg; "" is the
standard one, ISO 8601 or a plain number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

ISO = "%Y-%m-%d"
DATE_FORMATS = {  # a time of the day, as in 14:30 or 2:30 PM, may follow each
    "dd/mm/yyyy": "%d/%m/%Y",
    "mm/dd/yyyy": "%m/%d/%Y",
    "yyyy/mm/dd": "%Y/%m/%d",
    "dd.mm.yyyy": "%d.%m.%Y",
    "dd-mm-yyyy": "%d-%m-%Y",
    "mm-dd-yyyy": "%m-%d-%Y",
    "dd mmm yyyy": "%d %B %Y",  # mmm: a month's English name, in full or its first letters
    "dd-mmm-yyyy": "%d-%B-%Y",
    "mmm dd, yyyy": "%B %d, %Y",
    "dd/mm/yy": "%d/%m/%y",
    "mm/dd/yy": "%m/%d/%y",
    "dd.mm.yy": "%d.%m.%y",
}
NUMBER_FORMATS = {"1,234.5": (",", "."), "1.234,5": (".", ",")}  # the signs for thousands and decimals
NUMBERS = " or ".join(NUMBER_FORMATS)
ACCEPTED = f"a date such as {', '.join(DATE_FORMATS)}, or a number such as {NUMBERS}, perhaps with its unit"

CLOCK = r"[ T]+(\d{1,2}:\d{2})(:\d{2})?(?:[.,]\d+)?\s*(?:([AaPp][Mm])|Z|[+-]\d{2}(?::?\d{2})?)?$"
CURRENCY = r"[€$£¥₹]|EUR|USD|GBP|CHF"
UNIT = r"%|[€$£¥₹]|[\p{L}°µ][\p{L}\d²³/]{0,7}"
WITH_UNIT = rf"^({CURRENCY})?(\s*)[+-]?\d(?:[\d.,'\s]*\d)?(\s*)({UNIT})?$"
SAMPLE_VALUES = 200  # values that rule out most formats
MIN_YEAR = 1000  # of a year with four digits


def dates_in_format(text: pl.Series, date_format: str) -> pl.Series:
    """Return texts as datetimes, to the second; null for cells that do not fit ``date_format``, which may be ""."""
    cells = text.str.strip_chars().alias("cell").to_frame()
    minutes, seconds, half = (pl.col("cell").str.extract(CLOCK, group) for group in (1, 2, 3))
    clock = minutes.fill_null("0:00") + seconds.fill_null(":00")
    time = (
        pl.when(half.is_null())
        .then(clock.str.to_time("%H:%M:%S", strict=False))
        .otherwise((clock + " " + half.str.to_uppercase()).str.to_time("%I:%M:%S %p", strict=False))
    )
    day = pl.col("cell").str.replace(CLOCK, "").str.to_date(DATE_FORMATS.get(date_format, ISO), strict=False)
    is_valid = day.dt.year() >= (MIN_YEAR if date_format else 1)
    dates = cells.select(pl.when(is_valid).then(day.dt.combine(time)).alias(text.name))
    return dates.to_series().cast(pl.Datetime("us"))


def numbers_in_format(text: pl.Series, number_format: str) -> pl.Series:
    """Return texts as float64; null for cells that do not fit ``number_format``.

    It is a key of ``NUMBER_FORMATS`` with a unit, which a cell may lack.
    """
    [(prefix, suffix, (thousands, decimal))] = [
        (*number_format.split(number, 1), signs) for number, signs in NUMBER_FORMATS.items() if number in number_format
    ]
    before, behind = (re.escape(str(part).strip()) for part in (prefix, suffix))
    group = rf"[{re.escape(thousands)}'\s]"
    digits = rf"[+-]?(?:\d{{1,3}}(?:{group}\d{{3}})+|\d+)(?:{re.escape(decimal)}\d+)?"
    digits_alone = text.str.strip_chars().str.extract(rf"^(?:{before})?\s*({digits})\s*(?:{behind})?$", 1)
    return digits_alone.str.replace_all(group, "").str.replace(decimal, ".", literal=True).cast(pl.Float64)


def write_number(number: float, number_format: str) -> str:
    """Return a number as text that ``numbers_in_format`` reads as the same number."""
    decimal = next((decimal for example, (_, decimal) in NUMBER_FORMATS.items() if example in number_format), "")
    text = np.format_float_positional(number, trim="-") if decimal else str(number).removesuffix(".0")
    return text.replace(".", decimal or ".")


def number_formats(text: pl.Series) -> list[str]:
    """Return the formats that the numbers in texts may have, all with the unit of the first of them."""
    parts = some_values(text).str.strip_chars().str.extract_groups(WITH_UNIT).struct.unnest()
    parts = parts.filter(pl.any_horizontal(pl.all().is_not_null()))
    before, gap_before, gap_behind, behind = (part or "" for part in (parts.row(0) if len(parts) else [""] * 4))
    before, behind = before and before + gap_before, behind and gap_behind + behind
    return [f"{before}{number}{behind}" for number in NUMBER_FORMATS]


@dataclass(frozen=True)
class Fit:
    """The formats that fit the most cells, what the first of them reads, and their fraction of the cells."""

    formats: list[str]
    parsed: pl.Series
    fraction: float


def best_fit(table: pl.DataFrame, formats: Sequence[str], read: Callable[[pl.Series, str], pl.Series]) -> Fit:
    """Return the formats that fit the most cells of distinct texts, in the columns value and count.

    Formats that read all texts alike count once, and the standard format, if it fits, is the only one.
    """
    values, count = table["value"], table["count"]
    sample = some_values(values)
    likely = [cell_format for cell_format in formats if read(sample, cell_format).count() * 2 >= len(sample)]
    parsed_by_format = {cell_format: read(values, cell_format) for cell_format in likely}
    cells = {written: int(count.filter(parsed.is_not_null()).sum()) for written, parsed in parsed_by_format.items()}
    fitting = [cell_format for cell_format in likely if cells[cell_format] == max(cells.values())]
    if not fitting:
        return Fit([], values.clear(), 0.0)
    parsed = parsed_by_format[fitting[0]]
    others = [text for text in fitting[1:] if fitting[0] and not parsed_by_format[text].equals(parsed)]
    return Fit([fitting[0], *others], parsed, cells[fitting[0]] / max(1, int(count.sum())))


def some_values(values: pl.Series) -> pl.Series:
    """Return some values from all parts of a column."""
    return values.gather_every(max(1, len(values) // SAMPLE_VALUES))

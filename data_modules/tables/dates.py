"""Read dates, and split them into parts that a network can use."""

from __future__ import annotations

from datetime import datetime

import polars as pl

from .columns import BadCells
from .formats import dates_in_format

# The first and the last value, and the days after which those that occur have probably all occurred
PARTS = {"month": (1, 12, 365), "day": (1, 31, 365), "weekday": (1, 7, 7), "hour": (0, 23, 7)}
AGE = "age"
SECONDS_PER_DAY = 86_400
ACCEPTED = "a date as in 2026-03-01 or 2026-03-01 14:30"


def is_date(column: pl.Series) -> bool:
    """Return whether a column has a date or datetime type."""
    return column.dtype == pl.Date or isinstance(column.dtype, pl.Datetime)


def expected_date(form: str) -> str:
    """Describe the dates of a format, for messages."""
    return f"a date as in {form}" if form else ACCEPTED


def parse_dates(column: pl.Series, form: str = "") -> pl.Series:
    """Return ``column`` as datetimes, to the second; null for cells that are empty or no date.

    Text is read as ``form`` or ISO 8601. Time zones are dropped, so that times are local.
    """
    name, kind = column.name, column.dtype
    if isinstance(kind, pl.Datetime):
        return column.dt.replace_time_zone(None).dt.cast_time_unit("us").dt.truncate("1s")
    if kind == pl.Date:
        return column.cast(pl.Datetime("us"))
    if kind != pl.String:
        return pl.Series(name, [None] * len(column), dtype=pl.Datetime("us"))
    found = dates_in_format(column, form)
    return found.zip_with(found.is_not_null(), dates_in_format(column, "")) if form else found


def dates(frame: pl.DataFrame, name: str, where: str, bad: BadCells | None = None, form: str = "") -> pl.Series:
    """Return a column as datetimes, null for empty cells.

    A cell that is no date counts in ``bad`` and becomes null; without ``bad`` it raises InputError, which names it.
    """
    parsed = parse_dates(frame[name], form)
    BadCells.handle(bad, frame, name, where, parsed, expected_date(form))
    return parsed


def parts_of(column: pl.Series, newest: datetime) -> list[pl.Series]:
    """Return the parts of a column of datetimes, each called "COLUMN PART", with the age in days before ``newest``."""
    name = column.name
    age = (newest - column).dt.total_seconds() / SECONDS_PER_DAY
    found = (column.dt.month(), column.dt.day(), column.dt.weekday(), column.dt.hour(), age)
    return [part.alias(part_name) for part, part_name in zip(found, part_names(name), strict=True)]


def part_names(column: str) -> list[str]:
    """Return the names of the parts of a column of dates, the age last."""
    return [f"{column} {part}" for part in (*PARTS, AGE)]

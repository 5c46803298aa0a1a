"""Split dates into parts that a network can use."""

from __future__ import annotations

from datetime import datetime

import polars as pl

# The first and the last value, and the days after which those that occur have probably all occurred
PARTS = {"month": (1, 12, 365), "day": (1, 31, 365), "weekday": (1, 7, 7), "hour": (0, 23, 7)}
AGE = "age"
SECONDS_PER_DAY = 86_400


def parts_of(column: pl.Series, newest: datetime) -> list[pl.Series]:
    """Return the parts of a column of datetimes, each called "COLUMN PART", with the age in days before ``newest``."""
    name = column.name
    age = (newest - column).dt.total_seconds() / SECONDS_PER_DAY
    found = (column.dt.month(), column.dt.day(), column.dt.weekday(), column.dt.hour(), age)
    return [part.alias(part_name) for part, part_name in zip(found, part_names(name), strict=True)]


def part_names(column: str) -> list[str]:
    """Return the names of the parts of a column of dates, the age last."""
    return [f"{column} {part}" for part in (*PARTS, AGE)]

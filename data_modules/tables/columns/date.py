"""Columns of dates, which become parts that a network can use."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, Literal

import polars as pl

from ..cells import Cells, parse_dates
from ..histograms import Histogram
from ..options import TableOptions
from ..profile import Blocks, Profile
from ..scale import Measures, Scale
from ..statistics import Counts
from ..vocabulary import Vocabulary
from .base import Column, Learner

# The first and the last value, and the days after which those that occur have probably all occurred
DATE_PARTS = {"month": (1, 12, 365), "day": (1, 31, 365), "weekday": (1, 7, 7), "hour": (0, 23, 7)}
AGE = "age"
SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, kw_only=True)
class DateColumn(Column):
    """Dates; ``newest``: the newest one of the training rows, from which ages count.

    The parts that vary in the training rows are categories, or numbers if some values may be missing there.
    """

    kind: Literal["date"] = "date"
    newest: datetime
    is_parsed: ClassVar[bool] = True

    def read(self, cells: Cells) -> tuple[dict[str, pl.Series], dict[str, pl.Series]]:
        parts = {part.name: part for part in split_dates(cells.dates(self.format), self.newest)}
        numbers = {name: parts[name].cast(pl.Float64).fill_null(math.nan) for name in self.scales}
        return {name: parts[name] for name in self.vocabularies}, numbers

    def count(self, cells: Cells) -> Histogram:
        missing = cells.dates(self.format).null_count()
        return Histogram([len(cells.frame) - missing, missing], len(cells.frame))


class DateLearner(Learner):
    def __init__(self, profile: Profile, options: TableOptions, sample: pl.Series) -> None:
        super().__init__(profile, options, sample)
        assert profile.newest is not None
        self.newest = profile.newest
        self.parts: dict[str, Counts] = {}
        self.ages = Measures(split_dates(parse_dates(sample, self.format), self.newest)[-1])

    def add(self, cells: Cells) -> None:
        *parts, age = split_dates(cells.dates(self.format), self.newest)
        for part in parts:
            self.parts.setdefault(part.name, Counts()).add(part)
        self.ages.add(age.fill_null(math.nan))

    def column(self, rows: int, blocks: Blocks) -> DateColumn:
        vocabularies, scales = dict[str, Vocabulary](), dict[str, Scale]()
        moments, bounds = self.ages.moments, self.ages.bounds
        span = moments.largest - moments.smallest  # days
        for (low, high, cycle), (part, counts) in zip(DATE_PARTS.values(), self.parts.items(), strict=True):
            values = counts.table()["value"]
            distinct = values.drop_nulls().len()
            if distinct > high - low or (distinct > 1 and span >= cycle):  # or hours from 8 to 18, say
                vocabularies[part] = self.vocabulary(counts)
            elif distinct > 1:  # as categories, the other months would be unknown; all are on one scale
                uniform, gaps = (high - low) / math.sqrt(12), values.null_count() > 0
                scales[part] = Scale((low + high) / 2, uniform, gaps, edges=[low, high])
        # Later rows too may have dates such as 9999-12-31, which stand for none
        scales[f"{self.name} {AGE}"] = self.ages.scale(bounds if math.isfinite(bounds[0]) else None)
        return DateColumn(
            name=self.name,
            format=self.format,
            vocabularies=vocabularies,
            scales=scales,
            histogram=Histogram([moments.count, rows - moments.count], rows),
            newest=self.newest,
        )


def split_dates(column: pl.Series, newest: datetime) -> list[pl.Series]:
    """Return the parts of a column of datetimes, each called "COLUMN PART", with the age in days before ``newest``."""
    age = (newest - column).dt.total_seconds() / SECONDS_PER_DAY
    parts = (column.dt.month(), column.dt.day(), column.dt.weekday(), column.dt.hour(), age)
    return [part.alias(name) for part, name in zip(parts, part_names(column.name), strict=True)]


def part_names(column: str) -> list[str]:
    """Return the names of the parts of a column of dates, the age last."""
    return [f"{column} {part}" for part in (*DATE_PARTS, AGE)]

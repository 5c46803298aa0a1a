"""Counts of values and moments of numbers, accumulated over blocks of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import polars as pl

FEW = 1 << 16  # up to this many pending values are not worth merging


class Counts:
    """How often each value of a column occurs, in memory that grows with the number of distinct values only."""

    def __init__(self) -> None:
        self.parts: list[pl.DataFrame] = []
        self.merged, self.pending = 0, 0  # number of values in the first part, and in the other parts

    def add(self, column: pl.Series) -> None:
        if column.dtype in (pl.Categorical, pl.Enum):
            column = column.cast(pl.String)
        part = column.rename("value").value_counts()
        self.parts.append(part)
        self.pending += len(part)
        if self.pending > max(self.merged, FEW):
            self.table()

    @property
    def fewest(self) -> int:
        """A lower bound of the number of distinct values."""
        return max(self.merged, len(self.parts[-1]))

    def table(self) -> pl.DataFrame:
        """Return the distinct values, sorted, in the columns value and count."""
        whole = pl.concat(self.parts).group_by("value").agg(pl.col("count").sum()).sort("value")
        self.parts, self.merged, self.pending = [whole], len(whole), 0
        return whole


@dataclass
class Moments:
    """Number, mean, variance and range of the numbers of a column, and whether cells are empty."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0
    least: float = math.inf
    largest: float = -math.inf
    gaps: bool = False

    def add(self, column: pl.Series) -> None:
        """Add the numbers of a column (float64, NaN for empty cells)."""
        values = column.drop_nans()
        self.gaps |= len(values) < len(column)
        if not len(values):
            return
        mean, variance, count = float(values.mean()), float(values.var(ddof=0)), len(values)
        if self.count:
            # The moments of two parts from those of each (Chan, Golub and LeVeque, 1979)
            both, apart = self.count + count, mean - self.mean
            share = count / both
            self.variance += (variance - self.variance) * share + apart * apart * share * (1 - share)
            self.mean += apart * share
        else:
            self.mean, self.variance = mean, variance
        self.count += count
        self.least = min(self.least, float(values.min()))
        self.largest = max(self.largest, float(values.max()))

    @property
    def std(self) -> float:
        """The standard deviation, without Bessel's correction; exactly 0 for a constant."""
        return math.sqrt(self.variance) if self.least < self.largest else 0.0

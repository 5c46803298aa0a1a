"""Counts of values, moments of numbers and a sample of rows, accumulated over blocks of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

MAX_PENDING = 1 << 16  # up to this many pending values are not worth merging
SAMPLE_ROWS = 5_000  # rows, at least if there are as many
MAX_BINS = 16  # of the numbers of a column
OUTER_FRACTION = 0.01  # of the numbers: as many at each end may be outliers


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
        if self.pending > max(self.merged, MAX_PENDING):
            self.table()

    @property
    def fewest(self) -> int:
        """A lower bound of the number of distinct values."""
        return max(self.merged, len(self.parts[-1]) if self.parts else 0)

    def table(self) -> pl.DataFrame:
        """Return the distinct values, sorted, in the columns value and count."""
        if self.merged and not self.pending:
            return self.parts[0]
        whole = pl.concat(self.parts).group_by("value").agg(pl.col("count").sum()).sort("value")
        self.parts, self.merged, self.pending = [whole], len(whole), 0
        return whole


@dataclass
class Moments:
    """Number, mean, variance and range of the numbers of a column, and whether cells are empty.

    Sums are of the distances to the first number, ``origin``. Sums of numbers near 2^53 would lose their last digits,
    and so depend on the order of the rows.
    """

    count: int = 0
    origin: float = 0.0
    distance: float = 0.0  # mean distance to ``origin``
    variance: float = 0.0
    smallest: float = math.inf
    largest: float = -math.inf
    gaps: bool = False
    bounds: tuple[float, float] | None = None  # that numbers were moved into

    def add(self, column: pl.Series, low: float = -math.inf, high: float = math.inf) -> None:
        """Add the numbers of a column (float64, NaN for empty cells), after those beyond a bound are moved to it."""
        values: Any = column.drop_nans()  # polars' types of sums leave open what a column holds
        self.gaps |= len(values) < len(column)
        if not len(values):
            return
        if float(values.min()) < low or float(values.max()) > high:
            self.bounds, values = (low, high), values.clip(low, high)
        self.origin = self.origin if self.count else float(values[0])
        apart = values - self.origin
        distance, variance, count = float(apart.mean()), float(apart.var(ddof=0)), len(values)
        if self.count:
            # The moments of two parts from those of each (Chan, Golub and LeVeque, 1979)
            both, between = self.count + count, distance - self.distance
            fraction = count / both
            self.variance += (variance - self.variance) * fraction + between * between * fraction * (1 - fraction)
            self.distance += between * fraction
        else:
            self.distance, self.variance = distance, variance
        self.count += count
        self.smallest = min(self.smallest, float(values.min()))
        self.largest = max(self.largest, float(values.max()))

    @property
    def mean(self) -> float:
        return self.origin + self.distance

    @property
    def std(self) -> float:
        """The standard deviation, without Bessel's correction; exactly 0 for a constant."""
        return math.sqrt(self.variance) if self.smallest < self.largest else 0.0


class Sample:
    """Every n-th row of a table of ``rows``."""

    def __init__(self, rows: int) -> None:
        self.step, self.seen = max(1, rows // SAMPLE_ROWS), 0
        self.parts: list[pl.DataFrame] = []

    def add(self, frame: pl.DataFrame) -> None:
        """Add the rows that follow those added before."""
        self.parts.append(frame[-self.seen % self.step :].gather_every(self.step))
        self.seen += len(frame)

    @property
    def rows(self) -> pl.DataFrame:
        return pl.concat(self.parts, how="vertical_relaxed")


def outlier_bounds(values: pl.Series) -> tuple[float, float]:
    """Return the bounds beyond which numbers are outliers: three times as far apart as the middle 98 % of them.

    A column whose middle 98 % are equal has none.
    """
    filled: Any = values.drop_nulls()
    low, high = (filled.quantile(fraction, "nearest") for fraction in (OUTER_FRACTION, 1 - OUTER_FRACTION))
    width = 0.0 if low is None or high is None else high - low
    return (low - width, high + width) if width > 0 else (-math.inf, math.inf)


def bin_edges(values: pl.Series) -> list[float]:
    """Return increasing values that divide numbers into at most ``MAX_BINS`` bins with about as many rows each."""
    numbers = values.filter(values.is_finite()).to_numpy()
    quantiles = np.quantile(numbers, np.linspace(0, 1, MAX_BINS + 1)) if len(numbers) else numbers
    edges: list[float] = np.unique(quantiles).tolist()
    return edges

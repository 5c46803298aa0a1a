"""The scale of the numbers of a column, and how it is learnt."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import polars as pl
import torch
from torch import Tensor

from mtl.checks import InputError

from .cells import Cells
from .statistics import Moments, bin_edges, outlier_bounds


@dataclass(frozen=True)
class Scale:
    """Scale a numeric column to mean 0 and standard deviation 1; empty cells become 0.

    If training rows have empty cells, a second column marks the empty cells by 1. If they have outliers, all numbers
    are first moved into ``bounds``, so that a few large ones do not make all others nearly equal. ``edges`` divide the
    training rows into bins with about as many rows each, see ``bin_edges``.
    """

    mean: float
    std: float
    gaps: bool  # whether the training rows have empty cells
    bounds: tuple[float, float] | None = None
    edges: list[float] = field(default_factory=list)

    def far(self, values: pl.Series) -> int:
        """Return how many ``values`` are further from those of the training rows than their range is wide.

        The range is that of ``edges``, without outliers; where there are none, 10 standard deviations.
        """
        near = self.mean - 5 * self.std, self.mean + 5 * self.std
        low, high = (self.edges[0], self.edges[-1]) if len(self.edges) > 1 else near
        numbers, width = values.to_numpy(), high - low  # polars counts NaN, an empty cell, as the largest number
        return int(((numbers < low - width) | (numbers > high + width)).sum())

    def mean_of(self, values: pl.Series) -> float | None:
        """Return the mean of ``values`` (NaN: empty) after they are moved into ``bounds``; None if all are empty."""
        filled = values.drop_nans().to_numpy()
        low, high = self.bounds or (-math.inf, math.inf)
        return float(filled.clip(low, high).mean()) if len(filled) else None

    @property
    def scaled_edges(self) -> tuple[float, ...]:
        """``edges`` as they would be encoded, distinct in float32."""
        scaled = torch.tensor(self.edges, dtype=torch.float64).sub(self.mean).div(self.std)
        return tuple(scaled.float().unique().tolist())

    def encode(self, values: pl.Series, cells: Cells) -> list[Tensor]:
        """Return the numbers ``values`` of ``cells``, scaled ``[N]`` (float32), and marks of empty cells if ``gaps``.

        Raises InputError, which names the cell, if one is too far from the training rows.
        """
        raw = torch.from_numpy(values.to_numpy(writable=True))
        empty = raw.isnan()
        raw = raw if self.bounds is None else raw.clamp(*self.bounds)
        scaled = ((raw - self.mean) / self.std).masked_fill(empty, 0.0).float()
        if not bool(scaled.isfinite().all()):
            first = cells.describe(int(scaled.isfinite().int().argmin()))
            raise InputError(
                f"{first} is too far from the training rows, whose mean is {self.mean:.4g} and standard deviation "
                f"{self.std:.4g}: scaled by them it overflows; {cell_advice(cells.name)}"
            )
        return [scaled, empty.float()] if self.gaps else [scaled]


class Measures:
    """The moments of numbers, after outliers are moved to the bounds that a ``sample`` of the numbers suggests."""

    def __init__(self, sample: pl.Series) -> None:
        self.bounds = outlier_bounds(sample)
        self.edges = bin_edges(sample.clip(*self.bounds))
        self.moments = Moments()

    def add(self, values: pl.Series) -> None:
        """Add numbers, float64, NaN for empty cells."""
        self.moments.add(values, *self.bounds)

    def scale(self, bounds: tuple[float, float] | None) -> Scale:
        """Return the scale of the numbers, which are first moved into ``bounds``."""
        moments = self.moments
        return Scale(moments.mean, moments.std if moments.std > 0 else 1.0, moments.gaps, bounds, self.edges)


def cell_advice(name: str) -> str:
    return f"correct it, empty it, or leave the column out with data.ignore=[{name}]"

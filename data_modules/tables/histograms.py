"""Histograms of the cells of a column, small enough for a checkpoint, to compare later rows with the training rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
from torch import Tensor

from .columns import MISSING, UNKNOWN, CategoryEncoder

Counted = np.ndarray[Any, Any]
TOP = 50  # categories of a column, the most frequent ones, that have a bin of their own


@dataclass(frozen=True)
class Histogram:
    """How many cells of ``rows`` rows are in each bin; the last bin is for empty cells.

    Numbers, also those that are categories too, have the bins between the ``edges`` of their ``NumberEncoder``, and
    dates a single one: later rows always have later dates. Categories have a bin for each of ``ids``, one for the other
    known categories, and one for unknown ones; of lists and texts, the elements are counted. A training row whose
    category would be unknown without it counts as unknown: that is the share of unknown ones to expect in new rows
    (Good 1953). ``mean``: of the numbers, moved into ``NumberEncoder.bounds``, which has the mean of the training rows.
    """

    counts: list[int]
    rows: int
    ids: list[int] = field(default_factory=list)
    mean: float | None = None

    @property
    def missing(self) -> float:
        """The share of empty cells."""
        return self.counts[-1] / self.rows

    @property
    def unknown(self) -> float | None:
        """The share of unknown categories among the cells or elements that are not empty; None for numbers."""
        filled = sum(self.counts[:-1])
        return self.counts[-2] / filled if self.ids and filled else None


def number_counts(values: pl.Series, edges: Sequence[float]) -> Counted:
    """Return how many ``values`` (NaN: empty) are below the second edge, between two, above the last, and empty."""
    numbers = values.to_numpy()
    filled = numbers[~np.isnan(numbers)]
    bins = np.searchsorted(edges[1:], filled, side="right")
    return np.append(np.bincount(bins, minlength=len(edges[1:]) + 1), len(numbers) - len(filled))


def category_counts(ids: Tensor, own: Sequence[int], size: int, missing: int) -> Counted:
    """Return the counts of a ``Histogram`` with the bins ``own`` from ``ids [N]`` below ``size`` and empty cells."""
    each = np.bincount(ids.numpy(), minlength=size)
    top, unknown = each[list(own)], each[UNKNOWN]
    return np.append(top, [each.sum() - top.sum() - unknown, unknown, missing])


def of_training(table: pl.DataFrame, least: int, known: CategoryEncoder, rows: int, missing: int = 0) -> Histogram:
    """Return the histogram of the categories of a column in the training rows.

    ``table`` has the columns value, count, and all: how often the category occurs where ``known`` comes from, in which
    it needs ``least`` occurrences. ``missing``: the number of empty cells that are not in ``table``.
    """
    empty = pl.col("value") == MISSING
    missing += int(table.filter(empty)["count"].sum())
    table = table.filter(~empty).sort("count", "value", descending=[True, False])
    ids = known.encode(table["value"]).numpy()
    sure = (ids != UNKNOWN) & (table["all"] > least).to_numpy()
    counts = table["count"].to_numpy()
    top, rest = counts[sure][:TOP].tolist(), int(counts[sure][TOP:].sum())
    return Histogram([*top, rest, int(counts[~sure].sum()), missing], rows, ids[sure][:TOP].tolist())

"""Histograms of the cells of a column, small enough for a checkpoint, to compare later rows with the training rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from torch import Tensor

from .cells import MISSING
from .vocabulary import UNKNOWN, Vocabulary

Counted = np.ndarray[Any, Any]
MAX_CATEGORY_BINS = 50  # of known categories that share bins; at most as many others have a bin of their own


@dataclass(frozen=True)
class Histogram:
    """How many cells of ``rows`` rows are in each bin; the last bin is for empty cells.

    Numbers, also those that are categories too, have the bins between the ``edges`` of their ``Scale``, and
    dates a single one: later rows always have later dates. ``frequent``: the ids of the categories that have a bin of
    their own, see ``category_counts``, None for numbers and dates; of lists and texts, the elements are counted.
    ``mean``: of the numbers, moved into ``Scale.bounds``.
    """

    counts: list[int]
    rows: int
    frequent: list[int] | None = None
    mean: float | None = None

    @property
    def missing(self) -> float:
        """The fraction of empty cells."""
        return self.counts[-1] / self.rows

    @property
    def unknown(self) -> float | None:
        """The fraction of unknown categories among the cells or elements that are not empty; None for numbers."""
        filled = sum(self.counts[:-1])
        return self.counts[-2] / filled if self.frequent is not None and filled else None


def number_counts(values: pl.Series, edges: Sequence[float]) -> Counted:
    """Return how many ``values`` (NaN: empty) are below the second edge, between two, above the last, and empty."""
    numbers = values.to_numpy()
    filled = numbers[~np.isnan(numbers)]
    bins = np.searchsorted(edges[1:], filled, side="right")
    return np.append(np.bincount(bins, minlength=len(edges[1:]) + 1), len(numbers) - len(filled))


def category_counts(
    ids: Tensor, vocabulary: Vocabulary, missing: int, frequent: Sequence[int], counts: Counted | None = None
) -> Counted:
    """Return the counts of a ``Histogram`` from ``ids [N]``, each of which occurs ``counts [N]`` times (None: once).

    The bins: each of the ``frequent`` categories, the other known ones in turn into at most ``MAX_CATEGORY_BINS`` bins,
    unknown ones, and empty cells. A category is frequent from the fraction 1 / ``MAX_CATEGORY_BINS`` of the training
    rows, so that its loss shows. With the most frequent ones instead, however rare, luck would choose, their counts
    would be too high, and new rows would seem to have changed.
    """
    num_ids = UNKNOWN + 1 + len(vocabulary.values)
    others = np.setdiff1d(np.arange(UNKNOWN + 1, num_ids), frequent)
    bins = np.full(num_ids, len(frequent) + min(MAX_CATEGORY_BINS, len(others)))  # that of unknown ones
    bins[list(frequent)] = np.arange(len(frequent))
    bins[others] = len(frequent) + np.arange(len(others)) % MAX_CATEGORY_BINS
    return np.append(np.bincount(bins[ids.numpy()], counts, bins[UNKNOWN] + 1).astype(np.int64), missing)


def category_histogram(ids: Tensor, vocabulary: Vocabulary, missing: int, rows: int, trained: Histogram) -> Histogram:
    """Return the histogram of ``ids [N]`` in ``rows`` rows, with the bins of ``trained``, that of the training rows."""
    counts = category_counts(ids, vocabulary, missing, trained.frequent or ())
    return Histogram(counts.tolist(), rows, trained.frequent)


def training_histogram(
    table: pl.DataFrame, min_count: int, vocabulary: Vocabulary, rows: int, missing: int = 0
) -> Histogram:
    """Return the histogram of the categories of a column in the training rows.

    A training row whose category would be unknown without it counts as unknown: that is the fraction of unknown ones to
    expect in new rows (Good 1953). ``table`` has the columns value, count, and all: how often the category occurs where
    ``vocabulary`` was learnt, in which it needs ``min_count`` occurrences, and more than each category that was left
    out. ``missing``: the number of empty cells that are not in ``table``.
    """
    empty = pl.col("value") == MISSING
    missing += int(table.filter(empty)["count"].sum())
    table = table.filter(~empty)
    ids, occurrences = vocabulary.encode(table["value"]), table["all"].to_numpy()
    needed = max(min_count, occurrences[ids.numpy() == UNKNOWN].max(initial=0))
    ids[occurrences <= needed] = UNKNOWN
    counts = table["count"].to_numpy()
    frequent = np.sort(ids.numpy()[(ids.numpy() != UNKNOWN) & (counts * MAX_CATEGORY_BINS >= counts.sum())]).tolist()
    return Histogram(category_counts(ids, vocabulary, missing, frequent, counts).tolist(), rows, frequent)


def merge_histograms(blocks: Sequence[Histogram]) -> Histogram:
    """Return the histogram of the rows of all ``blocks``, which have the same bins."""
    counts = np.sum([block.counts for block in blocks], 0)
    means = [(block.mean, sum(block.counts[:-1])) for block in blocks if block.mean is not None]
    mean = float(np.average([mean for mean, _ in means], weights=[filled for _, filled in means])) if means else None
    return Histogram(counts.tolist(), sum(block.rows for block in blocks), blocks[0].frequent, mean)

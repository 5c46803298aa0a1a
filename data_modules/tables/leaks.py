"""Find inputs that predict a label perfectly: mostly the label itself in other words, known only afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from .cells import as_text

ROWS_PER_VALUE = 10  # a column with fewer rows for each value predicts any label perfectly, by chance
FEWEST = 5  # rows of a class
EQUAL = 0.9999  # the rank correlation of a copy, perhaps rounded or in another unit


class LeakCheck:
    """Rows in the order of a column: ``order [N]``, and whether each has the value of the one before ``[N - 1]``."""

    def __init__(self, column: pl.Series, is_number: bool) -> None:
        rank = column.rank("dense").fill_null(0).to_numpy().astype(np.int64)
        self.order = np.argsort(rank, kind="stable")
        self.rank, self.is_number = rank, is_number
        self.few = len(np.unique(rank)) * ROWS_PER_VALUE <= len(rank)

    def predicts_class(self, label: Any) -> bool:
        """Return whether the column determines the class ``label [N]`` of each row, negative for a missing one."""
        y, x = self._labelled(label, label >= 0)
        classes, counts = np.unique(y, return_counts=True)
        if len(classes) < 2 or counts.min() < FEWEST:
            return False
        changes, ties = y[1:] != y[:-1], x[1:] == x[:-1]
        if (changes & ties).any():
            return False
        in_order = int((changes & (x[:-1] > 0)).sum()) < len(classes)  # an interval of numbers for each class
        return self.few or (self.is_number and in_order)

    def predicts_number(self, label: Any) -> bool:
        """Return whether the column determines the number ``label [N]`` of each row, NaN for a missing one."""
        y, x = self._labelled(label, ~np.isnan(label))
        if len(np.unique(y)) < FEWEST:
            return False
        if self.few and not ((y[1:] != y[:-1]) & (x[1:] == x[:-1])).any():
            return True
        there = x > 0
        if not self.is_number or len(np.unique(x[there])) < FEWEST:
            return False
        ranks = pl.Series(y[there]).rank().to_numpy(), pl.Series(x[there]).rank().to_numpy()
        return bool(abs(np.corrcoef(*ranks)[0, 1]) > EQUAL)

    def _labelled(self, label: Any, there: Any) -> tuple[Any, Any]:
        order = self.order[there[self.order]]
        return label[order], self.rank[order]


def classes_of(column: pl.Series) -> Any:
    """Return the class of each row as a number from 0 ``[N]``, -1 for a missing label."""
    return (as_text(column).rank("dense").cast(pl.Int64) - 1).fill_null(-1).to_numpy()

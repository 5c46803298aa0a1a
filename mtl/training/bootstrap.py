"""Standard errors of metrics by the bootstrap over rows, or over groups of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtl.training.labeled_predictions import LabeledPredictions
from mtl.types import RANKING, metric_family

MIN_ROWS = 30  # labelled rows from which a difference can be told from chance
RESAMPLES, MAX_RESAMPLE_ROWS = 100, 2000  # bootstrap samples of a test, and the rows of one at most
MAX_UNDEFINED_FRACTION = 0.05  # the share of resamples without a value, above which the error is unknown

Resample = Callable[[Any], tuple[Tensor, Tensor | None]]  # drawn units -> rows [M], and the groups that they form


def standard_error(
    value: Callable[[Sequence[LabeledPredictions]], float],
    rows: Sequence[LabeledPredictions],
    metric: str,
    resamples: int,
    most: int,
    seed: int = 0,
) -> tuple[float | None, int]:
    """Return the standard error of one ``value``, and its degrees of freedom, as ``standard_errors`` does."""
    [error], df = standard_errors(lambda drawn: [value(drawn)], rows, metric, resamples, most, seed)
    return error, df


def standard_errors(
    values: Callable[[Sequence[LabeledPredictions]], Sequence[float]],
    rows: Sequence[LabeledPredictions],
    metric: str,
    resamples: int,
    most: int,
    seed: int = 0,
) -> tuple[list[float | None], int]:
    """Return the standard errors of ``values`` of a ``metric``, None where undefined, and their degrees of freedom.

    ``rows``: of one network or several, on the same N rows, which are drawn together. Where the metric ranks the rows
    of groups, whole groups are drawn. A resample has at most ``most`` rows; its error is scaled to N (the m out of n
    bootstrap of Bickel et al. 1997). The draws depend on ``seed`` and the number of rows alone.
    """
    draw = np.random.default_rng(seed)
    by_group = metric_family(metric) in RANKING
    resample, units, size = _by_group(rows[0], most) if by_group else _by_row(rows[0], most)
    if units < 2:
        return [None] * len(values(rows)), 0
    resampled = []
    for _ in range(resamples):
        index, groups = resample(draw.integers(0, units, size))
        parts = [part.at(index) for part in rows]
        resampled.append(values(parts if groups is None else [replace(part, groups=groups) for part in parts]))
    return [_error(column, math.sqrt(size / units)) for column in np.array(resampled).T], units - 1


def _error(resampled: Any, scale: float) -> float | None:
    """Return the standard deviation of a value ``[resamples]``, scaled; None if too many are undefined."""
    defined = resampled[np.isfinite(resampled)]
    if not len(defined) or len(defined) < (1 - MAX_UNDEFINED_FRACTION) * len(resampled):
        return None
    return float(defined.std(ddof=1)) * scale


def _by_row(rows: LabeledPredictions, most: int) -> tuple[Resample, int, int]:
    """Return how rows are resampled, their number, and that of a resample."""
    count = len(rows.label)
    return lambda drawn: (torch.from_numpy(drawn), None), count, min(count, most)


def _by_group(rows: LabeledPredictions, most: int) -> tuple[Resample, int, int]:
    """Return how whole groups are resampled, their number, and that of a resample; each drawn one is its own group."""
    groups = rows.groups.numpy()
    order = np.argsort(groups, kind="stable")
    order = order[groups[order] >= 0]
    sizes = np.unique(groups[order], return_counts=True)[1]
    starts = np.cumsum(sizes) - sizes

    def resample(drawn: Any) -> tuple[Tensor, Tensor]:
        drawn_sizes = sizes[drawn]
        number = np.repeat(np.arange(len(drawn)), drawn_sizes)
        within = np.arange(drawn_sizes.sum()) - np.repeat(np.cumsum(drawn_sizes) - drawn_sizes, drawn_sizes)
        return torch.from_numpy(order[starts[drawn][number] + within]), torch.from_numpy(number)

    return resample, len(sizes), max(1, min(len(sizes), most * len(sizes) // max(1, len(order))))

"""Metrics of the test rows by the value of a column: for whom a network is worse."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
import scipy  # imports its parts at their first use
import torch

from mtl.data_modules.tables.cells import as_text, parse
from mtl.files.formatting import number, with_error
from mtl.files.tables import Bold, Table
from mtl.report.statistics import holm
from mtl.training.bootstrap import MAX_RESAMPLE_ROWS, MIN_ROWS, RESAMPLES, standard_error
from mtl.training.labeled_predictions import LabeledPredictions
from mtl.training.metrics import higher_is_better, metric_names, value_of
from mtl.types import TaskSpec

MOST = 20  # values of a column; the rows of rarer ones are together, and numbers with more values are cut at quartiles
LEVEL = 0.05  # of p-values, corrected for the number of slices and tasks
NAMED = 3  # slices in sentences


@dataclass(frozen=True)
class Slice:
    """A metric of a task on the ``rows`` labelled rows of a slice, with its standard error, and on the ``rest``.

    ``p``: of the main metric, that the difference is chance, by a z test with bootstrap errors and Holm's correction.
    What is undefined is None.
    """

    column: str
    value: str
    task: str
    metric: str
    rows: int
    score: float | None
    error: float | None
    rest: float | None
    p: float | None = None

    @property
    def lag(self) -> float:
        """By how much the slice is worse than the rest; NaN is unknown, also where no direction of the metric is."""
        better = higher_is_better(self.metric)
        if self.score is None or self.rest is None or better is None:
            return math.nan
        return (self.rest - self.score) * (1 if better else -1)

    @property
    def differs(self) -> bool:
        return self.p is not None and self.p < LEVEL


def slices_of(
    tasks: Iterable[TaskSpec], predictions: Mapping[str, LabeledPredictions], cells: pl.DataFrame, encoder: Any
) -> list[dict[str, Any]]:
    """Return each ``Slice``, as a dict, of the ``predictions`` by task.

    ``cells``: the columns to slice, of all rows of the split. ``encoder``: a table's, which knows their kinds.
    """
    found, names = list[Slice](), {column: values_of(cells[column], encoder) for column in cells.columns}
    for task in (task for task in tasks if task.name in predictions):
        rows = predictions[task.name]
        for column, values in names.items():
            own = values[rows.row_id.numpy()]
            for value in own.unique().sort():
                found += compared(task, metric_names(task), rows, own == value, column, value)
    tested = [each for each in found if each.p is not None]
    corrected = dict(zip(map(id, tested), holm([each.p for each in tested if each.p is not None]), strict=True))
    return [asdict(each) | {"p": corrected.get(id(each))} for each in found]


def values_of(cells: pl.Series, encoder: Any) -> pl.Series:
    """Return the name of the slice of each row: its cell, or "others" for all but the ``MOST`` most frequent ones.

    Numbers with more values, unless the network reads them as categories alone, are cut at their quartiles. A name does
    not depend on the type of the column, so a file and a DataFrame have the same.
    """
    known, column = parse(cells), encoder.columns_by_name.get(cells.name)
    is_category = column is not None and column.kind == "category"
    if not is_category and known.n_unique() > MOST and known.null_count() == cells.null_count():
        found = (known.quantile(share, "nearest") for share in (0.25, 0.5, 0.75))
        bounds = sorted({float(each) for each in found if each is not None})
        names = pl.Series([_between(*ends) for ends in pairwise(["", *_texts(bounds), ""])])
        own = names[np.searchsorted(bounds, known.fill_null(0.0).to_numpy())]
        return pl.select(pl.when(known.is_null()).then(pl.lit("missing")).otherwise(own).alias(cells.name)).to_series()
    texts = as_text(cells).fill_null("missing")
    counts = texts.value_counts().sort("count", cells.name, descending=[True, False])
    is_frequent = texts.is_in(counts.head(MOST)[cells.name].implode())
    return pl.select(pl.when(is_frequent).then(texts).otherwise(pl.lit("others")).alias(cells.name)).to_series()


def _texts(bounds: Sequence[float]) -> list[str]:
    """Return different numbers as different texts, with as many digits as that takes, and at least four."""
    texts = ([f"{bound:.{digits}g}" for bound in bounds] for digits in range(4, 18))
    return next(some for some in texts if len(set(some)) == len(bounds))


def _between(low: str, high: str) -> str:
    return ", ".join([f"above {low}"] * bool(low) + [f"up to {high}"] * bool(high))


def compared(
    task: TaskSpec, metrics: Sequence[str], rows: LabeledPredictions, inside: pl.Series, column: str, value: str
) -> list[Slice]:
    """Compare the rows where ``inside [N]`` is true with the others, by each metric; the first is the main one."""
    mask = torch.from_numpy(inside.to_numpy(writable=True))
    own, rest = (rows.at(index.nonzero()[:, 0]) for index in (mask, ~mask))
    found = []
    for metric in metrics:

        def score(rows: Sequence[LabeledPredictions], metric: str = metric) -> float:
            return value_of(task.kind, metric, rows[0])

        values = [score([each]) if len(each.label) else math.nan for each in (own, rest)]
        error, p = spread(score, own, metric), None
        if metric == metrics[0] and error is not None and math.isfinite(values[0] - values[1]):
            of_rest = spread(score, rest, metric)
            scale = math.hypot(error, of_rest) if of_rest is not None else 0.0
            p = float(2 * scipy.stats.norm.sf(abs(values[0] - values[1]) / scale)) if scale > 0 else None
        known = [None if math.isnan(each) else each for each in values]
        found.append(Slice(column, value, task.name, metric, len(own.label), known[0], error, known[1], p))
    return found


def spread(
    score: Callable[[Sequence[LabeledPredictions]], float], rows: LabeledPredictions, metric: str
) -> float | None:
    """Return the bootstrap standard error of a metric of ``rows``; None of fewer than ``MIN_ROWS``."""
    if len(rows.label) < MIN_ROWS:
        return None
    return standard_error(score, [rows], metric, RESAMPLES, MAX_RESAMPLE_ROWS)[0]


def read(record: Iterable[Any]) -> list[Slice]:
    """Return the slices that a run has recorded."""
    return [Slice(**each) for each in record]


def sentences(slices: Sequence[Slice]) -> list[str]:
    """Name the slices that are worse than the rest by more than chance, the worst first by their p-values."""
    worse = sorted((each for each in slices if each.differs and each.lag > 0), key=lambda each: each.p or 0.0)
    parts = [
        f"{each.task} {each.metric} {number(each.score, 4)} where {each.column} is {each.value} "
        f"({number(each.rest, 4)} elsewhere)"
        for each in worse[:NAMED]
    ]
    more = [f"{len(worse) - NAMED} more"] if len(worse) > NAMED else []
    return [f"Worse than elsewhere: {'; '.join([*parts, *more])}."] if parts else []


def table_of(slices: Sequence[Slice], mains: dict[str, str]) -> Table:
    """Return a table of the main metrics, task by task, the slices that lag behind the rest most first."""
    shown = [each for each in slices if mains.get(each.task) == each.metric]
    tasks = list(mains)
    shown.sort(key=lambda each: (tasks.index(each.task), each.p is None, math.isnan(each.lag), -each.lag))
    rows = []
    for each in shown:
        score = f"{each.metric} {with_error(each.score, each.error)}"
        cells = [each.task, f"{each.column}: {each.value}", f"{each.rows:,}", score]
        cells += [number(each.rest, 4), number(each.p, 2)]
        rows.append([Bold(cell) for cell in cells] if each.differs else cells)
    note = (
        "Main metric ± bootstrap standard error of the labelled test rows of a slice and of all others. p: that the "
        "difference is chance, corrected for the number of differences in this table (Holm's method), bold if it is "
        f"below {LEVEL}; slices of fewer than {MIN_ROWS} rows have none."
    )
    return Table(["task", "slice", "rows", "metric", "elsewhere", "p"], rows, notes=[note])

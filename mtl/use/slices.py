"""Metrics of the test rows by the value of a column: for whom a network is worse."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
import scipy  # imports its parts at their first use
import torch

from mtl.checks import join_some
from mtl.data_modules.tables.cells import as_text, parse_numbers
from mtl.files.formatting import number, with_error
from mtl.files.tables import Bold, Table
from mtl.report.statistics import holm
from mtl.training.bootstrap import MAX_RESAMPLE_ROWS, MIN_ROWS, RESAMPLES, standard_error
from mtl.training.labeled_predictions import LabeledPredictions
from mtl.training.metrics import higher_is_better, metric_names, value_of
from mtl.types import TaskSpec

# Values of a column; the rows of rarer ones are together, and numbers with more values are cut at quartiles
MAX_SLICES = 20
LEVEL = 0.05  # of p-values, corrected for the number of slices and tasks
MAX_SLICES_SHOWN = 10  # slices of a table; the others are folded
MIN_SLICE_ROWS = 20  # labelled test rows of a slice that is not folded


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
    sem: float | None
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
    def standard_lag(self) -> float:
        """The lag in standard errors of the score; minus infinity if it is unknown."""
        return self.lag / self.sem if self.sem and not math.isnan(self.lag) else -math.inf

    @property
    def differs(self) -> bool:
        return self.p is not None and self.p < LEVEL


def slices_of(
    tasks: Iterable[TaskSpec], predictions: Mapping[str, LabeledPredictions], cells: pl.DataFrame, encoder: Any
) -> list[dict[str, Any]]:
    """Return each ``Slice``, as a dict, of the ``predictions`` by task.

    ``cells``: the columns to slice, of all rows of the split. ``encoder``: a table's, which knows their kinds.
    """
    slices, names = list[Slice](), {column: values_of(cells[column], encoder) for column in cells.columns}
    for task in (task for task in tasks if task.name in predictions):
        rows = predictions[task.name]
        for column, values in names.items():
            row_values = values[rows.row_id.numpy()]
            for value in row_values.unique().sort():
                slices += compared(task, metric_names(task), rows, row_values == value, column, value)
    corrected = iter(holm([part.p for part in slices if part.p is not None]))
    return [asdict(part) | {"p": None if part.p is None else next(corrected)} for part in slices]


def values_of(cells: pl.Series, encoder: Any) -> pl.Series:
    """Return the name of the slice of each row: its cell, or "others" for all but the ``MAX_SLICES`` most frequent.

    Numbers with more values, unless the network reads them as categories alone, are cut at their quartiles. A name does
    not depend on the type of the column, so a file and a DataFrame have the same.
    """
    if cells.dtype == pl.String:
        cells = as_text(cells).replace(list(encoder.empty), None)
    numbers, column = parse_numbers(cells), encoder.columns_by_name.get(cells.name)
    is_category = column is not None and column.kind == "category"
    if not is_category and numbers.n_unique() > MAX_SLICES and numbers.null_count() == cells.null_count():
        quartiles = (numbers.quantile(fraction, "nearest") for fraction in (0.25, 0.5, 0.75))
        bounds = sorted({float(quartile) for quartile in quartiles if quartile is not None})
        ends = pairwise(["", *_texts(bounds), ""])
        ranges = pl.Series([", ".join([f"above {a}"] * bool(a) + [f"up to {b}"] * bool(b)) for a, b in ends])
        names = ranges[np.searchsorted(bounds, numbers.fill_null(0.0).to_numpy())]
        named = pl.when(numbers.is_null()).then(pl.lit("missing")).otherwise(names)
        return pl.select(named.alias(cells.name)).to_series()
    texts = as_text(cells).fill_null("missing")
    counts = texts.value_counts().sort("count", cells.name, descending=[True, False])
    is_frequent = texts.is_in(counts.head(MAX_SLICES)[cells.name].implode())
    return pl.select(pl.when(is_frequent).then(texts).otherwise(pl.lit("others")).alias(cells.name)).to_series()


def _texts(bounds: Sequence[float]) -> list[str]:
    """Return different numbers as different texts, with as many digits as that takes, and at least four."""
    texts = ([f"{bound:.{digits}g}" for bound in bounds] for digits in range(4, 18))
    return next(candidates for candidates in texts if len(set(candidates)) == len(bounds))


def compared(
    task: TaskSpec, metrics: Sequence[str], rows: LabeledPredictions, inside: pl.Series, column: str, value: str
) -> list[Slice]:
    """Compare the rows where ``inside [N]`` is true with the others, by each metric; the first is the main one."""
    mask = torch.from_numpy(inside.to_numpy(writable=True))
    selected, others = (rows.at(index.nonzero()[:, 0]) for index in (mask, ~mask))
    slices = []
    for metric in metrics:
        inner, outer = (value_of(task.kind, metric, part) if len(part) else math.nan for part in (selected, others))
        sem, p = spread(task, metric, selected), None
        if metric == metrics[0] and sem is not None and math.isfinite(inner - outer):
            others_sem = spread(task, metric, others)
            scale = math.hypot(sem, others_sem) if others_sem is not None else 0.0
            p = float(2 * scipy.stats.norm.sf(abs(inner - outer) / scale)) if scale > 0 else None
        defined = [None if math.isnan(metric_value) else metric_value for metric_value in (inner, outer)]
        slices.append(Slice(column, value, task.name, metric, len(selected), defined[0], sem, defined[1], p))
    return slices


def spread(task: TaskSpec, metric: str, rows: LabeledPredictions) -> float | None:
    """Return the bootstrap standard error of a metric of ``rows``; None of fewer than ``MIN_ROWS``."""
    if len(rows) < MIN_ROWS:
        return None
    sizes = RESAMPLES, MAX_RESAMPLE_ROWS
    return standard_error(lambda drawn: value_of(task.kind, metric, drawn[0]), [rows], metric, *sizes)[0]


def read(record: Iterable[Any]) -> list[Slice]:
    """Return the slices that a run has recorded."""
    return [Slice(**entry) for entry in record]


def sentences(slices: Sequence[Slice]) -> list[str]:
    """Name the slices that are worse than the rest by more than chance, the worst first by their p-values."""
    worse = sorted((part for part in slices if part.differs and part.lag > 0), key=lambda part: part.p or 0.0)
    parts = [
        f"{part.task} {part.metric} {number(part.score, 4)} where {part.column} is {part.value} "
        f"({number(part.rest, 4)} elsewhere)"
        for part in worse
    ]
    return [f"Worse than elsewhere: {join_some(parts)}."] if parts else []


def tables_of(slices: Sequence[Slice], mains: dict[str, str]) -> list[Table]:
    """Return a table of the main metrics of the slices that matter most, and a folded one of the others, if any.

    Those matter that lag behind the rest by the most standard errors, and have ``MIN_SLICE_ROWS`` rows.
    """
    of_mains = [part for part in slices if mains.get(part.task) == part.metric]
    of_mains.sort(key=lambda part: (part.rows < MIN_SLICE_ROWS, -part.standard_lag))
    num_shown = min(MAX_SLICES_SHOWN, sum(part.rows >= MIN_SLICE_ROWS for part in of_mains)) or len(of_mains)
    rows = []
    for part in of_mains:
        score = f"{part.metric} {with_error(part.score, part.sem)}"
        cells = [part.task, f"{part.column}: {part.value}", f"{part.rows:,}", score]
        cells += [number(part.rest, 4), number(part.p, 2)]
        rows.append([Bold(cell) for cell in cells] if part.differs else cells)
    note = (
        "The slices that lag behind all other rows by the most standard errors come first. Main metric ± bootstrap "
        "standard error of the labelled test rows of a slice and of all others. p: that the difference is chance, "
        f"corrected for the number of all slices and tasks (Holm's method), bold if it is below {LEVEL}; slices of "
        f"fewer than {MIN_ROWS} rows have none."
    )
    header = ["task", "slice", "rows", "metric", "elsewhere", "p"]
    others = Table(header, rows[num_shown:], f"{len(rows) - num_shown} other slices", folded=True)
    return [Table(header, rows[:num_shown], notes=[note]), *([others] if others.rows else [])]

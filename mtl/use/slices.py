"""Metrics of the test rows by the value of a column: for whom a network is worse."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
import torch
from scipy.stats import norm
from torch import Tensor

from mtl.data_modules.tables.columns import as_text, parse
from mtl.files.tables import Bold, Table
from mtl.report.statistics import holm, rounded
from mtl.training.evaluation import Evaluation
from mtl.training.metrics import Rows, higher_is_better, value_of
from mtl.types import RANKING, Batch, metric_family

MOST = 20  # values of a column; the rows of rarer ones are together, and numbers with more values are cut at quartiles
LEAST = 30  # labelled rows of a slice, and of all others, from which a difference can be told from chance
DRAWS, DRAWN = 100, 2000  # bootstrap samples, and the rows of one at most
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
        """By how much the slice is worse than the rest; NaN is unknown."""
        if self.score is None or self.rest is None:
            return math.nan
        return (self.rest - self.score) * (1 if higher_is_better(self.metric) else -1)

    @property
    def differs(self) -> bool:
        return self.p is not None and self.p < LEVEL


@torch.no_grad()
def slices_of(model: Any, blocks: Iterable[tuple[Batch, pl.DataFrame]], size: int = 4096) -> list[dict[str, Any]]:
    """Return each ``Slice``, as a dict, of labelled rows in ``blocks``, each with the cells of the columns to slice."""
    evaluation, cells = Evaluation(model.spec.tasks), list[pl.DataFrame]()
    for batch, frame in blocks:
        cells.append(frame)
        for start in range(0, len(batch), size):
            part = batch.select(torch.arange(start, min(start + size, len(batch)))).to(model.device)
            output = model.network(part.inputs, list(part.targets)).predictions
            evaluation.update(output, part.targets, groups=part.groups)
    table, found = pl.concat(cells, how="vertical_relaxed"), list[Slice]()
    for task, main in evaluation.main_metrics().items():
        rows, places = evaluation.labelled_rows(task)
        for column in table.columns if len(places) else ():
            is_category = column in model.encoder.categorical and column not in model.encoder.numeric
            names = values_of(table[column], is_category)[places.numpy()]
            for value in names.unique().sort():
                inside = torch.from_numpy((names == value).to_numpy(writable=True))
                for metric in evaluation.shown[task]:
                    found.append(compared(model.spec, task, metric, rows, inside, column, value, metric == main))
    tested = [each for each in found if each.p is not None]
    corrected = dict(zip(map(id, tested), holm([each.p for each in tested if each.p is not None]), strict=True))
    return [asdict(each) | {"p": corrected.get(id(each))} for each in found]


def values_of(cells: pl.Series, is_category: bool) -> pl.Series:
    """Return the name of the slice of each row; numbers that are no categories, and have many values, are cut."""
    known = parse(cells)
    if not is_category and known.n_unique() > MOST and known.null_count() == cells.null_count():
        found = (known.quantile(share, "nearest") for share in (0.25, 0.5, 0.75))
        bounds = sorted({float(each) for each in found if each is not None})
        names = pl.Series([_between(*ends) for ends in pairwise([-math.inf, *bounds, math.inf])])
        places = np.searchsorted(bounds, known.fill_null(0.0).to_numpy())
        return pl.select(pl.when(known.is_null()).then(pl.lit("missing")).otherwise(names[places])).to_series()
    texts = as_text(cells).fill_null("missing")
    frequent = texts.value_counts(sort=True).head(MOST)[cells.name]
    return pl.select(pl.when(texts.is_in(frequent.implode())).then(texts).otherwise(pl.lit("others"))).to_series()


def _between(low: float, high: float) -> str:
    ends = [f"above {low:.4g}"] * (low > -math.inf) + [f"up to {high:.4g}"] * (high < math.inf)
    return ", ".join(ends)


def compared(
    spec: Any, task: str, metric: str, rows: Rows, inside: Tensor, column: str, value: str, is_main: bool
) -> Slice:
    """Compare the rows where ``inside [N]`` is true with the others."""
    kind = next(each.kind for each in spec.tasks if each.name == task)
    own, rest = (rows.at(index.nonzero()[:, 0]) for index in (inside, ~inside))
    counts = len(own.label), len(rest.label)
    scores = [value_of(kind, metric, each) if len(each.label) else math.nan for each in (own, rest)]
    draws = metric_family(metric) not in RANKING  # whose groups of rows belong together
    errors = [error(kind, metric, each) if draws and len(each.label) >= LEAST else math.nan for each in (own, rest)]
    scale, p = math.hypot(*errors), None
    if is_main and scale > 0 and math.isfinite(scores[0] - scores[1]):
        p = float(2 * norm.sf(abs(scores[0] - scores[1]) / scale))
    score, spread, others = (None if math.isnan(each) else each for each in (scores[0], errors[0], scores[1]))
    return Slice(column, value, task, metric, counts[0], score, spread, others, p)


def error(kind: Any, metric: str, rows: Rows) -> float:
    """Return the bootstrap standard error of a metric, from samples of m of the n rows, times sqrt(m / n)."""
    count, generator = len(rows.label), torch.Generator().manual_seed(0)
    size = min(count, DRAWN)
    drawn = [torch.randint(count, (size,), generator=generator) for _ in range(DRAWS)]
    values = torch.tensor([value_of(kind, metric, rows.at(index)) for index in drawn], dtype=torch.double)
    known = values[~values.isnan()]
    return float(known.std()) * math.sqrt(size / count) if len(known) > DRAWS / 2 else math.nan


def read(record: Iterable[Any]) -> list[Slice]:
    """Return the slices that a run has recorded."""
    return [Slice(**each) for each in record]


def sentences(slices: Sequence[Slice]) -> list[str]:
    """Name the slices that are worse than the rest by more than chance, the worst first by their p-values."""
    worse = sorted((each for each in slices if each.differs and each.lag > 0), key=lambda each: each.p or 0.0)
    parts = [
        f"{each.task} {each.metric} {each.score:.4g} where {each.column} is {each.value} ({each.rest:.4g} elsewhere)"
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
        score = "-" if each.score is None else rounded(each.score, each.error)
        cells = [each.task, f"{each.column}: {each.value}", f"{each.rows:,}", f"{each.metric} {score}"]
        cells += ["-" if each.rest is None else f"{each.rest:.4g}", "-" if each.p is None else f"{each.p:.2g}"]
        rows.append([Bold(cell) for cell in cells] if each.differs else cells)
    note = (
        "Main metric ± bootstrap standard error of the labelled test rows of a slice and of all others. p: that the "
        "difference is chance, corrected for the number of differences in this table (Holm's method), bold if it is "
        f"below {LEVEL}; slices of fewer than {LEAST} rows have none."
    )
    return Table(["task", "slice", "rows", "metric", "elsewhere", "p"], rows, notes=[note])

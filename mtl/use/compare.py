"""Compare two trained networks on the same rows with labels: ``mtl compare RUN_A RUN_B FILE``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any

import polars as pl
from pydantic import Field
from torch import Tensor

from mtl.checks import InputError, join_names, require
from mtl.files.formatting import number
from mtl.objectives import OF_QUANTILES
from mtl.options import Positive, RunSeed, validated
from mtl.report.statistics import Difference, Verdict, holm
from mtl.training.bootstrap import standard_error
from mtl.training.labeled_predictions import LabeledPredictions
from mtl.training.metrics import higher_is_better, metric_names, value_of
from mtl.types import MISSING_CLASS, Batch, TaskSpec, labelled
from mtl.use.frames import like, to_polars
from mtl.use.labelled import evaluation_of
from mtl.use.slices import values_of
from mtl.use.trained import ROWS, TrainedModel

RESAMPLES = 1_000
MOST = 20_000  # rows of a resample
LEAST = 50  # labelled rows of a slice
KINDS = {"task": pl.String, "by": pl.String, "rows": pl.Int64, "metric": pl.String}
KINDS |= {**dict.fromkeys(("a", "b", "difference", "low", "high", "p"), pl.Float64), "b_is": pl.String}


@validated
def compare(
    model_a: TrainedModel,
    model_b: TrainedModel,
    rows: Any,
    margin: Positive | None = None,
    by: str | None = None,
    resamples: Annotated[int, Field(ge=100)] = RESAMPLES,
    seed: RunSeed = 0,
    where: str = ROWS,
) -> Any:
    """Return by how much one model is better than another on the same labelled rows, for each task of both.

    The columns are task, by, rows (with a label), metric (the main one of ``model_a``), a and b (its values),
    difference (b - a, in the unit of the metric) with its 95 % interval from low to high, p, and b_is: as good (the
    interval lies within +-``margin``, or all predictions are equal), better, worse or undecided. What is undefined, as
    for a task without a label, is null.

    The standard error is that of ``resamples`` bootstrap resamples of the rows, or of whole groups where the metric
    ranks the rows of groups; the interval is normal (Efron and Tibshirani 1993, chapter 13), with Student's quantiles.
    A resample has at most 20,000 of all rows; its error is scaled to their number (Bickel et al. 1997).

    ``by``: also compare the rows of each slice of this column, see ``mtl.use.slices.values_of``; their p-values are
    corrected together by Holm's method. ``rows``: as in ``TrainedModel.evaluate``; the result is of polars, or of
    pandas if ``rows`` are. Raises InputError, also for labels that one of the models does not know.
    """
    frame = to_polars(rows)
    if by is not None:
        require(by in frame.columns, f"{where} has no column {by!r}; it has {join_names(frame.columns)}")
        require(not frame[by].dtype.is_nested(), f"column {by!r} of {where} holds lists: give one of single values")
    found, slices = [], []
    for task, metric, pair, kept in _labelled_by_both(model_a, model_b, frame, where):
        found.append((task, None, _compared(task, metric, pair, resamples, seed)))
        if by is not None:
            own = values_of(frame[by], model_a.encoder).filter(pl.Series(kept.numpy()))
            for value in own.value_counts().filter(pl.col("count") >= LEAST)[by].sort():
                index = own.eq(value).arg_true().to_torch().long()
                part = [each.at(index) for each in pair]
                slices.append((task, value, _compared(task, metric, part, resamples, seed)))
    require(by is None or bool(slices), f"no value of column {by!r} has {LEAST} rows with a label")
    known = [each[1].p for *_, each in slices if each[1].p is not None]
    corrected = iter(holm(known))
    table = []
    for task, value, (row, difference) in [*found, *slices]:
        p = next(corrected) if value is not None and difference.p is not None else difference.p
        table.append({"task": task.name, "by": value, **row, "p": p, "b_is": _outcome(row, difference, p, margin)})
    return like(rows, pl.DataFrame(table, KINDS))


def _labelled_by_both(
    model_a: TrainedModel, model_b: TrainedModel, frame: pl.DataFrame, where: str
) -> Iterator[tuple[TaskSpec, str, list[LabeledPredictions], Tensor]]:
    """Yield each task of both models, its main metric, the rows of both with a label, and which rows those are."""
    tasks: list[dict[str, TaskSpec]] = [{t.name: t for t in each.spec.tasks} for each in (model_a, model_b)]
    shared = [name for name in tasks[0] if name in tasks[1]]
    have = " and ".join(join_names(each) for each in tasks)
    require(bool(shared), f"the two networks have no task of the same name: {have}")
    batches, metrics = [], dict[str, str]()
    for model, which in ((model_a, "A"), (model_b, "B")):
        if model.labelled is None:
            raise InputError(f"the data of network {which} are no table")
        try:
            batches.append(model.labelled(frame, where))
        except InputError as error:
            raise InputError(f"network {which}: {error}") from None
    for name in shared:
        a, b = tasks[0][name], tasks[1][name]
        require(a.kind == b.kind, f"task {name!r} is {a.kind} in network A and {b.kind} in B")
        main = metric_names(a)[0]
        metrics[name] = "mae" if main in OF_QUANTILES and a.quantiles != b.quantiles else main
    kept = {}
    for name in shared:
        labels = [batch.targets[name] for batch in batches]
        kept[name] = labelled(tasks[0][name], labels[0]) & labelled(tasks[1][name], labels[1])
        first, second = (_names(each[name], label[kept[name]]) for each, label in zip(tasks, labels, strict=True))
        other = f"task {name!r}: the networks read other labels from the same rows"
        require(first == second, f"{other}: do both predict the same column, with the same positive class?")
    rows = []
    for model, batch in zip((model_a, model_b), batches, strict=True):
        own = [replace(each, metrics=(metrics[each.name],)) if each.name in kept else each for each in model.spec.tasks]
        rows.append(evaluation_of(model, [_only(batch, kept)], own).gathered())
    for name in shared:
        yield tasks[0][name], metrics[name], [each[name] for each in rows if name in each], kept[name]


def _names(task: TaskSpec, labels: Tensor) -> list[Any]:
    """Return labels; those of several classes, which may be numbered in another way, by name."""
    return [task.classes[label] for label in labels] if task.num_classes > 1 and task.classes else labels.tolist()


def _only(batch: Batch, kept: dict[str, Tensor]) -> Batch:
    """Return a batch in which the tasks ``kept`` have labels only in the rows ``kept [N]`` of each."""
    targets = dict(batch.targets)
    for name, rows in kept.items():
        labels = batch.targets[name]
        targets[name] = labels.masked_fill(~rows, math.nan if labels.is_floating_point() else MISSING_CLASS)
    return Batch(batch.inputs, targets, {}, batch.groups)


def _compared(
    task: TaskSpec, metric: str, pair: list[LabeledPredictions], resamples: int, seed: int
) -> tuple[dict[str, Any], Difference]:
    """Return the columns of a comparison, and the difference, positive if the second network is better."""

    def change(rows: Sequence[LabeledPredictions]) -> float:
        a, b = (value_of(task.kind, metric, each) for each in rows)
        return b - a

    count, sign = len(pair[0].label) if pair else 0, 1.0 if higher_is_better(metric) else -1.0
    a, b = (value_of(task.kind, metric, rows) for rows in pair) if count else (math.nan, math.nan)
    known = math.isfinite(b - a)
    error, df = standard_error(change, pair, metric, resamples, MOST, seed) if known else (None, 0)
    difference = Difference(b - a, error, count, count, df)
    low, high = difference.interval or (None, None)
    row = {"rows": count, "metric": metric, "a": a, "b": b, "difference": b - a, "low": low, "high": high}
    row = {name: None if value != value else value for name, value in row.items()}  # NaN is undefined
    return row, difference.scaled(sign)


def _outcome(row: dict[str, Any], difference: Difference, p: float | None, margin: float | None) -> str | None:
    """Return what the difference tells of the second network; None if the metric is undefined."""
    if row["difference"] is None:
        return None
    ends = difference.interval
    if ends == (0.0, 0.0) or (ends and margin and -margin < ends[0] and ends[1] < margin):
        return str(Verdict.SAME)  # also a difference that is significant, but too small to matter
    verdict = difference.verdict(p)
    if higher_is_better(row["metric"]) is None and verdict in (Verdict.BETTER, Verdict.WORSE):
        verdict = Verdict.OPEN
    return str(verdict)


def in_words(table: pl.DataFrame, margin: float | None) -> list[str]:
    """Return a sentence for each task, and one on the values of the column."""
    lines = []
    for row in table.filter(pl.col("by").is_null()).iter_rows(named=True):
        if row["b_is"] is None:
            lines.append(f"{row['task']}: {row['metric']} is undefined on its {row['rows']:,} rows with a label")
            continue
        interval = "" if row["low"] is None else f" [{number(row['low'], 3)}, {number(row['high'], 3)}]"
        change = f"{row['metric']} {number(row['difference'], 3, '+')}{interval}, {row['rows']:,} rows"
        same = f"there is no difference that would matter, {margin:g}" if margin else "there is no difference"
        verdicts = {"better": "B is better", "worse": "B is worse", "as good": same}
        lines.append(f"{row['task']}: {verdicts.get(row['b_is'], 'undecided')} ({change})")
    for (task,), part in table.filter(pl.col("by").is_not_null()).group_by("task", maintain_order=True):
        values = {verdict: part.filter(b_is=verdict)["by"] for verdict in ("better", "worse")}
        found = [f"{verdict} for {join_names(names)}" for verdict, names in values.items() if len(names)]
        lines.append(f"{task}: of {len(part)} values, B is {' and '.join(found) or 'better or worse for none'}")
    return [f"{line}." for line in lines]

"""Compare two trained networks on the same rows with labels: ``mtl compare RUN_A RUN_B [FILE]``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import polars as pl
import torch
from pydantic import Field
from torch import Tensor

from mtl.checks import InputError, join_names, require
from mtl.files.formatting import number
from mtl.files.run_files import PREDICTIONS
from mtl.files.tables import Table
from mtl.loggers.base import MAX_LISTED_TASKS
from mtl.objectives import OF_QUANTILES
from mtl.options import FilePath, Positive, RunSeed, validated
from mtl.report.many_tasks import gains_over_tasks
from mtl.report.statistics import Difference, Verdict, holm
from mtl.runs.predictions_file import read_predictions
from mtl.training.bootstrap import standard_error
from mtl.training.labeled_predictions import LabeledPredictions
from mtl.training.metrics import best_value, higher_is_better, metric_names, value_of
from mtl.types import RANKING, Batch, TaskSpec, metric_family
from mtl.use.frames import like, to_polars
from mtl.use.permutation_importance import evaluation_of
from mtl.use.slices import values_of
from mtl.use.trained import UNNAMED_TABLE, TrainedModel

RESAMPLES = 1_000
RESAMPLES_OF_MANY = 100  # with more than MAX_LISTED_TASKS tasks, which are the units of the statistics
Resamples = Annotated[int, Field(ge=100)]
MAX_RESAMPLE_ROWS = 20_000  # rows of a resample
MIN_SLICE_ROWS = 50  # labelled rows of a slice
KINDS = {"task": pl.String, "by": pl.String, "rows": pl.Int64, "metric": pl.String}
KINDS |= dict.fromkeys(("value_a", "value_b", "difference", "low", "high", "p"), pl.Float64)
KINDS["verdict_on_b"] = pl.String


@validated
def compare(
    model_a: TrainedModel,
    model_b: TrainedModel,
    rows: Any,
    margin: Positive | None = None,
    by: str | None = None,
    resamples: Resamples | None = None,
    seed: RunSeed = 0,
    where: str = UNNAMED_TABLE,
) -> Any:
    """Return by how much one model is better than another on the same labelled rows, for each task of both.

    The columns are task, by, rows (with a label), metric (the main one of ``model_a``), value_a and value_b (its
    values), difference (B - A, in the unit of the metric) with its 95 % interval from low to high, p, and verdict_on_b:
    as good (the interval lies within +-``margin`` times the ``scale_of`` the metric, or all predictions are equal),
    better, worse or undecided. What is undefined, as for a task without a label, is null.

    The standard error is that of ``resamples`` bootstrap resamples of the rows, or of whole groups where the metric
    ranks the rows of groups; the interval is normal (Efron and Tibshirani 1993, chapter 13), with Student's quantiles.
    A resample has at most 20,000 of all rows; its error is scaled to their number (Bickel et al. 1997). There
    are 1,000 of them by default, and 100 for more than 64 tasks.

    ``by``: also compare the rows of each slice of this column, see ``mtl.use.slices.values_of``; their p-values are
    corrected together by Holm's method. ``rows``: as in ``TrainedModel.evaluate``; the result is of polars, or of
    pandas if ``rows`` are. Raises InputError, also for labels that one of the models does not know.
    """
    frame = to_polars(rows)
    if by is not None:
        require(by in frame.columns, f"{where} has no column {by!r}; it has {join_names(frame.columns)}")
        require(not frame[by].dtype.is_nested(), f"column {by!r} of {where} holds lists: give one of single values")
    models, batches = (model_a, model_b), list[Batch]()
    tasks = _shared_tasks(*(model.spec.tasks for model in models))
    for model, which in zip(models, "AB", strict=True):
        if model.labelled is None:
            raise InputError(f"the data of network {which} are no table")
        try:
            batches.append(model.labelled(frame, where))
        except InputError as error:
            raise InputError(f"network {which}: {error}") from None
    metrics, predictions = {a.name: (metric,) for a, _, metric in tasks}, []
    for model, batch in zip(models, batches, strict=True):
        specs = [replace(task, metrics=metrics.get(task.name, task.metrics)) for task in model.spec.tasks]
        predictions.append(evaluation_of(model, [batch], specs).gathered())
    cells = None if by is None else values_of(frame[by], model_a.encoder)
    return like(rows, _comparison(tasks, predictions, cells, margin, resamples, seed))


@validated
def compare_runs(
    folder_a: FilePath,
    folder_b: FilePath,
    margin: Positive | None = None,
    resamples: Resamples | None = None,
    seed: RunSeed = 0,
    model: str | None = None,
) -> pl.DataFrame:
    """Compare the models of two runs as ``compare`` does, on the test rows, by their stored predictions.

    ``model``: see ``read_predictions``.
    Images and texts can be compared too. Raises InputError unless both were tested on the same rows.
    """
    for folder in (folder_a, folder_b):
        absent = f"{folder} has no {PREDICTIONS}: give a FILE with labels, or a folder that mtl evaluate has written"
        require((folder / PREDICTIONS).is_file(), absent)
    tasks_a, predictions_a, digest_a = read_predictions(folder_a, model=model)
    tasks_b, predictions_b, digest_b = read_predictions(folder_b, model=model)
    differ = f"{folder_a} and {folder_b} were tested on different rows: their files, split options or data.seed differ"
    require(digest_a == digest_b, f"{differ}; give a FILE with labels, on which neither was trained")
    tasks = _shared_tasks([*tasks_a.values()], [*tasks_b.values()])
    for task, _, metric in tasks:
        is_ranking, needs_scores = metric_family(metric) in RANKING, (task.kind, metric) == ("multiclass", "auroc")
        column = "groups" if is_ranking else "scores" if needs_scores else "label"
        stored = task.name not in predictions_b or column in predictions_b[task.name].columns()
        require(stored, f"task {task.name!r}: {folder_b} has no {column} to compute {metric}; give a FILE with labels")
    return _comparison(tasks, [predictions_a, predictions_b], None, margin, resamples, seed)


def _comparison(
    tasks: Sequence[tuple[TaskSpec, TaskSpec, str]],
    predictions: Sequence[Mapping[str, LabeledPredictions]],
    cells: pl.Series | None,
    margin: float | None,
    resamples: int | None,
    seed: int,
) -> pl.DataFrame:
    """Return the table of ``compare``, from what both networks predicted; ``cells``: the slice of each row."""
    of_tasks, slices = [], []
    resamples = resamples or (RESAMPLES_OF_MANY if len(tasks) > MAX_LISTED_TASKS else RESAMPLES)
    for a, b, metric in tasks:
        pair = _common_rows((a, b), predictions)
        of_tasks.append((a, None, _compared(a, metric, pair, resamples, seed)))
        if cells is not None and pair:
            values = cells[pair[0].row_id.numpy()]
            for value in values.value_counts().filter(pl.col("count") >= MIN_SLICE_ROWS)[cells.name].sort():
                index = values.eq(value).arg_true().to_torch().long()
                part = [rows.at(index) for rows in pair]
                slices.append((a, value, _compared(a, metric, part, resamples, seed)))
    if cells is not None:
        require(bool(slices), f"no value of column {cells.name!r} has {MIN_SLICE_ROWS} rows with a label")
    p_values = [difference.p for *_, (_, difference) in slices if difference.p is not None]
    corrected = iter(holm(p_values))
    table = []
    for task, value, (row, difference) in [*of_tasks, *slices]:
        p = next(corrected) if value is not None and difference.p is not None else difference.p
        outcome = _outcome(row, difference, p, margin)
        table.append({"task": task.name, "by": value, **row, "p": p, "verdict_on_b": outcome})
    return pl.DataFrame(table, KINDS)


def _shared_tasks(a: Sequence[TaskSpec], b: Sequence[TaskSpec]) -> list[tuple[TaskSpec, TaskSpec, str]]:
    """Return each task of both networks, as A and as B describe it, and the metric to compare: the main one of A."""
    of_b, shared = {task.name: task for task in b}, []
    for task in a:
        if (other := of_b.get(task.name)) is not None:
            require(task.kind == other.kind, f"task {task.name!r} is {task.kind} in network A and {other.kind} in B")
            main = metric_names(task)[0]
            shared.append((task, other, "mae" if main in OF_QUANTILES and task.quantiles != other.quantiles else main))
    names = " and ".join(join_names(task.name for task in tasks) for tasks in (a, b))
    require(bool(shared), f"the two networks have no task of the same name: {names}")
    return shared


def _common_rows(
    tasks: tuple[TaskSpec, TaskSpec], predictions: Sequence[Mapping[str, LabeledPredictions]]
) -> list[LabeledPredictions]:
    """Return what both networks predicted for the rows that have a label in both, in one order; [] without any."""
    name = tasks[0].name
    pair = [by_task[name] for by_task in predictions if name in by_task]
    if len(pair) < 2:
        return []
    _, *places = np.intersect1d(pair[0].row_id.numpy(), pair[1].row_id.numpy(), return_indices=True)
    pair = [rows.at(torch.from_numpy(place)) for rows, place in zip(pair, places, strict=True)]
    first, second = (_names(task, rows.label) for task, rows in zip(tasks, pair, strict=True))
    other = f"task {name!r}: the networks read other labels from the same rows"
    require(first == second, f"{other}: do both predict the same column, with the same positive class?")
    return pair


def _names(task: TaskSpec, labels: Tensor) -> list[Any]:
    """Return labels; those of several classes, which may be numbered in another way, by name."""
    return [task.classes[label] for label in labels] if task.num_classes > 1 and task.classes else labels.tolist()


def _compared(
    task: TaskSpec, metric: str, pair: list[LabeledPredictions], resamples: int, seed: int
) -> tuple[dict[str, Any], Difference]:
    """Return the columns of a comparison, and the difference, positive if the second network is better."""

    def change(rows: Sequence[LabeledPredictions]) -> float:
        a, b = (value_of(task.kind, metric, part) for part in rows)
        return b - a

    count, sign = len(pair[0].label) if pair else 0, 1.0 if higher_is_better(metric) else -1.0
    a, b = (value_of(task.kind, metric, rows) for rows in pair) if count else (math.nan, math.nan)
    is_defined = math.isfinite(b - a)
    error, df = standard_error(change, pair, metric, resamples, MAX_RESAMPLE_ROWS, seed) if is_defined else (None, 0)
    difference = Difference(b - a, error, count, count, df)
    low, high = difference.interval or (None, None)
    row = {"rows": count, "metric": metric, "value_a": a, "value_b": b, "difference": b - a, "low": low, "high": high}
    row = {name: None if value != value else value for name, value in row.items()}  # NaN is undefined
    return row, difference.scaled(sign)


def scale_of(metric: str, value: float) -> float:
    """Return what margins are parts of: 1 for metrics with the best value 1, such as AUROC, else the ``value`` of A."""
    return 1.0 if best_value(metric) == 1 else abs(value)


def _outcome(row: dict[str, Any], difference: Difference, p: float | None, margin: float | None) -> str | None:
    """Return what the difference tells of the second network; None if the metric is undefined."""
    if row["difference"] is None:
        return None
    ends, margin = difference.interval, margin and margin * scale_of(row["metric"], row["value_a"])
    if ends == (0.0, 0.0) or (ends and margin and -margin < ends[0] and ends[1] < margin):
        return str(Verdict.SAME)  # also a difference that is significant, but too small to matter
    verdict = difference.verdict(p)
    if higher_is_better(row["metric"]) is None and verdict in (Verdict.BETTER, Verdict.WORSE):
        verdict = Verdict.UNDECIDED
    return str(verdict)


def of_many_tasks(table: pl.DataFrame) -> list[Table]:
    """Return for each metric of more than ``MAX_LISTED_TASKS`` tasks of ``compare`` how much better B is over them."""
    rows = table.filter(pl.col("by").is_null())
    tables, labels = list[Table](), dict(rows.select("task", "rows").rows())
    for (metric,), part in rows.group_by("metric", maintain_order=True) if len(rows) > MAX_LISTED_TASKS else ():
        sign = 1.0 if higher_is_better(str(metric)) else -1.0
        gains = {task: None if d is None else sign * d for task, d in part.select("task", "difference").rows()}
        title = f"{metric}: how much better B is, by labels"
        tables.append(gains_over_tasks(gains, labels, title))
    return tables


def in_words(table: pl.DataFrame, margin: float | None) -> list[str]:
    """Return a sentence for each task, and one on the values of the column."""
    lines = []
    for row in table.filter(pl.col("by").is_null()).iter_rows(named=True):
        if row["verdict_on_b"] is None:
            lines.append(f"{row['task']}: {row['metric']} is undefined on its {row['rows']:,} rows with a label")
            continue
        interval = "" if row["low"] is None else f" [{number(row['low'], 3)}, {number(row['high'], 3)}]"
        change = f"{row['metric']} {number(row['difference'], 3, '+')}{interval}, {row['rows']:,} rows"
        same = "there is no difference"
        if margin:
            same += f" that would matter, {number(margin * scale_of(row['metric'], row['value_a']), 2)}"
        verdicts = {"better": "B is better", "worse": "B is worse", "as good": same}
        lines.append(f"{row['task']}: {verdicts.get(row['verdict_on_b'], 'undecided')} ({change})")
    for (task,), part in table.filter(pl.col("by").is_not_null()).group_by("task", maintain_order=True):
        values = {verdict: part.filter(verdict_on_b=verdict)["by"] for verdict in ("better", "worse")}
        sentences = [f"{verdict} for {join_names(names)}" for verdict, names in values.items() if len(names)]
        lines.append(f"{task}: of {len(part)} values, B is {' and '.join(sentences) or 'better or worse for none'}")
    return [f"{line}." for line in lines]

"""Write the page of one run: how good it is, where it is wrong, and on what it relies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from mtl.checkpoints.files import Checkpoint, read
from mtl.checks import InputError, first_line
from mtl.config import build
from mtl.config.resume import config_to_load
from mtl.data_modules.files.cloud import FILE
from mtl.data_modules.split_rows import SplitRows
from mtl.data_modules.tables.cells import data_columns
from mtl.files.formatting import cell, number
from mtl.files.run_files import COMMAND, read_json
from mtl.files.tables import Table
from mtl.loggers.base import MAX_LISTED_TASKS
from mtl.predictions import class_names
from mtl.report.baseline_comparison import describe_many_tasks, describe_task
from mtl.report.curves import curves_by_epoch
from mtl.report.errors import Predictions, pictures_of_errors, recalls, residuals
from mtl.report.page import Page, Section, picture
from mtl.report.runs import Results, config, read_results, read_runs
from mtl.report.section import costs_of, pictures_of_experts
from mtl.report.summary import describe_runs
from mtl.runs.predictions_file import read_predictions
from mtl.runs.results import MOST_TASKS, best_and_worst, by_task, rankings
from mtl.runs.test_rows import describe_tested_epoch, labels_by_task, measured_by_task
from mtl.training.labeled_predictions import LabeledPredictions
from mtl.types import ROW, TaskSpec
from mtl.use import slices
from mtl.use.trained import TrainedModel, model_of

_IMPORTANCE_ROWS = 2000  # test rows whose cells are shuffled
_SHUFFLED = 60  # columns times shuffles, about
_MAX_COLUMNS_SHUFFLED = 100  # columns; each shuffle predicts all rows again
_NUM_WORST_ROWS = 5  # rows of a task
_MAX_COLUMNS = 20  # of a table
_IMPORTANCE = "On what it relies"
_MAX_CELL_CHARS = 40  # characters of a cell


TestedTable = tuple[TrainedModel, SplitRows]  # the network of a run on a table, and the rows of its test


def write_run_page(
    folder: Path,
    trust: Sequence[str] = (),
    frames: Mapping[str, pl.DataFrame] | None = None,
    curves: Sequence[str] = (),
    places: Mapping[str, Any] | None = None,
) -> list[Section]:
    """Write the page of the finished run in ``folder`` into it, and return its sections.

    Of a table, the test rows are read again. Without them, or without the run's predictions, the page says so and has
    fewer sections. ``trust``: as for ``mtl.load``.
    ``frames``: rows in memory, by split. ``curves``: further metrics to draw. ``places``: the
    data's folder and addresses, see ``places_of``; by default those of ``config_to_load``, since a stranger's
    checkpoint chooses none.
    """
    runs, results = read_runs([folder]), read_results(folder)[0]
    assert results is not None
    predictions, table, epoch, notes = list[Predictions](), None, None, list[str]()
    try:
        specs, by_task, _ = read_predictions(folder)
        predictions = [(specs[name], rows) for name, rows in by_task.items()]
    except InputError as error:
        notes.append(f"What needs the predictions for the test rows is left out: {first_line(error)}")
    try:
        checkpoint = read(folder, "last" if config(folder).get("test_checkpoint") == "last" else "best")
        epoch = int(checkpoint.get("epoch", 0))
        table, changes = _tested_table(checkpoint, trust, frames or {}, places or {})
        notes += changes
    except (InputError, OSError) as error:
        memory = read_json(folder / COMMAND).get("rows")  # of mtl.fit, whose page has all
        why = "they were in memory" if memory else first_line(error)
        notes.append(f"The test rows cannot be read again, so what needs them is left out: {why}")
    tasks, shown_tasks = list(results.main_metrics), _shown_tasks(results)
    panels = {task: [f"train/{task}/loss", f"val/{task}/loss"] for task in shown_tasks}
    panels |= {name: [name] for name in curves}
    if len(tasks) > MOST_TASKS:
        which = "first" if shown_tasks == tasks[: len(shown_tasks)] else "best and worst"
        notes.append(f"Pictures and rows are those of the {which} {len(shown_tasks)} of {len(tasks)} tasks.")
        panels = {"all tasks": ["train/loss", "val/loss"], **panels}
    drawn = curves_by_epoch(folder, panels, results.epochs, epoch)
    notes += [f"No curve: the run has not logged {name}." for name in curves if name not in drawn]
    losses = [picture(figure, "", f"{name} by epoch") for name, figure in drawn.items()]
    listed = [(task, rows) for task, rows in predictions if task.name in tasks and len(tasks) <= MAX_LISTED_TASKS]
    errors = {task.name: slices.spread(task, results.main_metrics[task.name], rows) for task, rows in listed}
    sections = [_overview(results, notes, errors), Section("Losses by epoch", figures=losses)]
    predictions = [(task, rows) for task, rows in predictions if task.name in shown_tasks]
    wrong, by_class = pictures_of_errors(predictions), recalls(predictions)
    sections.append(Section("Where it is wrong", tables=[*by_class, *residuals(predictions)], figures=wrong))
    if results.slices:
        by_slice = slices.tables_of(slices.read(results.slices), results.main_metrics)
        sections.append(Section("For whom it is worse", tables=by_slice))
    sections.append(Section("Experts by task", figures=pictures_of_experts(runs, {})))
    if table is not None:
        sections += _of_table(*table, predictions, shown_tasks)
    costs = costs_of(runs)
    sections += [Section("Costs", tables=[costs])] if costs else []
    sections = [section for section in sections if section.has_content]
    Page(folder.resolve().name, sections, runs.table, describe_runs([folder])).write(folder)
    return sections


def _overview(results: Results, notes: Sequence[str], errors: Mapping[str, float | None]) -> Section:
    """Return a sentence on each task, or a few on many, advice, and the table of all metrics beside other models'.

    ``errors``: the standard errors of the main metrics, by task.
    """
    numbers = results.measured, results.main_metrics, results.best_epochs
    table = by_task(*numbers, most=MAX_LISTED_TASKS)
    if isinstance(table, Table):
        mains, tables = results.main_metrics.items(), [table]
        lines = [describe_task(results.measured, *main, errors.get(main[0])) for main in mains]
        intervals = "In brackets: 95 % intervals over the test rows, of this one training."
        notes = [*notes, f"{intervals} The verdict on the best other model is corrected for the number of models."]
    else:
        lines = [describe_many_tasks(*numbers[:2]), *(line.strip() for line in table.splitlines())]
        tables = rankings(*numbers[:2], results.data.test_labels)
    record = results.model_dump()
    labels, tested = labels_by_task(record["data"]), describe_tested_epoch(record)
    tables += [*([labels] if isinstance(labels, Table) else []), *measured_by_task(record)]
    lines += [text for text in (tested, labels) if isinstance(text, str)]
    return Section("How good it is", [*filter(None, lines), *results.advice], tables=tables, notes=notes)


def _shown_tasks(results: Results) -> list[str]:
    """Return the tasks whose curves, errors and rows are shown: the first ones, or of many the best and the worst."""
    mains = results.main_metrics
    metrics = list(dict.fromkeys(mains.values())) if len(mains) > MAX_LISTED_TASKS else []
    shown_tasks = list[str]()
    for metric in metrics[: MOST_TASKS // 2]:
        count = MOST_TASKS // 2 // len(metrics) or 1
        best, worst = best_and_worst(results.measured, mains, metric, results.data.test_labels, count)
        shown_tasks += [*best, *worst]
    return shown_tasks or [*mains][:MOST_TASKS]


def _tested_table(
    checkpoint: Checkpoint, trust: Sequence[str], frames: Mapping[str, pl.DataFrame], places: Mapping[str, Any]
) -> tuple[TestedTable | None, list[str]]:
    """Return the table of a run, None if its data are none, and how its files have changed since. Raises InputError."""
    cfg = config_to_load(checkpoint, trust)
    has = checkpoint.config(trust)["data"]
    cfg.data.update({option: value for option, value in places.items() if option in has})
    data = build.build_data(cfg)
    if data.labelled is None:
        return None, []
    if frames:
        data.frames = frames
    data.load_state_dict(checkpoint.data(), test_only=True)
    data.prepare_data()
    changes = [f"{change} since the training." for change in data.changed_files().values()]
    return (model_of(checkpoint, cfg), data.split_rows()["test"]), changes


def _of_table(
    model: TrainedModel, test_rows: SplitRows, predictions: Sequence[Predictions], tasks: Sequence[str]
) -> list[Section]:
    """Return the importance of the columns of a table, and the rows with the largest errors of each of ``tasks``."""
    count = len(test_rows)
    worst = [(task, _with_largest_errors(rows, count)) for task, rows in predictions]
    drawn = np.sort(np.random.default_rng(0).permutation(count)[:_IMPORTANCE_ROWS])
    wanted = np.unique(np.concatenate([drawn, *(rows.row_id.numpy() for _, rows in worst)]))
    frame = _rows_at(test_rows, wanted)
    sample = frame[np.searchsorted(wanted, drawn)].select(data_columns(frame))
    tables = [_worst(model, task, rows, frame[np.searchsorted(wanted, rows.row_id.numpy())]) for task, rows in worst]
    errors, wide = Section("Largest errors", tables=tables), len(model.columns)
    if wide > _MAX_COLUMNS_SHUFFLED:
        left_out = f"Left out, since the table has {wide} columns: mtl importance RUN ROWS computes it."
        return [Section(_IMPORTANCE, notes=[left_out]), errors]
    importance = _importance(model, sample, [task.name for task, _ in predictions] or tasks)
    return [Section(_IMPORTANCE, tables=[importance]), errors]


def _with_largest_errors(rows: LabeledPredictions, count: int) -> LabeledPredictions:
    """Return the rows with the largest errors, the largest first; all are among the ``count`` rows that there are."""
    rows = rows.at(((rows.row_id >= 0) & (rows.row_id < count)).nonzero()[:, 0])
    return rows.at(rows.error.topk(min(_NUM_WORST_ROWS, len(rows))).indices)


def _rows_at(rows: SplitRows, wanted: Any) -> pl.DataFrame:
    """Return the rows of a split whose numbers, from 0, are ``wanted``, an ascending array; a block is read at once."""
    parts, first = list[pl.DataFrame](), 0
    for frame, _ in rows.frames(rows.source.columns):
        parts.append(frame[wanted[(wanted >= first) & (wanted < first + len(frame))] - first])
        first += len(frame)
    return pl.concat(parts, how="vertical_relaxed")


def _importance(model: TrainedModel, sample: pl.DataFrame, tasks: Sequence[str]) -> Table:
    """Return the importance of the columns for each of ``tasks``, the most important ones first."""
    repeats = max(1, min(5, _SHUFFLED // len(model.columns)))
    importance = model.importance(sample, repeats, where="the test rows", tasks=tasks)
    importance = importance.with_columns(pl.col("importance").fill_nan(None))
    positive = pl.col("importance").clip(0)
    importance = importance.with_columns(fraction=positive / positive.max().over("task").clip(1e-12))
    means = importance.group_by("column", maintain_order=True).agg(pl.col("fraction").mean())
    order = means.sort("fraction", descending=True, nulls_last=True)
    values = {(task, column): value for task, column, value in importance.select("task", "column", "importance").rows()}
    metrics = dict(importance.select("task", "metric").rows())
    columns = order["column"].to_list()[:_MAX_COLUMNS]
    rows = [[column, *(number(values[task, column]) for task in metrics)] for column in columns]
    notes = [
        f"How much worse the metric becomes if the cells of the column are shuffled among {len(sample):,} of the test "
        f"rows, mean of {repeats} shuffles. Columns that say the same share their importance."
    ]
    notes += [f"{len(order) - len(columns)} less important columns are left out."] if len(order) > len(columns) else []
    return Table(["column", *(f"{task} {metric}" for task, metric in metrics.items())], rows, notes=notes)


def _worst(model: TrainedModel, task: TaskSpec, predicted: LabeledPredictions, frame: pl.DataFrame) -> Table:
    """Return a table of ``predicted``, the rows with the largest errors, and their cells, ``frame``."""
    columns = model.columns[:_MAX_COLUMNS]
    classes = class_names(task) if task.kind != "regression" else []
    rows = []
    pairs = zip(predicted.label.tolist(), predicted.prediction.tolist(), frame.rows(named=True), strict=True)
    for label, prediction, cells in pairs:
        right = classes[int(label)] if classes else f"{label:.6g}"
        said = cell(prediction) if task.kind != "multiclass" else classes[int(prediction)]
        file = f"{Path(cells[FILE]).name}, " if FILE in cells else ""
        rows.append([f"{file}{cells[ROW]}", right, said, *(_text(cells[column]) for column in columns)])
    said = f"probability of {classes[1]}" if task.kind == "binary" else "prediction"
    left = len(model.columns) - len(columns)
    notes = [f"{left} more columns are left out."] if left else []
    return Table(["row", "label", said, *columns], rows, task.name, notes)


def _text(cell: Any) -> str:
    text = "" if cell is None or (isinstance(cell, float) and math.isnan(cell)) else str(cell)
    return text if len(text) <= _MAX_CELL_CHARS else f"{text[: _MAX_CELL_CHARS - 1]}…"

"""Write the page of one run: how good it is, where it is wrong, and on what it relies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from mtl.checkpoints.files import read
from mtl.checks import InputError, first_line
from mtl.config import build
from mtl.config.resume import config_to_load
from mtl.data_modules.split_rows import SplitRows
from mtl.data_modules.tables.cells import FILE, named
from mtl.files.formatting import cell, number
from mtl.files.records import COMMAND, read_json
from mtl.files.tables import Table, bullets
from mtl.predictions import class_names, readable
from mtl.report.against import improvement
from mtl.report.curves import curves_by_epoch
from mtl.report.errors import Predicted, pictures_of_errors, residuals
from mtl.report.page import Section, picture
from mtl.report.runs import Results, config, read_results, read_runs
from mtl.report.section import costs_of, pictures_of_experts
from mtl.report.statistics import Outcome
from mtl.report.summary import heading, write_report
from mtl.runs.results import MOST_TASKS, by_task
from mtl.types import ROW
from mtl.use import slices
from mtl.use.trained import TrainedModel, model_of

_ROWS = 2000  # test rows whose cells are shuffled
_SHUFFLED = 60  # columns times shuffles, about
_WIDEST = 100  # columns; each shuffle encodes all of them
_WORST = 5  # rows of a task
_MOST_COLUMNS = 20  # of a table
_IMPORTANCE = "On what it relies"
_LONGEST = 40  # characters of a cell


@dataclass(frozen=True)
class Tested:
    """The network of a run and its test rows: their predictions by task, and the ``rows`` of a table."""

    model: TrainedModel
    epoch: int
    found: Sequence[Predicted]
    rows: SplitRows | None
    changes: Sequence[str] = field(default_factory=list)


def write_run_page(
    folder: Path,
    trust: Sequence[str] = (),
    frames: Mapping[str, pl.DataFrame] | None = None,
    curves: Sequence[str] = (),
    places: Mapping[str, Any] | None = None,
) -> list[Section]:
    """Write the page of the finished run in ``folder`` into it, and return its sections.

    The test rows are read again; without them, the page says so and has fewer sections. ``trust``: as for ``mtl.load``.
    ``frames``: rows in memory, by split. ``curves``: further metrics to draw. ``places``: the
    data's folder and addresses, see ``places_of``; by default those of ``config_to_load``, since a stranger's
    checkpoint chooses none.
    """
    runs, results = read_runs([folder]), read_results(folder)[0]
    assert results is not None
    tested, notes = None, list[str]()
    try:
        tested = _tested(folder, trust, frames or {}, places or {})
        notes += tested.changes
    except (InputError, OSError) as error:
        memory = read_json(folder / COMMAND).get("rows")  # of mtl.fit, whose page has all
        why = "they were in memory" if memory else first_line(error)
        notes.append(f"The test rows cannot be read again, so what needs them is left out: {why}")
    tasks = list(results.main_metrics)
    if len(tasks) > MOST_TASKS:
        notes.append(f"Pictures and rows are those of the first {MOST_TASKS} of {len(tasks)} tasks.")
    shown = tasks[:MOST_TASKS]
    panels = {task: [f"train/{task}/loss", f"val/{task}/loss"] for task in shown} | {name: [name] for name in curves}
    drawn = curves_by_epoch(folder, panels, results.epochs, None if tested is None else tested.epoch)
    notes += [f"No curve: the run has not logged {name}." for name in curves if name not in drawn]
    losses = [picture(each, f"{name} by epoch") for name, each in drawn.items()]
    sections = [_overview(results, notes), Section("Losses by epoch", figures=losses)]
    if tested is not None:
        found = [each for each in tested.found if each.task.name in shown]
        sections.append(Section("Where it is wrong", tables=residuals(found), figures=pictures_of_errors(found)))
    if results.slices:
        by_slice = slices.table_of(slices.read(results.slices), results.main_metrics)
        sections.append(Section("For whom it is worse", tables=[by_slice]))
    sections.append(Section("Experts by task", figures=pictures_of_experts(runs, {})))
    if tested is not None and tested.rows is not None:
        sections += _of_table(tested, found, tested.rows)
    costs = costs_of(runs)
    sections += [Section("Costs", tables=[costs])] if costs else []
    kept = [each for each in sections if each.text or each.tables or each.figures or each.notes]
    write_report(folder.resolve().name, heading([folder]), kept, [runs], folder)
    return kept


def _overview(results: Results, notes: Sequence[str]) -> Section:
    """Return advice, the main metrics in words, and the table of all metrics beside those of other models."""
    table = by_task(results.measured, results.main_metrics, results.best_epochs)
    if isinstance(table, str):  # of many tasks
        lines, tables = [line.strip() for line in table.splitlines()], []
    else:
        lines, tables = [_sentence(*each, results) for each in results.main_metrics.items()], [table]
    return Section("How good it is", bullets([*results.advice, *lines]), tables=tables, notes=notes)


def _sentence(task: str, metric: str, results: Results) -> str:
    """Return the main metric of a task, and whether it is better on these rows than those of the other models."""
    measured, parts = results.measured, list[str]()
    for model in measured.models()[1:]:
        difference = improvement(measured, model, task, metric)
        if difference is None:
            continue
        value, outcome = number(measured.value(task, metric, model=model)), difference.outcome()
        if difference.error is None:  # too few rows, or too many tasks
            parts.append(f"beside {model} ({value})")
            continue
        link = "against" if outcome == Outcome.OPEN else "than"
        apart = f"{number(difference.mean, 3, '+')} ± {number(difference.error, 2)}"
        parts.append(f"{outcome} {link} {model} ({value}, lead {apart})")
    where = ", on these test rows " if parts else ""
    return f"{task}: {metric} {number(measured.value(task, metric))}{where}{', '.join(parts)}"


def _tested(
    folder: Path, trust: Sequence[str], frames: Mapping[str, pl.DataFrame], places: Mapping[str, Any]
) -> Tested:
    """Load the network of a run and predict its test rows. Raises InputError."""
    checkpoint = read(folder, "last" if config(folder).get("tested") == "last" else "best")
    cfg = config_to_load(checkpoint, trust)
    has = checkpoint.config(trust)["data"]
    cfg.data.update({option: value for option, value in places.items() if option in has})
    data = build.build_data(cfg)
    if frames:
        data.frames = frames
    data.load_state_dict(checkpoint.data(), test_only=True)
    data.prepare_data()
    changes = [f"{change} since the training." for change in data.changed_files().values()]
    data.setup()
    model = model_of(checkpoint, cfg)
    found = _predicted(model, data)
    rows = data.split_rows()["test"] if model.labelled is not None else None
    return Tested(model, int(checkpoint.get("epoch", 0)), found, rows, changes)


@torch.no_grad()
def _predicted(model: TrainedModel, data: Any) -> list[Predicted]:
    """Return the predictions for the labelled test rows of each task, but for spans."""
    # As in the metrics, predictions are those for rows that are sampled as the test rows are
    specs = {task.name: replace(task, sampling_rate=1.0) for task in model.spec.tasks}
    parts: dict[str, list[Predicted]] = {}
    first = 0
    for batch in data.test_dataloader():
        names = [name for name in batch.targets if specs[name].kind != "span"]
        inputs = {name: one.to(model.device) for name, one in batch.inputs.items()}
        outputs = model.network(inputs, names).predictions if names else {}
        values = readable(specs, {name: value.cpu() for name, value in outputs.items()})
        for name in names:
            parts.setdefault(name, []).append(Predicted.of(specs[name], values[name], batch.targets[name], first))
        first += len(batch)
    found = [Predicted.joined(parts[name]) for name in specs if name in parts]
    return [each for each in found if len(each.label)]


def _of_table(tested: Tested, found: Sequence[Predicted], rows: SplitRows) -> list[Section]:
    """Return the importance of the columns of a table, and the rows with the largest errors of each task."""
    worst = [each.error.topk(min(_WORST, len(each.error))).indices for each in found]
    drawn = np.sort(np.random.default_rng(0).permutation(len(rows))[:_ROWS])
    numbers = [each.row[index].numpy() for each, index in zip(found, worst, strict=True)]
    wanted = np.unique(np.concatenate([drawn, *numbers]))
    frame = _rows_at(rows, wanted)
    sample = frame[np.searchsorted(wanted, drawn)].select(named(frame))
    tables = [
        _worst(tested.model, each, index, frame[np.searchsorted(wanted, at)])
        for each, index, at in zip(found, worst, numbers, strict=True)
    ]
    errors, wide = Section("Largest errors", tables=tables), len(tested.model.columns)
    if wide > _WIDEST:
        left_out = f"Left out, since the table has {wide} columns: mtl importance RUN ROWS computes it."
        return [Section(_IMPORTANCE, notes=[left_out]), errors]
    importance = _importance(tested.model, sample, [each.task.name for each in found])
    return [Section(_IMPORTANCE, tables=[importance]), errors]


def _rows_at(rows: SplitRows, wanted: Any) -> pl.DataFrame:
    """Return the rows of a split whose numbers, from 0, are ``wanted``, an ascending array; a block is read at once."""
    parts, first = list[pl.DataFrame](), 0
    for frame, file in rows.frames(rows.source.columns):
        if len(rows.source.tables) > 1:
            frame = frame.with_columns(pl.lit(file).alias(FILE))
        parts.append(frame[wanted[(wanted >= first) & (wanted < first + len(frame))] - first])
        first += len(frame)
    return pl.concat(parts, how="vertical_relaxed")


def _importance(model: TrainedModel, sample: pl.DataFrame, tasks: Sequence[str]) -> Table:
    """Return the importance of the columns for each of ``tasks``, the most important ones first."""
    repeats = max(1, min(5, _SHUFFLED // len(model.columns)))
    found = model.importance(sample, repeats, where="the test rows").filter(pl.col("task").is_in(tasks))
    found = found.with_columns(pl.col("importance").fill_nan(None))
    known = pl.col("importance").clip(0)
    found = found.with_columns(share=known / known.max().over("task").clip(1e-12))
    order = found.group_by("column", maintain_order=True).agg(pl.col("share").mean()).sort("share", descending=True)
    values = {(task, column): value for task, column, value in found.select("task", "column", "importance").rows()}
    metrics = dict(found.select("task", "metric").rows())
    columns = order["column"].to_list()[:_MOST_COLUMNS]
    rows = [[column, *(number(values[task, column]) for task in metrics)] for column in columns]
    notes = [
        f"How much worse the metric becomes if the cells of the column are shuffled among {len(sample):,} of the test "
        f"rows, mean of {repeats} shuffles. Columns that say the same share their importance."
    ]
    notes += [f"{len(order) - len(columns)} less important columns are left out."] if len(order) > len(columns) else []
    return Table(["column", *(f"{task} {metric}" for task, metric in metrics.items())], rows, notes=notes)


def _worst(model: TrainedModel, found: Predicted, index: Any, frame: pl.DataFrame) -> Table:
    """Return the rows ``frame``, which have the largest errors; ``index``: their places in ``found``."""
    task, columns = found.task, model.columns[:_MOST_COLUMNS]
    classes = class_names(task) if task.kind != "regression" else []
    rows = []
    for place, cells in zip(index.tolist(), frame.rows(named=True), strict=True):
        label, prediction = found.label[place].item(), found.prediction[place].item()
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
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"

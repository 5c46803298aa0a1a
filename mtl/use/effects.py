"""Say which cells of a row raise or lower its predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from mtl.checks import require
from mtl.data_modules.tables.cells import Remarks
from mtl.files.formatting import cell, number
from mtl.predictions import class_names, main_column
from mtl.runs.console import with_progress_bar
from mtl.types import TaskSpec

MAX_EFFECTS_SHOWN = 3  # effects of a row and task that are shown
EFFECTS = {"row": pl.Int64, "task": pl.String, "column": pl.String, "effect": pl.Float64}


def cell_effects(
    model: Any,
    frame: pl.DataFrame,
    tasks: Sequence[TaskSpec],
    reference: pl.DataFrame,
    samples: int,
    seed: int,
    where: str,
) -> pl.DataFrame:
    """See ``TrainedModel.explain``."""
    require(len(reference) > 1, "one row has nothing to be compared with: give reference, further rows such as those")
    cells = reference.select(model.columns).sample(samples, with_replacement=True, seed=seed)
    names, rows = [task.name for task in tasks], np.arange(len(frame))
    before = model.predict(frame, names, where=where)
    effects = [pl.DataFrame(schema=EFFECTS)]
    warned = getattr(model.encoder, "remarks", Remarks()).warned
    earlier = set(warned)
    warned.update(model.columns)  # no warnings about rows with replaced cells
    for column in with_progress_bar(model.columns, "replacing cells"):  # each row with each cell
        repeated = frame[np.tile(rows, samples)].with_columns(cells[column][np.repeat(np.arange(samples), len(rows))])
        after = model.predict(repeated, names, where=where)
        for task in tasks:
            prediction = predicted(task, before, before)
            others = predicted(task, after, before[np.tile(rows, samples)]).reshape(samples, -1).mean(0)
            columns = {"row": rows, "task": task.name, "column": column, "effect": prediction - others}
            effects.append(pl.DataFrame(columns, schema=EFFECTS))
    warned.intersection_update(earlier)
    order = pl.col("task").cast(pl.Enum(names))
    return pl.concat(effects).sort("row", order, -pl.col("effect").abs(), maintain_order=True)


def predicted(task: TaskSpec, predictions: pl.DataFrame, before: pl.DataFrame) -> Any:
    """Return one number for each row: a value, the probability of yes, or that of the class predicted ``before``."""
    if task.kind == "regression":
        return predictions[main_column(task)].to_numpy()
    if task.kind == "binary":
        return predictions[f"{task.name}_probability"].to_numpy()
    names = class_names(task)
    classes = [names.index(name) for name in before[f"{task.name}_class"]]
    values = predictions.select(f"{task.name}_probability_{name}" for name in names).to_numpy()
    return np.take_along_axis(values, np.array(classes, int)[:, None], 1)[:, 0]


def in_words(model: Any, frame: pl.DataFrame, effects: pl.DataFrame, tasks: Sequence[TaskSpec]) -> pl.DataFrame:
    """Return a table to read: the prediction of each row and task, the largest effects, and any experts."""
    names, has_experts = [task.name for task in tasks], len(model.routing(frame[:1])) > 0
    predictions, lines = model.predict(frame, names, experts=has_experts), []
    for row in range(len(frame)):
        for task in tasks:
            largest = effects.filter(row=row, task=task.name).head(MAX_EFFECTS_SHOWN)
            cells = {name: "missing" if frame[name][row] is None else frame[name][row] for name in largest["column"]}
            parts = [f"{name} {cells[name]}: {number(effect, 3, '+')}" for _, _, name, effect in largest.iter_rows()]
            shown = {"row": row + 1, "task": task.name, "prediction": predictions[main_column(task)][row]}
            if task.kind == "binary":
                probability = number(predictions[f"{task.name}_probability"][row], 3)
                shown["prediction"] = f"{shown['prediction']} ({probability})"
            elif task.kind == "regression":
                shown["prediction"] = cell(shown["prediction"])
            shown["largest effects"] = ", ".join(parts)
            if (experts := f"{task.name}_experts") in predictions.columns:
                shown["experts"] = predictions[experts][row]
            lines.append(shown)
    return pl.DataFrame(lines)

"""Write predictions.parquet of a run, what its models predicted for the rows with a label, and read it.

The file is long, not wide: a row for each split, model, task and labelled row. Tasks with rows of their own fit as well
as those that share rows, and so does any number of models. It has no inputs but the columns of ``data.slices``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor

from mtl.checks import join_names, require
from mtl.data_modules.files.reading import parsing
from mtl.files.run_files import PREDICTIONS, checked_file
from mtl.files.writing import writing
from mtl.training.labeled_predictions import LabeledPredictions
from mtl.training.measurements import BLEND, NETWORK
from mtl.training.metrics import metric_names
from mtl.types import TaskSpec

METADATA = "mtl"  # key of the file's metadata: the tasks, and a digest of the rows of each split
KINDS = ("binary", "multiclass", "regression")  # tasks of kind span have no prediction that is a number
SCHEMA: dict[str, Any] = {
    "row_id": pl.Int64,
    "label": pl.Float64,  # of a class, its number
    "prediction": pl.Float64,
    "confidence": pl.Float64,
    "likelihood": pl.Float64,
    "scores": pl.List(pl.Float64),
    "pinball": pl.Float64,
    "covered": pl.Boolean,
    "weight": pl.Float64,
    "groups": pl.Int64,
}


def write_predictions(
    path: Path,
    predictions: Mapping[tuple[str, str], Mapping[str, LabeledPredictions]],
    tasks: Sequence[TaskSpec],
    row_info: Mapping[str, pl.DataFrame | None],
    digests: Mapping[str, str],
) -> None:
    """Write ``predictions[split, model][task]``; without any, write no file.

    ``row_info``: by split, what a table's data module tells of each row, see ``TensorDataModule.row_info``.
    ``digests``: by split, that of its rows. Numbers are as metrics have them, so a metric computed from the file equals
    that of results.json.
    """
    parts = []
    for (split, model), by_task in predictions.items():
        for task, rows in by_task.items():
            columns = {name: _series(name, values) for name, values in rows.columns().items() if name in SCHEMA}
            missing = [pl.lit(None, dtype).alias(name) for name, dtype in SCHEMA.items() if name not in columns]
            names = [pl.lit(text).alias(name) for name, text in (("split", split), ("model", model), ("task", task))]
            part = pl.DataFrame(columns).with_columns(*names, *missing).select("split", "model", "task", *SCHEMA)
            info = row_info.get(split)
            parts.append(part if info is None else part.join(info, "row_id", "left", maintain_order="left"))
    if not parts:
        return
    described = {
        task.name: {"kind": task.kind, "classes": list(task.classes), "num_classes": task.num_classes}
        | {"transform": "log" if task.is_log else None, "metrics": metric_names(task), "quantiles": task.quantiles}
        for task in tasks
        if task.kind in KINDS
    }
    content = json.dumps({"tasks": described, "digests": dict(digests)})
    with writing(path) as file:
        pl.concat(parts, how="diagonal_relaxed").write_parquet(file, metadata={METADATA: content})


def _series(name: str, values: Tensor) -> pl.Series:
    series = pl.Series(name, values.numpy())
    return (series.arr.to_list() if values.dim() == 2 else series).cast(SCHEMA[name])


def read_predictions(
    folder: Path, split: str = "test", model: str | None = None
) -> tuple[dict[str, TaskSpec], dict[str, LabeledPredictions], str]:
    """Return the tasks of the run in ``folder``, by task the rows that one of its models predicted, and their digest.

    ``model``: by default the blend if there is one, else the network.
    A task has its metrics, and the options that say what its predictions mean. Raises InputError if there is no such
    file, or it is damaged; a stranger may have written it.
    """
    path = checked_file(folder / PREDICTIONS, folder, math.inf)
    with parsing(path, f"Write it again: mtl evaluate {folder}"):
        content = json.loads(pl.read_parquet_metadata(path)[METADATA])
        tasks = {name: _task(name, options) for name, options in content["tasks"].items()}
        of_split = pl.scan_parquet(path).filter(split=split)
        models = of_split.select("model").unique().collect()["model"].to_list()
        name = model or (BLEND if BLEND in models else NETWORK)
        require(name in models, f"{path} has no predictions of model {name}; it has {join_names(sorted(models))}")
        rows = of_split.filter(model=name).select("task", *SCHEMA).collect()
        rows = rows.cast(SCHEMA)  # type: ignore[arg-type]  # polars' types of keys are narrower than texts
        by_task = {name: rows.filter(task=name) for name in tasks}
        predictions = {name: _rows(tasks[name], part, path) for name, part in by_task.items() if len(part)}
        return tasks, predictions, str(content["digests"][split])


def read_digest(folder: Path) -> str | None:
    """Return the digest of the test rows of the run in ``folder``; None without its predictions."""
    path = folder / PREDICTIONS
    if not path.is_file():
        return None
    with parsing(checked_file(path, folder, math.inf), f"Write it again: mtl evaluate {folder}"):
        return json.loads(pl.read_parquet_metadata(path)[METADATA])["digests"].get("test")


def _task(name: str, options: Mapping[str, Any]) -> TaskSpec:
    classes = tuple(str(label) for label in options["classes"])
    metrics, quantiles = tuple(options["metrics"]), tuple(options["quantiles"])
    meaning = {"transform": options["transform"], "quantiles": quantiles, "loss": "quantile" if quantiles else None}
    return TaskSpec(name, options["kind"], options["num_classes"], metrics=metrics, classes=classes, **meaning)


def _rows(task: TaskSpec, part: pl.DataFrame, path: Path) -> LabeledPredictions:
    """Return the rows of a task. Raises InputError for labels and classes that the task does not have."""
    tensors, classes = dict[str, Tensor](), max(2, task.num_classes)
    for name in SCHEMA:
        if not part[name].null_count():
            values = part[name].list.to_array(classes) if name == "scores" else part[name]
            tensors[name] = torch.from_numpy(values.to_numpy().copy())
    for name in ["label"] * (task.kind != "regression") + ["prediction"] * (task.kind == "multiclass"):
        is_class = (tensors[name] >= 0) & (tensors[name] < classes)
        require(bool(is_class.all()), f"{path}: task {task.name!r} has {classes} classes; a {name} is none of them")
        tensors[name] = tensors[name].long()
    return LabeledPredictions(**tensors)

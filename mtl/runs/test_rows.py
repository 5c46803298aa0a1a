"""What the numbers of a test come from: its labels by task, and the epoch that was tested."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtl.files.formatting import number
from mtl.files.tables import Table
from mtl.loggers.base import MAX_LISTED_TASKS
from mtl.training.labeled_predictions import EMPTY, LabeledPredictions
from mtl.types import TaskSpec


def count_labels(tasks: Sequence[TaskSpec], rows: Mapping[str, LabeledPredictions]) -> dict[str, dict[str, int]]:
    """Return the number of labels of each task, and of positive ones of each binary task, from its labelled test rows.

    Tasks of kind span have no labels that could be counted.
    """
    labels = {task: rows.get(task.name, EMPTY).label for task in tasks if task.kind != "span"}
    positives = {task.name: int(label.sum()) for task, label in labels.items() if task.kind == "binary"}
    return {"test_labels": {task.name: len(label) for task, label in labels.items()}, "test_positives": positives}


def labels_by_task(data: Mapping[str, Any]) -> Table | str:
    """Return a table of the labels in the test rows; a sentence if there are over ``MAX_LISTED_TASKS`` tasks.

    ``data``: that entry of results.json. Runs of an earlier version, which lack the positives, have "".
    """
    labels, positives = data.get("test_labels", {}), data.get("test_positives")
    rows = data.get("rows", {}).get("test")
    if positives is None or not labels or rows is None:
        return ""
    if len(labels) > MAX_LISTED_TASKS:
        counts = {"labels": labels.values(), **({"positives": positives.values()} if positives else {})}
        ends = {name: f"from {min(values):,} to {max(values):,}" for name, values in counts.items()}
        parts = [f"{name}: median {statistics.median(counts[name]):,.0f}, {text}" for name, text in ends.items()]
        without = sum(not count for count in positives.values())
        parts += [f"{without} of {len(positives)} binary tasks have no positive"] if without else []
        return f"In the test rows, by task: {'; '.join(parts)}."
    table = []
    for task, count in labels.items():
        missing = (rows[task] if isinstance(rows, Mapping) else rows) - count
        share = f" ({positives[task] / count:.1%})" if count and task in positives else ""
        table.append([task, f"{count:,}", f"{missing:,}", f"{positives[task]:,}{share}" if task in positives else ""])
    return Table(["in the test rows", "labels", "missing", "positives"], table)


def describe_tested_epoch(record: Mapping[str, Any]) -> str:
    """Return which epoch was tested, and how it was chosen; "" if ``record``, of results.json, does not say."""
    epoch, epochs = record.get("tested_epoch"), record.get("epochs")
    if epoch is None:
        return ""
    if not epochs:  # of mtl evaluate
        return f"Tested: the weights of epoch {epoch}."
    tested = f"Tested: epoch {epoch} of 0 to {max(int(epochs) - 1, epoch)}"
    if Path(record["checkpoint"]).name != "best.ckpt":
        return f"{tested}, the last weights."
    best = "" if record.get("best") is None else f", {number(record['best'])}"
    return f"{tested}, the best by {record['monitor']} on the validation rows{best}."


MEASURED = {  # entries of results.json, of which each has numbers by task
    "calibration": ("Calibration", "Before and after the map of the probabilities, fitted to the validation rows."),
    "thresholds": ("Decisions by a threshold", "The validation rows chose it; predicted: the share of rows above it."),
    "intervals": ("Intervals", "coverage: the share of the labels within them; width: their mean, in units."),
}


def measured_by_task(record: Mapping[str, Any]) -> list[Table]:
    """Return a table of each of ``MEASURED`` that ``record``, of results.json, has."""
    tables = []
    for entry, (title, note) in MEASURED.items():
        by_task = record.get(entry) or {}
        rows = [[task, *(number(x, 4) for x in sizes.values())] for task, sizes in by_task.items()][:MAX_LISTED_TASKS]
        more = len(by_task) - len(rows)
        notes = [note, *[f"{more} more tasks are in results.json."] * bool(more)]
        if rows:
            tables.append(Table(["task", *next(iter(by_task.values()))], rows, f"{title}, on the test rows", notes))
    return tables

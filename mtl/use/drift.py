"""Compare rows with the training rows of a network: ``mtl drift RUN FILE``.

The population stability index of two distributions p and q over the same bins is sum (p - q) ln(p / q); from 0.1 it
counts as a small change, from 0.2 or 0.25 as a large one (Siddiqi 2006, Credit Risk Scorecards). Few rows make it large
by chance, so a p-value stands beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import scipy  # imports its parts at their first use

from mtl.checks import InputError, join_names, require
from mtl.files.formatting import number
from mtl.options import StrictModel, valid
from mtl.predictions import bin_counts, class_names, main_column
from mtl.report.statistics import SIGNIFICANCE, holm
from mtl.types import TaskSpec

MIN_FRACTION = 1e-4  # the least share of a bin, so that empty bins have a logarithm
THRESHOLD = 0.2
MIN_ROWS = 200  # rows of which ``mtl predict`` says that they have changed
SCHEMA = {**dict.fromkeys(("column", "kind"), pl.String), **dict.fromkeys(("psi", "p"), pl.Float64)}
SCHEMA |= {name + suffix: pl.Float64 for name in ("unknown", "missing", "mean") for suffix in ("_reference", "")}
DRIFT = {**SCHEMA, "drifted": pl.Boolean}


class Predicted(StrictModel):
    """The predictions of a task in the validation, see ``mtl.predictions.distribution``."""

    edges: list[float]
    counts: list[int]
    mean: float | None


def drift(model: Any, frame: pl.DataFrame, threshold: float, batch_size: int, where: str) -> pl.DataFrame:
    """See ``TrainedModel.drift``."""
    require(len(frame) > 0, f"{where} has no rows to compare with the training rows")
    if model.labelled is None:
        raise InputError("the data of this network are no table, whose columns could be compared")
    predictions = model.predict(frame, batch_size=batch_size, where=where)
    rows = compare_columns(model, frame, where)
    reference = valid(dict[str, Predicted], model.stored.get("predicted", {}), "the predictions in the checkpoint")
    for task in model.spec.tasks:
        values, row = numbers(task, predictions), dict[str, Any](column=task.name, kind="prediction")
        if stored := reference.get(task.name):
            counts = bin_counts(values, stored.edges)
            row |= {"psi": psi(stored.counts, counts), "p": p_value(stored.counts, counts)}
            row["mean_reference"] = stored.mean
        rows.append(row | ({} if task.kind == "multiclass" else {"mean": float(np.mean(values))}))
    return judge(rows, threshold)


def compare_columns(model: Any, frame: pl.DataFrame, where: str) -> list[dict[str, Any]]:
    """Return the comparison of each column as a row of the table. Raises InputError for a checkpoint without them."""
    histograms, rows = model.encoder.histograms_of(frame, where), []
    require(bool(histograms), "this checkpoint does not describe its training rows, as those of tables do")
    for name, (reference, current) in histograms.items():
        row = {"column": name, "kind": "column", "psi": psi(reference.counts, current.counts)}
        row["p"] = p_value(reference.counts, current.counts)
        for value in ("unknown", "missing", "mean"):
            row |= {f"{value}_reference": getattr(reference, value), value: getattr(current, value)}
        rows.append(row)
    return rows


def judge(rows: Sequence[dict[str, Any]], threshold: float = THRESHOLD) -> pl.DataFrame:
    """Return the table of drift with p-values corrected by Holm's method, the largest change first."""
    table = pl.DataFrame(rows, SCHEMA)
    tested = table.filter(pl.col("p").is_not_null())
    tested = tested.with_columns(p=pl.Series(holm(tested["p"].to_list()), dtype=pl.Float64))
    table = pl.concat([tested, table.filter(pl.col("p").is_null())])
    drifted = (pl.col("psi") > threshold) & (pl.col("p") < SIGNIFICANCE)
    table = table.with_columns(drifted=drifted.fill_null(False))
    return table.sort("drifted", "psi", descending=True, nulls_last=True, maintain_order=True)


def psi(reference: Sequence[int], current: Sequence[int]) -> float:
    """Return the population stability index of two lists of counts; smaller shares count as ``MIN_FRACTION``."""
    p, q = (np.maximum(np.array(counts) / max(1, sum(counts)), MIN_FRACTION) for counts in (reference, current))
    return float(((p - q) * np.log(p / q)).sum())


def p_value(reference: Sequence[int], current: Sequence[int]) -> float:
    """Return the p-value that two lists of counts are samples of one distribution.

    It is that of the bin that differs most, times the number of bins (Bonferroni). Of a bin, it is the two-sided
    binomial probability of the smaller sample's count, given its share in both samples: unlike a chi-squared test, it
    also holds for bins that are nearly empty, such as that of unknown categories.
    """
    few, many = sorted((np.array(reference), np.array(current)), key=np.sum)
    share, rows = (few + many) / max(1, few.sum() + many.sum()), few.sum()
    tail = np.minimum(scipy.stats.binom.cdf(few, rows, share), scipy.stats.binom.sf(few - 1, rows, share))
    return float(min(1.0, 2 * tail.min() * np.count_nonzero(share)))


def numbers(task: TaskSpec, predictions: pl.DataFrame) -> Any:
    """Return a number for each row ``[N]``: a value, the probability of yes, or the number of the class."""
    if task.kind == "binary":
        return predictions[f"{task.name}_probability"].to_numpy()
    values = predictions[main_column(task)]
    return values.to_numpy() if task.kind == "regression" else np.array([*map(class_names(task).index, values)])


def format_drift(table: pl.DataFrame) -> pl.DataFrame:
    """Return the table as it is shown: a line for each column, with both values of a number in one cell."""
    lines = []
    for row in table.iter_rows(named=True):
        of_task = "the predictions of " if row["kind"] == "prediction" else ""
        line = {"column": of_task + row["column"], "psi": row["psi"], "p": row["p"]}
        for name in ("unknown", "missing", "mean"):
            reference, current = (number(value, 3) for value in (row[f"{name}_reference"], row[name]))
            line[name] = "" if reference == current == "-" else f"{reference} → {current}"
        lines.append(line | {"drifted": "yes" if row["drifted"] else ""})
    return pl.DataFrame(lines, infer_schema_length=None)


def describe_drift(table: pl.DataFrame, rows: int) -> str:
    """Say in one sentence what has changed."""
    names = format_drift(table.filter("drifted")).get_column("column", default=pl.Series([], dtype=pl.String))
    if not len(names):
        return f"No column and no prediction of these {rows:,} rows has changed by more than the threshold and chance."
    return f"Changed since the training: {join_names(names)}."

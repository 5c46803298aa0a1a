"""Compute delta-m, the mean relative gain of a multi-task network over single-task ones (Maninis et al. 2019)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from mtl.report.statistics import Value, defined, summarise

DELTA = "delta_m"  # column of the table of runs, in percent
TITLE = "delta-m, %"
NOTE = (
    "delta-m: the mean over tasks of the gain in the main metric relative to single_task, in % (Maninis et al. 2019), "
    "by runs of the same seed where there are any; undefined if a value of single_task is 0 or missing."
)


def gain(value: Value, single: Value, higher: bool) -> float:
    """Return by how much ``value`` is better than ``single``, in percent of it; NaN if undefined."""
    if len(defined((value, single))) < 2 or not single or value is None:
        return math.nan
    return 100 * (1 if higher else -1) * (value - single) / abs(single)


def delta_m(values: Sequence[Value], singles: Sequence[Value], higher: Sequence[bool]) -> float:
    """Return the mean over tasks of ``gain``, equation 3 of Maninis et al. 2019; NaN if undefined for any task."""
    gains = [gain(*task) for task in zip(values, singles, higher, strict=True)]
    return sum(gains) / len(gains) if gains else math.nan


def with_delta(
    table: pl.DataFrame,
    data: Sequence[str],
    single: Sequence[bool],
    main: Mapping[str, str],
    higher: Mapping[str, bool],
) -> pl.DataFrame:
    """Add the column ``delta_m`` if there is a finished single-task run; null for those runs and for other data.

    ``data``, ``single``: of each row, the name of its data and whether its network is single_task. Of several settings
    of single_task, the first one is compared with.
    """
    columns = {f"test {task}/{metric}": higher[metric] for task, metric in main.items() if metric in higher}
    columns = {name: up for name, up in columns.items() if name in table.columns}
    rows = [
        row | {"data": name, "single": alone}
        for row, name, alone in zip(table.to_dicts(), data, single, strict=True)
        if row["state"] == "finished"
    ]
    bases: dict[str, list[dict[str, Any]]] = {row["data"]: [] for row in rows}
    for row in rows:
        theirs = bases[row["data"]]
        if row["single"] and (not theirs or row["setting"] == theirs[0]["setting"]):
            theirs.append(row)
    found = {}
    for row in rows:
        known = {name: up for name, up in columns.items() if row[name] is not None}
        if row["single"] or not bases[row["data"]] or not known:
            continue
        same = [base for base in bases[row["data"]] if base["seed"] == row["seed"] is not None] or bases[row["data"]]
        singles = [summarise([base[name] for base in same]).mean for name in known]
        found[row["run"]] = delta_m([row[name] for name in known], singles, list(known.values()))
    if not found:
        return table
    return table.with_columns(pl.Series(DELTA, [found.get(run) for run in table["run"]], pl.Float64))

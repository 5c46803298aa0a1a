"""Compute delta-m, the mean relative gain of a multi-task network over single-task ones (Maninis et al. 2019)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

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
    done = table.with_columns(pl.Series("data", data), pl.Series("single", single)).filter(state="finished")
    found: dict[str, float] = {}
    for rows in done.partition_by("data"):
        alone = rows.filter("single")
        bases = alone.filter(pl.col("setting") == pl.first("setting"))
        for row in rows.filter(~pl.col("single")).iter_rows(named=True) if len(bases) else ():
            known = {name: up for name, up in columns.items() if row[name] is not None}
            same = bases.filter(pl.col("seed") == pl.lit(row["seed"]))
            singles = [summarise((same if len(same) else bases)[name].to_list()).mean for name in known]
            if known:
                found[row["run"]] = delta_m([row[name] for name in known], singles, list(known.values()))
    if not found:
        return table
    return table.with_columns(pl.Series(DELTA, [found.get(run) for run in table["run"]], pl.Float64))

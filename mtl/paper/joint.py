"""Tables of columns of several groups, such as the tasks of GLUE with their averages."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from mtl.files.formatting import number
from mtl.files.tables import Table
from mtl.paper.definition import Joint, Part
from mtl.report.comparison import Published, compare_settings
from mtl.report.page import Section
from mtl.report.runs import FINISHED, Runs
from mtl.report.statistics import SEEDS, Value

Row = dict[str, Value]  # by column, and by mean


def joint_runs(joint: Joint, groups: Mapping[str, Runs], methods: Sequence[Part]) -> Runs | None:
    """Return a table of runs with a row for each method and seed that has a value; None if none has one."""
    rows: list[dict[str, Any]] = []
    for method in (method for method in methods if method.key in joint.methods):
        values_by_column = {
            name: groups[group].values(method.name, column) if group in groups else {}
            for name, (group, column) in joint.columns.items()
        }
        for key in dict.fromkeys(key for values in values_by_column.values() for key in values):
            row = {"run": "", "state": FINISHED, "reason": None, "setting": method.name}
            row |= dict(zip(SEEDS, key, strict=True))
            rows.append(row | _with_means(joint, {name: values.get(key) for name, values in values_by_column.items()}))
    if not rows:
        return None
    table = pl.DataFrame(rows, infer_schema_length=None)
    table = table.with_columns(pl.col(*joint.columns, *joint.means).cast(pl.Float64))
    present = {name: source for name, source in joint.columns.items() if source[0] in groups}
    directions = {name: groups[group].is_higher_better(column) for name, (group, column) in present.items()}
    higher = {name: value for name, value in directions.items() if value is not None}
    higher |= {name: higher[columns[0]] for name, columns in joint.means.items() if columns[0] in higher}
    return Runs(table, "gate", {}, higher)


def section_of_joint(joint: Joint, runs: Runs, methods: Sequence[Part], theirs: Published) -> Section:
    """Return the section on a joint table; ``theirs``: the published (mean, sem) by the method's key and the column."""
    columns, have = [*joint.columns, *joint.means], set(runs.table["setting"])
    published = {method.name: theirs[method.key] for method in methods if method.key in theirs and method.name in have}
    comparison = compare_settings(runs, columns=columns)
    if not joint.best:
        return Section(joint.name, comparison=comparison, tables=[comparison.table(published)])
    rows = []
    for name in dict.fromkeys(runs.table["setting"]):
        best = _with_means(joint, {column: _best(runs, name, column) for column in joint.columns})
        rows.append([name, *(number(best[column], 4) for column in columns)])
        if name in published:
            rows.append([f"{name}, published", *(number(published[name].get(c, (None,))[0], 4) for c in columns)])
    best_runs = Table(["gate", *columns], rows, "The best run of each column")
    return Section(joint.name, comparison=comparison, tables=[comparison.table(), best_runs])


def _with_means(joint: Joint, row: Row) -> Row:
    means: Row = {}
    for name, columns in joint.means.items():
        values = [value for key in columns if (value := row[key]) is not None]
        means[name] = statistics.fmean(values) if len(values) == len(columns) else None
    return row | means


def _best(runs: Runs, method: str, column: str) -> Value:
    values = [value for value in runs.values(method, column).values() if value is not None]
    return (max if runs.is_higher_better(column) else min)(values, default=None)

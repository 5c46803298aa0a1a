"""Draw the conflict between tasks: cosines of their gradients over training and by layer, and their affinities.

Matplotlib is imported only to draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from mtl.checks import InputError, first_line
from mtl.files.escaping import escape_mathtext
from mtl.files.run_files import MAX_STEP_LOG_BYTES, checked_file

COLUMNS = {"step": pl.Int64, "quantity": pl.String, "layer": pl.String, "task": pl.String, "other": pl.String}
MAX_LINES = 16  # pairs of tasks, or layers, with a line of their own
EARLY = 0.3  # of the steps; chosen among parts of a tenth to the whole, see benchmarks/accuracy/sharing.md


def as_table(rows: Sequence[Any]) -> pl.DataFrame:
    """Return the measurements as a table with the columns step, quantity, layer, task, other, value."""
    return pl.DataFrame(rows, COLUMNS | {"value": pl.Float64}, orient="row")


def read_table(file: Path) -> pl.DataFrame:
    """Return such a table from the file that a run wrote. Raises InputError."""
    types = COLUMNS | {"value": pl.Float64}
    try:
        return pl.read_csv(checked_file(file, file.parent, MAX_STEP_LOG_BYTES), schema_overrides=types).select(*types)
    except pl.exceptions.PolarsError as error:
        raise InputError(f"{file} is damaged: {first_line(error)}") from None


def matrix(table: pl.DataFrame, quantity: str, tasks: Sequence[str]) -> np.ndarray:
    """Return the means over the training ``[T, T]`` of a quantity of all layers; NaN where it is never defined."""
    values = table.filter(pl.col("quantity") == quantity, pl.col("layer") == "all", pl.col("value").is_finite())
    rows = values.group_by("task", "other").agg(pl.mean("value")).rows()
    means = {(task, other): value for task, other, value in rows}
    return np.array([[means.get((task, other), np.nan) for other in tasks] for task in tasks], float)


def affinities(tables: Sequence[pl.DataFrame], tasks: Sequence[str]) -> np.ndarray:
    """Return TAG's affinities ``[T, T]`` of the row's task to the column's in percent; NaN without any.

    They are means over the ``EARLY`` part of each run. Later, what is left of the gradients is noise, and the steps of
    related tasks, which share features, hurt each other most.
    """
    early = pl.col("step") <= pl.max_horizontal(EARLY * pl.max("step"), pl.min("step"))
    return 100 * matrix(pl.concat([as_table([]), *(table.filter(early) for table in tables)]), "affinity", tasks)


def draw(tables: Sequence[pl.DataFrame]) -> Any:
    """Return matplotlib's figure of norms and cosines over the training, mean cosines by layer, and ``affinities``.

    ``tables``: of runs with the same tasks. Lines are means over the runs; affinities are from row to column.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7.5), layout="constrained")
    [[norms, cosines], [layers, affinity]] = figure.subplots(2, 2)
    measured = pl.concat(tables).filter(pl.col("value").is_finite())
    measured = measured.group_by(*COLUMNS, maintain_order=True).agg(pl.mean("value"))
    tasks = tables[0]["task"].unique(maintain_order=True).to_list()
    names = [escape_mathtext(task) for task in tasks]
    whole = measured.filter(layer="all")
    _lines(norms, whole.filter(quantity="norm").with_columns(name=pl.col("task")), "norm of the gradient")
    pairs = whole.filter(quantity="cosine").with_columns(name=pl.format("{}, {}", "task", "other"))
    _lines(cosines, pairs, "cosine of two tasks")
    by_layer = measured.filter(pl.col("quantity") == "cosine", pl.col("layer") != "all")
    means = by_layer.group_by("step", "layer", maintain_order=True).agg(pl.mean("value")).rename({"layer": "name"})
    _lines(layers, means, "mean cosine, by layer")
    values = affinities(tables, tasks)
    np.fill_diagonal(values, np.nan)  # of a task to itself, which says nothing about sharing and hides the others
    largest = np.nanmax(np.abs(values), initial=1e-12)
    image = affinity.imshow(values, cmap="RdBu", vmin=-largest, vmax=largest)
    affinity.set_xticks(range(len(tasks)), names, rotation=90 if len(tasks) > 3 else 0, fontsize=8)
    affinity.set_yticks(range(len(tasks)), names, fontsize=8)
    title = f"affinity: fall of the column's loss by a step\nfor the row's task, %, first {EARLY:.0%} of the run"
    affinity.set(title=title)
    for (row, column), value in np.ndenumerate(values if len(tasks) <= 8 else values[:0]):
        ink = "black" if abs(value) < 0.6 * largest else "white"
        affinity.text(column, row, f"{value:.2g}" if np.isfinite(value) else "", ha="center", va="center", color=ink)
    figure.colorbar(image, ax=affinity)
    return figure


def _lines(axes: Any, points: pl.DataFrame, title: str) -> None:
    from mtl.analysis.figures import look

    groups = list(points.group_by("name", maintain_order=True))
    for index, ((name,), line) in enumerate(groups[:MAX_LINES]):
        style = {"marker": ".", "markersize": 3 if len(line) > 1 else 9, "linewidth": 1, **look(index)}
        axes.plot(line["step"], line["value"], label=escape_mathtext(str(name)), **style)
    more = f", first {MAX_LINES} of {len(groups)}" if len(groups) > MAX_LINES else ""
    axes.set(title=f"{title}{more}", xlabel="training step")
    axes.grid(alpha=0.25)
    if groups:
        axes.legend(fontsize=8 if len(groups) <= 6 else 6)

"""Make a section of a page from runs: their comparison, what they cost, and their curves and weights over training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from mtl.report.compare import compare
from mtl.report.curves import BAND, curves_of, draw
from mtl.report.grid import Published
from mtl.report.page import Listing, Picture, Section, picture, picture_of
from mtl.report.runs import FINISHED, Runs
from mtl.report.statistics import summarise
from mtl.report.tables import missing

MOST_PICTURES = 24  # of weights over training, so that the page stays small
_WEIGHTS = "weights_over_training*.png"
_SMALL = 0.001  # relative standard error of a cost that is not shown
_COSTS = {  # columns of the table of runs
    "test experts_per_sample": "experts per sample",
    "test flops_selected": "FLOPs per sample",
    "test flops_dense": "FLOPs per sample, all experts",
    "parameters": "parameters",
    "epochs": "epochs",
    "seconds_per_epoch": "seconds per epoch",
}


def section_of(
    runs: Runs,
    title: str,
    text: str = "",
    *,
    columns: Sequence[str] = (),
    also: Sequence[str] = (),
    published: Sequence[Published] = (),
    curve: str | None = "val/loss",
    unit: str = "seeds",
) -> Section:
    """Return the section on ``runs``: comparison, costs, ``curve`` over training and the experts' weights.

    ``columns``, ``also``, ``unit``: as in ``compare``. ``curve``: a logged metric, None for no picture.
    """
    comparison = compare(runs, also, columns, unit)
    costs = costs_of(runs)
    figures = [*(_curves(runs, curve) if curve else []), *_weights(runs)]
    lacking = {
        f"Published, but no run has it: {column}."
        for row in published
        for column in row.values
        if column not in [quantity.column for quantity in comparison.quantities]
    }
    notes = [*missing(runs), *sorted(lacking)]
    return Section(title, text, comparison, published, [costs] if costs.rows else [], figures, notes)


def costs_of(runs: Runs) -> Listing:
    """Return the means over finished runs of what each setting costs; without rows if no run says any of it."""
    done = runs.table.filter(pl.col("state") == FINISHED)
    settings = runs.table["setting"].unique(maintain_order=True).to_list()
    columns = [name for name in _COSTS if name in done.columns and done[name].count()]
    if not columns or done.is_empty():
        return Listing("Costs", [], [])
    header = [runs.heading, *(_COSTS[name] for name in columns)]
    rows = [
        [setting, *(_cost(done.filter(setting=setting)[name].to_list()) for name in columns)] for setting in settings
    ]
    note = (
        f"Means over finished runs, with standard errors above {_SMALL:.1%}. FLOPs: of the test, with the experts used."
    )
    return Listing("Costs", header, rows, note)


def _cost(values: Sequence[float | None]) -> str:
    """Return mean and standard error of what runs cost: whole from 1000 on, else with four digits."""
    found = summarise(values)
    if found.mean is None:
        return "-"
    mean = f"{found.mean:,.0f}" if abs(found.mean) >= 1000 else f"{found.mean:.4g}"
    return mean if (found.error or 0.0) <= _SMALL * abs(found.mean) else f"{mean} ± {found.error:,.2g}"


def _curves(runs: Runs, metric: str) -> list[Picture]:
    """Return the picture of ``metric`` over training, none if no run has logged it."""
    curves, _ = curves_of([(Path(row["run"]), row["setting"]) for row in runs.table.to_dicts()], metric)
    if not curves:
        return []
    return [
        picture(draw(curves, runs.heading, metric, BAND), f"{metric} over training, at the steps that all runs have")
    ]


def _weights(runs: Runs) -> list[Picture]:
    """Return the pictures of the experts' weights over training, of the first run of each setting that has them."""
    found: list[Picture] = []
    for group in runs.table.partition_by("setting", maintain_order=True):
        for row in group.to_dicts():
            paths = sorted((Path(row["run"]) / "routing").glob(_WEIGHTS))
            seed = "" if row["seed"] is None else f", seed {row['seed']}"
            found += [picture_of(path, f"{row['setting']}{seed}: {path.stem.replace('_', ' ')}") for path in paths]
            if paths:
                break
    return found[:MOST_PICTURES]

"""Make a section of a page from runs: their comparison, what they cost, and their curves and weights over training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from mtl.checks import require
from mtl.report.compare import compare
from mtl.report.curves import BAND, curves_of, draw
from mtl.report.grid import Published, number_text
from mtl.report.page import Listing, Picture, Section, picture, picture_of
from mtl.report.runs import FINISHED, Runs
from mtl.report.statistics import summarise
from mtl.report.tables import missing

MOST_PICTURES = 24  # of weights over training, so that the page stays small
_WEIGHTS = "weights_over_training*.png"
_SMALL = 0.001  # relative standard error of a cost that is not shown
FLOPS, TRAINING = "test flops_selected", "training flops_selected"
_COSTS = {  # columns of the table of runs
    "test experts_per_sample": "experts per sample",
    FLOPS: "FLOPs per sample",
    "test flops_dense": "FLOPs per sample, all experts",
    TRAINING: "FLOPs per training sample",
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
    baseline: str | None = None,
    curve: str | None = "val/loss",
    unit: str = "seeds",
) -> Section:
    """Return the section on ``runs``: comparison, costs, ``curve`` over training and the experts' weights.

    ``columns``, ``also``, ``unit``: as in ``compare``; ``baseline``: as in ``costs_of``. ``curve``: a logged metric,
    None for no picture.
    """
    comparison = compare(runs, also, columns, unit)
    costs = costs_of(runs, baseline)
    figures = [*(_curves(runs, curve) if curve else []), *_weights(runs)]
    lacking = {
        f"Published, but no run has it: {column}."
        for row in published
        for column in row.values
        if column not in [quantity.column for quantity in comparison.quantities]
    }
    notes = [*missing(runs), *sorted(lacking)]
    return Section(title, text, comparison, published, [costs] if costs.rows else [], figures, notes)


def costs_of(runs: Runs, baseline: str | None = None) -> Listing:
    """Return the means over finished runs of what each setting costs; without rows if no run says any of it.

    ``baseline``: the setting by whose FLOPs those of the others are divided, InputError if it has none.
    """
    done = runs.table.filter(pl.col("state") == FINISHED)
    settings = runs.table["setting"].unique(maintain_order=True).to_list()
    columns = [name for name in _COSTS if name in done.columns and done[name].count()]
    if done.is_empty():
        columns = []
    header = [runs.heading, *(_COSTS[name] for name in columns)]
    groups = [done.filter(setting=setting) for setting in settings]
    rows = [
        [setting, *(_cost(group[name].to_list()) for name in columns)]
        for setting, group in zip(settings, groups, strict=True)
    ]
    note = f"Means over finished runs, with standard errors above {_SMALL:.1%}. FLOPs: of the test, with what it used."
    if baseline is not None:
        require(baseline in settings, f"baseline={baseline}: must be one of the settings {', '.join(settings)}")
        require({FLOPS, "epochs"} <= set(columns), f"baseline={baseline}: no run has FLOPs and epochs")
        work = TRAINING if TRAINING in columns else FLOPS
        totals = [_flops(group, work) for group in groups]
        base = totals[settings.index(baseline)]
        require(base is not None, f"baseline={baseline}: no run of it has FLOPs and epochs")
        header += [f"FLOPs per sample / {baseline}", f"FLOPs of training / {baseline}"]
        for row, own in zip(rows, totals, strict=True):
            row += [f"{a / b:.3g}" for a, b in zip(own, base, strict=True)] if own and base else ["-", "-"]
        note += (
            f" FLOPs of training: {_COSTS[work]} x epochs, which assumes that an epoch has the same rows everywhere."
        )
    return Listing("Costs", header, rows if columns else [], [note])


def _flops(group: pl.DataFrame, work: str) -> tuple[float, float] | None:
    """Return the means of the FLOPs per sample, and of the product of the column ``work`` with the epochs."""
    known = group.select(FLOPS, pl.col(work).alias("work"), "epochs").drop_nulls().drop_nans().rows()
    per_sample, times_epochs = summarise([a for a, _, _ in known]).mean, summarise([a * b for _, a, b in known]).mean
    return (per_sample, times_epochs) if per_sample and times_epochs else None


def _cost(values: Sequence[float | None]) -> str:
    """Return mean and standard error of what runs cost: whole from 1000 on, else with four digits."""
    found = summarise(values)
    if found.mean is None:
        return "-"
    error = found.error or 0.0
    return number_text(found.mean, 4) + (f" ± {number_text(error, 2)}" if error > _SMALL * abs(found.mean) else "")


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
            run = f"{row['setting']} ({Path(row['run']).name})"
            found += [picture_of(path, f"{run}: {path.stem.replace('_', ' ')}") for path in paths]
            if paths:
                break
    return found[:MOST_PICTURES]

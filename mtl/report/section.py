"""Make a section of a page from runs: comparison, costs, curves and experts' weights over training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import polars as pl

from mtl.checks import InputError, require
from mtl.files.formatting import number, with_error
from mtl.files.tables import Table
from mtl.loggers.base import MAX_LISTED_TASKS
from mtl.report.comparison import Published, compare_settings
from mtl.report.curves import curves_of, draw
from mtl.report.page import Picture, Section, picture, picture_of
from mtl.report.runs import ALL, FINISHED, Runs, config
from mtl.report.statistics import summarise
from mtl.runs.predictions_file import read_digest
from mtl.runs.results import MOST_TASKS
from mtl.table_models import MAX_ROWS
from mtl.training.measurements import NETWORK, Key

CURVE = "val/loss"
MAX_PICTURES = 24  # pictures of experts; a limit keeps the page small
_PICTURES = ("expert_share*.png", "weights_over_training*.png", "connection*.png")
_MIN_SEM = 0.001  # a relative standard error of a cost below this is not shown
_MAX_NAMED = 10  # unfinished runs that are named; summary.csv has all
_MAX_REASON_CHARS = 300  # characters
DIFFERENT_ROWS = (
    "These runs were tested on different rows, since their files or split options differ: differences between them are "
    "not those of their settings alone."
)
FLOPS, TRAINING, PUBLISHED = "test/flops_selected", "training/flops_selected", "test/multiply_adds"
COSTS = {  # columns of the table of runs
    "test/experts_per_sample": "experts per sample",
    FLOPS: "FLOPs per sample",
    "test/flops_dense": "FLOPs per sample, all experts",
    PUBLISHED: "multiply-adds per sample",
    TRAINING: "FLOPs per training sample",
    "parameters": "parameters",
    "epochs": "epochs",
    "seconds_per_epoch": "seconds per epoch",
}
SHOWN = ("test/experts_per_sample", FLOPS, "parameters", "seconds_per_epoch")  # the others are in the CSV


def section_of(
    runs: Runs,
    title: str,
    *,
    columns: Sequence[str] = (),
    also: Sequence[str] = (),
    published: Published | None = None,
    baseline: str | None = None,
    unit: str = "seeds",
    curves: Mapping[str, int] | None = None,
) -> Section:
    """Return the section on ``runs``: the comparison, costs and, with ``curves``, the pictures of ``pictures_of``.

    ``columns``, ``also``, ``unit``: as in ``compare_settings``; ``published``: as in ``ComparisonTable.table``;
    ``baseline``: the setting with which the others are compared, also in their FLOPs, as in ``costs_of``.
    """
    comparison, published = compare_settings(runs, also, columns, unit, baseline), published or {}
    compared = {quantity.column for quantity in comparison.quantities}
    lacking = {column for values in published.values() for column in values if column not in compared}
    notes = [*missing(runs), *different_rows(runs)]
    notes += [f"Published, but no run has it: {column}." for column in sorted(lacking)]
    figures, lacking_curves = ([], []) if curves is None else pictures_of(runs, curves)
    tables, costs = [comparison.table(published)], costs_of(runs, baseline)
    notes += lacking_curves
    return Section(title, comparison=comparison, tables=tables, notes=notes, figures=figures, costs=costs)


def baselines_of(runs: Runs) -> Table | None:
    """Return the main metrics of the other models that the networks were tested beside; None if there are none."""
    done = runs.table.filter(state=FINISHED)
    models = dict.fromkeys(key.model for key in map(Key.of, done.columns) if key.split == "test")
    models.pop(NETWORK, None)
    means_of: dict[str, list[list[Any]]] = {}  # by metric, of each task the means of the models
    rows = list[list[str]]()
    for task, metric in runs.main.items() if models else ():
        names = [str(Key("test", task, metric, model)) for model in models]
        means = [summarise(done[name].to_list() if name in done.columns else []).mean for name in names]
        rows.append([f"{task} {metric}", *(number(mean, 4) for mean in means)])
        means_of.setdefault(metric, []).append(means)
    if len(rows) > MAX_LISTED_TASKS:
        rows = []
        for metric, of_tasks in means_of.items():
            if complete := [means for means in of_tasks if None not in means]:
                values = [number(fmean(means), 4) for means in zip(*complete, strict=True)]
                rows.append([f"mean {metric} of {len(complete)} of {len(of_tasks)} tasks", *values])
    note = (
        f"Means over the runs. Models of a table learn from at most {MAX_ROWS:,} training rows. The other tables "
        "compare networks, also of runs that predict with a blend."
    )
    return Table(["", *models], rows, "Other models on the same test rows", [note]) if rows else None


def missing(runs: Runs) -> list[str]:
    """Return a line for each unfinished run: its folder, its state, and its last message."""
    rows = runs.table.filter(pl.col("state") != FINISHED).select("run", "state", "reason").rows()
    lines = [f"{Path(run).name} {state}: {reason or 'no message'}" for run, state, reason in rows]
    if not lines:
        return []
    more = [f"... and {len(lines) - _MAX_NAMED} more, in summary.csv"] if len(lines) > _MAX_NAMED else []
    head = f"{len(lines)} of {len(runs.table)} runs have not finished:"
    return [head, *(line[:_MAX_REASON_CHARS] for line in lines[:_MAX_NAMED]), *more]


def different_rows(runs: Runs) -> list[str]:
    """Return a sentence if runs with one ``data.seed`` were tested on different rows."""
    finished = runs.table.filter(pl.col("state") == FINISHED)
    seeds = finished["data_seed"].to_list() if "data_seed" in finished.columns else [None] * len(finished)
    digests: dict[Any, set[str]] = {}
    for run, seed in zip(finished["run"], seeds, strict=True):
        with suppress(InputError):  # of a damaged file
            digests.setdefault(seed, set()).update(filter(None, [read_digest(Path(run))]))
    return [DIFFERENT_ROWS] if any(len(of_seed) > 1 for of_seed in digests.values()) else []


def costs_of(runs: Runs, baseline: str | None = None) -> Table | None:
    """Return the costs of each setting, means over finished runs; None if no run records any.

    ``baseline``: FLOPs are divided by the FLOPs of this setting; InputError if it has none.
    """
    done = runs.table.filter(state=FINISHED)
    columns = [name for name in COSTS if name in done.columns and done[name].count()]
    groups = {name: done.filter(setting=name) for name in runs.table["setting"].unique(maintain_order=True)}
    visible = [name for name in SHOWN if name in columns]
    header = [runs.heading, *(COSTS[name] for name in visible)]
    rows = [[name, *(_cost(group[column].to_list()) for column in visible)] for name, group in groups.items()]
    means = f"Means over finished runs, with standard errors above {_MIN_SEM:.1%}. " if len(runs.table) > 1 else ""
    note = f"{means}FLOPs: of the test, with what it used."
    if baseline is not None:
        require(baseline in groups, f"baseline={baseline}: must be one of the settings {', '.join(groups)}")
        require({FLOPS, "epochs"} <= set(columns), f"baseline={baseline}: no run has FLOPs and epochs")
        work = TRAINING if TRAINING in columns else FLOPS
        totals = {name: _flops(group, work) for name, group in groups.items()}
        require(all(totals[baseline]), f"baseline={baseline}: no run of it has FLOPs and epochs")
        header += [f"FLOPs per sample / {baseline}", f"FLOPs of training / {baseline}"]
        for row in rows:
            pairs = zip(totals[row[0]], totals[baseline], strict=True)
            row += [number(flops / base, 3) for flops, base in pairs] if all(totals[row[0]]) else ["-", "-"]
        note += f" FLOPs of training: {COSTS[work]} x epochs, which assumes that an epoch has the same rows everywhere."
    if len(runs.table) == 1:
        rows = [[Path(runs.table["run"][0]).name if row[0] == ALL else row[0], *row[1:]] for row in rows]
    return Table(header, rows, notes=[note]) if visible else None


def _flops(group: pl.DataFrame, work: str) -> tuple[Any, ...]:
    """Return the mean FLOPs per sample and the mean product of the column ``work`` with the epochs, or Nones."""
    measured = group.select(FLOPS, (pl.col(work) * pl.col("epochs")).alias("training")).drop_nulls().drop_nans()
    return measured.mean().row(0)


def _cost(values: Sequence[float | None]) -> str:
    """Return mean and standard error of the runs' costs: whole numbers from 1000 on, else four digits."""
    summary = summarise(values)
    is_large = summary.sem is not None and summary.sem > _MIN_SEM * abs(summary.mean or 0.0)
    return with_error(summary.mean, summary.sem if is_large else None)


def pictures_of(
    runs: Runs, curves: Mapping[str, int], linked: Mapping[str, Sequence[str]] | None = None
) -> tuple[list[Picture], list[str]]:
    """Return pictures of curves over training and of the experts' weights, and notes on the ``curves`` that lack.

    The curves are those of the validation loss, the monitored metrics, the main metrics of a few tasks, and ``curves``:
    further metrics, each smoothed over so many steps. ``linked``: for the name, without suffix, of each picture file,
    the settings whose picture Markdown links too.
    """
    pairs = runs.table.select("run", "setting").rows()
    monitored = [name for run, _ in pairs if isinstance(name := config(Path(run)).get("monitor", CURVE), str)]
    drawn, notes = [], []
    tasks = [f"val/{task}/{main}" for task, main in runs.main.items()] if 1 < len(runs.main) <= MOST_TASKS else []
    for metric, window in {**dict.fromkeys([*monitored, CURVE, *tasks], 1), **curves}.items():
        means, missing = curves_of(pairs, metric, window)
        notes += [f"No curve: {missing[0]}."] if metric in curves and len(missing) == len(pairs) else []
        if not means.is_empty():
            notes_on_steps = ["at the steps that all runs have"] if len(pairs) > 1 else []
            notes_on_steps += [f"mean of the latest {window} steps"] if window > 1 else []
            alt = ", ".join([f"{metric} over training", *notes_on_steps])
            caption = ", ".join(notes_on_steps).capitalize()
            drawn.append(picture(draw(means, runs.heading, metric, window), caption, alt))
    return [*drawn, *pictures_of_experts(runs, linked or {})], notes


def pictures_of_experts(runs: Runs, linked: Mapping[str, Sequence[str]]) -> list[Picture]:
    """Return pictures of the experts that tasks use, from the first run of each setting that has any."""
    by_setting: dict[str, list[Picture]] = {}
    for run, setting in runs.table.select("run", "setting").rows():
        if not by_setting.get(setting):
            folder, beside = Path(run), {stem for stem, settings in linked.items() if setting in settings}
            title = "" if setting == ALL else f"{setting} ({folder.name})"
            paths = [path for pattern in _PICTURES for path in sorted((folder / "routing").glob(pattern))]
            names = {path: f"{title or folder.name}: {path.stem.replace('_', ' ')}" for path in paths}
            by_setting[setting] = [
                picture_of(path, folder, title, path.stem in beside, alt) for path, alt in names.items()
            ]
    return [picture for pictures in by_setting.values() for picture in pictures][:MAX_PICTURES]

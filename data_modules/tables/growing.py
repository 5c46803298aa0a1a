"""Go on with the encoding of an earlier run: known ids stay, and new categories get new ids."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import polars as pl

from mtl.checks import join_names, require
from mtl.types import TaskSpec

from .columns import MISSING, UNKNOWN, CategoryEncoder, as_text
from .encoder import TableEncoder
from .histograms import Histogram, merge, of_training
from .inferring import ROWS_PER_WORD, Blocks
from .kinds import ColumnOptions
from .labels import TargetOptions
from .lists import listed
from .statistics import Counts

ANEW = "with data.keep_encoding=false, the encoding is learnt anew"


def grown(encoder: TableEncoder, blocks: Blocks, min_count: int) -> tuple[TableEncoder, dict[str, int]]:
    """Return ``encoder`` with the categories of further rows that it does not know, and their number by column.

    A new category needs ``min_count`` rows. A list and its target keep one vocabulary. Scales, dates and formats stay.
    Histograms are those of the further rows.
    """
    counts = {name: Counts() for name in (*encoder.categorical, *encoder.elements)}
    histograms, rows = dict[str, list[Histogram]](), 0  # of each block
    for raw, where in blocks(encoder.columns):
        frame = encoder.prepared(raw, where, encoder.unreported())
        for name, (_, now) in encoder.histograms_in(frame, where).items():
            histograms.setdefault(name, []).append(now)
        rows += len(frame)
        for name in encoder.categorical:
            counts[name].add(as_text(frame[name]).fill_null(MISSING))
        for name, each in encoder.elements.items():
            elements = listed(frame[name], each.separator, encoder.empty)
            counts[name].add(elements.list.unique().drop_nulls().explode(empty_as_null=False))
    alike: dict[str, list[str]] = {}
    for name in counts:
        target = encoder.elements[name].target if name in encoder.elements else None
        alike.setdefault(target or name, []).append(name)
    before = encoder.categorical | {name: each.vocabulary for name, each in encoder.elements.items()}
    after = dict(before)
    merged = {name: merge(blocks) for name, blocks in histograms.items()}
    for names in alike.values():
        known, texts = before[names[0]], names[0] in encoder.elements and encoder.elements[names[0]].separator is None
        needed = max(min_count, ROWS_PER_WORD if texts else 1)
        table = pl.concat([counts[name].table() for name in names]).group_by("value").agg(all=pl.col("count").sum())
        is_new = pl.Series(known.encode(table["value"]).numpy() == UNKNOWN)
        new = table.filter(is_new & (table["all"] >= needed))["value"].sort().to_list()
        after |= dict.fromkeys(names, CategoryEncoder([*known.values, *new], known.added + len(new)))
        # Known categories stay known, however rare they are in these rows
        table = table.with_columns(all=pl.when(is_new).then("all").otherwise(pl.lit(math.inf)))
        for name in names:
            if name in merged and merged[name].categories:
                occurrences = counts[name].table().join(table, on="value")
                missing = merged[name].counts[-1] if name in encoder.elements else 0
                merged[name] = of_training(occurrences, needed, after[name], rows, missing)
    categorical = {name: after[name] for name in encoder.categorical}
    lists = {name: replace(each, vocabulary=after[name]) for name, each in encoder.elements.items()}
    added = {name: each.size - before[name].size for name, each in after.items() if each.size > before[name].size}
    return replace(encoder, categorical=categorical, elements=lists, histograms=merged), added


def check_kept(encoder: TableEncoder, given: ColumnOptions, ignored: Sequence[str]) -> None:
    """Raise InputError if an option reads a column in another way than ``encoder``, whose encoding stays."""
    texts = [name for name, each in encoder.elements.items() if each.separator is None]
    read: dict[str, Collection[str]] = {"categorical": encoder.categorical, "numeric": encoder.numeric}
    read |= {"dates": encoder.dates, "lists": encoder.lists, "texts": texts}
    other = [
        f"{option}={name}" for option, names in read.items() for name in getattr(given, option) if name not in names
    ]
    other += [f"ignore={name}" for name in ignored if name in encoder.columns]
    other += [f"formats.{name}" for name, form in given.formats.items() if encoder.formats.get(name) != form]
    there = "is not as in the run of start_from, whose encoding stays"
    require(not other, f"data: {join_names(other)} {there}; {ANEW}")


def tasks_of(labels: Sequence[TargetOptions], known: Sequence[TaskSpec], blocks: Blocks, where: str) -> list[TaskSpec]:
    """Return the task of each of ``labels``: a ``known`` one with its scale and classes, others learnt from the rows.

    Weights and metrics are those of ``labels``. Raises InputError for a known task of another kind or loss.
    """
    before, found = {task.name: task for task in known}, {}
    new = {label.name: label.collector() for label in labels if label.name not in before}
    for frame, file in blocks([label.column for label in labels if label.name in new]) if new else ():
        for label in labels:
            if label.name in new:
                label.collect(new[label.name], frame, file)
    for label in labels:
        if label.name in new:
            found[label.name] = label.conclude(new[label.name], where)
            continue
        task = before[label.name]
        was = {"kind": task.kind, "loss": task.loss, "transform": task.transform, "after": task.after}
        changed = [f"{name}={getattr(label, name)}" for name, value in was.items() if getattr(label, name) != value]
        there = f"data.tasks.{label.name}: {join_names(changed)} is not as in the run of start_from; {ANEW}"
        require(not changed, there)
        weight = task.weight if label.relative else label.weight
        metrics = tuple(label.metrics) or task.metrics
        found[label.name] = replace(task, weight=weight, metrics=metrics, sampling_rate=label.sampling_rate or 1.0)
    return list(found.values())

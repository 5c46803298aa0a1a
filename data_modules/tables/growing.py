"""Go on with the encoding of an earlier run: known ids stay, and new categories get new ids."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import polars as pl

from mtl.checks import format_value, join_names, require
from mtl.types import TaskSpec

from .cells import MISSING, Remarks, as_text
from .encoder import TableEncoder
from .histograms import Histogram, merge, of_training
from .inferring import ROWS_PER_WORD, Blocks
from .labels import TargetOptions
from .lists import listed
from .options import TableOptions
from .statistics import Counts
from .vocabulary import UNKNOWN, Vocabulary

ANEW = "with data.keep_encoding=false, the encoding is learnt anew"


def grown(encoder: TableEncoder, blocks: Blocks, options: TableOptions) -> tuple[TableEncoder, dict[str, int]]:
    """Return ``encoder`` with the categories of further rows that it does not know, and their number by column.

    A new category needs ``min_count`` rows, and the most frequent ones fill up ``max_size``. A list and its
    target keep one vocabulary. Scales, dates and formats stay, and without ``max_length`` the length of lists does.
    Histograms are those of the further rows.
    """
    counts = {name: Counts() for name in (*encoder.categorical, *encoder.elements)}
    longest = {name: one.length for name, one in encoder.elements.items()}
    histograms, rows = dict[str, list[Histogram]](), 0  # of each block
    for raw, where in blocks(encoder.columns):
        frame = encoder.prepared(raw, where, Remarks(encoder.on_invalid))
        for name, (_, now) in encoder.histograms_in(frame, where).items():
            histograms.setdefault(name, []).append(now)
        rows += len(frame)
        for name in encoder.categorical:
            counts[name].add(as_text(frame[name]).fill_null(MISSING))
        for name, each in encoder.elements.items():
            elements = listed(frame[name], each.separator, encoder.empty)
            counts[name].add(elements.list.unique().explode().drop_nulls())
            length: Any = elements.list.len().max() or 0
            longest[name] = max(longest[name], int(length))
    alike: dict[str, list[str]] = {}
    for name in counts:
        target = encoder.elements[name].target if name in encoder.elements else None
        alike.setdefault(target or name, []).append(name)
    before = encoder.categorical | {name: each.vocabulary for name, each in encoder.elements.items()}
    after = dict(before)
    merged = {name: merge(blocks) for name, blocks in histograms.items()}
    for names in alike.values():
        known, texts = before[names[0]], names[0] in encoder.elements and encoder.elements[names[0]].separator is None
        needed = max(options.vocabulary.min_count, ROWS_PER_WORD if texts else 1)
        table = pl.concat([counts[name].table() for name in names]).group_by("value").agg(all=pl.col("count").sum())
        is_new = pl.Series(known.encode(table["value"]).numpy() == UNKNOWN)
        enough = table.filter(is_new & (table["all"] >= needed)).sort(-pl.col("all").cast(pl.Int64), "value")
        most = options.vocabulary.max_size
        room = len(enough) if most is None else max(0, most - len(known.values))
        new = sorted(enough["value"].head(room).to_list())
        after |= dict.fromkeys(names, Vocabulary([*known.values, *new], known.added + len(new)))
        # Known categories stay known, however rare they are in these rows
        table = table.with_columns(all=pl.when(is_new).then("all").otherwise(pl.lit(math.inf)))
        for name in names:
            if name in merged and merged[name].frequent is not None:
                occurrences = counts[name].table().join(table, on="value")
                missing = merged[name].counts[-1] if name in encoder.elements else 0
                merged[name] = of_training(occurrences, needed, after[name], rows, missing)
    categorical = {name: after[name] for name in encoder.categorical}
    lists = {
        name: replace(one, vocabulary=after[name], length=min(longest[name], options.of(name).max_length or one.length))
        for name, one in encoder.elements.items()
    }
    added = {name: each.size - before[name].size for name, each in after.items() if each.size > before[name].size}
    return replace(encoder, categorical=categorical, elements=lists, histograms=merged), added


def check_kept(encoder: TableEncoder, options: TableOptions, inputs: Collection[str]) -> None:
    """Raise InputError if an option reads a column in another way than ``encoder``, whose encoding stays.

    ``inputs``: the columns that may be inputs, as they are not ignored and hold no labels, weights or splits.
    """
    left_out = [name for name in encoder.columns if name not in inputs]
    role = "is ignored, or holds labels, weights or splits, but is an input of the run of start_from"
    require(not left_out, f"data: {join_names(left_out)} {role}; {ANEW}")
    other = []
    for name, column in options.columns.items():
        stated = {"format": column.format} if column.format is not None else {}
        if column.kind is not None:
            stated |= {option: getattr(column, option) for option in ("kind", "ids", "separator", "target")}
        learnt = encoder.options_of(name) if name in encoder.columns else {"format": column.format}  # of labels
        other += [
            f"columns.{name}.{key}={format_value(value)}" for key, value in stated.items() if value != learnt.get(key)
        ]
    there = "is not as in the run of start_from, whose encoding stays"
    require(not other, f"data: {join_names(other)} {there}; {ANEW}")


def tasks_of(
    labels: Sequence[TargetOptions], earlier: Sequence[TaskSpec], blocks: Blocks, where: str
) -> list[TaskSpec]:
    """Return the task of each of ``labels``, learnt from the rows; an ``earlier`` one keeps its classes and its scale.

    Raises InputError for an option that changes what the outputs of an earlier task mean.
    """
    before = {task.name: task for task in earlier}
    for label in labels:
        if label.name in before:
            check_meaning(label, before[label.name])
    collectors = {label.name: label.collector() for label in labels}
    for frame, file in blocks(list(dict.fromkeys(label.column for label in labels))):
        for label in labels:
            label.collect(collectors[label.name], frame, file)
    return [label.conclude(collectors[label.name], where, before.get(label.name)) for label in labels]


def check_meaning(label: TargetOptions, task: TaskSpec) -> None:
    """Raise InputError if an option of ``label`` contradicts what the outputs of the trained ``task`` mean."""
    options: dict[str, Any] = {name: getattr(label, name) for name in ("kind", "loss", "transform", "after")}
    options["quantiles"] = label.objective.get("quantiles", ())
    other = {name: value for name, value in options.items() if value != getattr(task, name)}
    if label.positive is not None and as_text(pl.Series([label.positive]))[0] not in task.classes[-1:]:
        other["positive"] = label.positive
    scaled = (task.mean, task.std) != (0.0, 1.0)
    if label.standardise is not None and label.standardise != scaled:
        other["standardise"] = label.standardise
    changed = join_names(f"{name}={format_value(value)}" for name, value in other.items())
    require(not other, f"data.tasks.{label.name}: {changed} is not as in the run of start_from; {ANEW}")

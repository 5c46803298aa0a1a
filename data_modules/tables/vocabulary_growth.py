"""Go on with the encoding of an earlier run: known ids stay, and new categories get new ids."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import polars as pl

from mtl.checks import format_value, join_names, require
from mtl.types import TaskSpec

from .cells import Remarks, as_text
from .columns.list import ListColumn, max_length_of
from .encoder import TableEncoder
from .histograms import Histogram, merge_histograms, training_histogram
from .labels import TargetOptions
from .options import TableOptions
from .patterns import finish_labels
from .profile import Blocks
from .statistics import Counts
from .vocabulary import UNKNOWN, most_frequent, text_counts

ANEW = "with data.keep_encoding=false, the encoding is learnt anew"


def extend_encoder(encoder: TableEncoder, blocks: Blocks, options: TableOptions) -> tuple[TableEncoder, dict[str, int]]:
    """Return ``encoder`` with the categories of further rows that it does not know, and their number by input.

    A new category needs ``min_count`` rows, and the most frequent ones fill up ``max_size``. A list and its
    target keep one vocabulary. Scales, dates and formats stay, and without ``max_length`` the length of lists does.
    Histograms are those of the further rows.
    """
    columns, before = encoder.columns_by_name, encoder.vocabularies
    counts = {name: Counts() for name in before}
    lengths = {name: column.length for name, column in columns.items() if isinstance(column, ListColumn)}
    histograms, rows = {name: list[Histogram]() for name in columns}, 0  # of each block
    for frame, where in blocks(encoder.columns):
        for column, cells in encoder.cells(frame, where, Remarks(encoder.on_invalid)):
            histograms[column.name].append(column.count(cells))
            for name, elements in column.elements(cells).items():
                counts[name].add(elements)
            if isinstance(column, ListColumn):
                lengths[column.name] = max(lengths[column.name], max_length_of(column.lists(cells)))
        rows += len(frame)
    shared = dict[str, list[str]]()  # the inputs with one vocabulary: a target and its lists, or an input alone
    for column in columns.values():
        for name in column.vocabularies:
            shared.setdefault(column.options["target"] or name, []).append(name)
    kinds = {name: column.kind for column in columns.values() for name in column.vocabularies}
    after, merged = dict(before), {name: merge_histograms(blocks) for name, blocks in histograms.items()}
    for names in shared.values():
        vocabulary, needed = before[names[0]], options.vocabulary.min_count_of(kinds[names[0]])
        table = text_counts([counts[name] for name in names], vocabulary.fold)
        is_new = pl.Series(vocabulary.encode(table["value"]).numpy() == UNKNOWN)
        max_size = options.vocabulary.max_size
        room = None if max_size is None else max(0, max_size - len(vocabulary.values))
        new = most_frequent(table.filter(is_new), needed, room)
        grown = replace(vocabulary, values=[*vocabulary.values, *new], added=vocabulary.added + len(new))
        after |= dict.fromkeys(names, grown)
        # Known categories stay known, however rare they are in these rows
        table = table.select("value", all=pl.when(is_new).then("count").otherwise(pl.lit(math.inf)))
        for name in names:
            if name in merged and merged[name].frequent is not None:
                occurrences = text_counts([counts[name]], vocabulary.fold).join(table, on="value")
                missing = merged[name].counts[-1] if name in lengths else 0
                merged[name] = training_histogram(occurrences, needed, after[name], rows, missing)
    extended = {name: column.extended(after, merged[name]) for name, column in columns.items()}
    for name, column in extended.items():
        if isinstance(column, ListColumn):
            max_length = options.of(name).max_length or column.length
            extended[name] = replace(column, length=min(lengths[name], max_length))
    sizes = {name: vocabulary.size - before[name].size for name, vocabulary in after.items()}
    added = {name: size for name, size in sizes.items() if size > 0}
    return replace(encoder, columns_by_name=extended), added


def check_kept(encoder: TableEncoder, options: TableOptions, inputs: Collection[str]) -> None:
    """Raise InputError if an option reads a column in another way than ``encoder``, whose encoding stays.

    ``inputs``: the columns that may be inputs, as they are not ignored and hold no labels, weights or splits.
    """
    left_out = [name for name in encoder.columns if name not in inputs]
    role = "is ignored, or holds labels, weights or splits, but is an input of the run of start_from"
    require(not left_out, f"data: {join_names(left_out)} {role}; {ANEW}")
    is_folded = all(vocabulary.fold for vocabulary in encoder.vocabularies.values())
    differing = ["vocabulary.fold=true"] if options.vocabulary.fold and not is_folded else []
    for name, column in options.columns.items():
        stated = {"format": column.format} if column.format is not None else {}
        if column.kind is not None:
            stated |= {option: getattr(column, option) for option in ("kind", "ids", "separator", "target")}
        read = encoder.columns_by_name.get(name)
        learnt = {"format": column.format} if read is None else read.options  # without a column: of labels
        other = {key: value for key, value in stated.items() if value != learnt.get(key)}
        differing += [f"columns.{name}.{key}={format_value(value)}" for key, value in other.items()]
    unlike = "is not as in the run of start_from, whose encoding stays"
    require(not differing, f"data: {join_names(differing)} {unlike}; {ANEW}")


def learn_tasks(
    labels: Sequence[TargetOptions], earlier: Sequence[TaskSpec], blocks: Blocks, where: str
) -> list[TaskSpec]:
    """Return the task of each of ``labels``, learnt from the rows; an ``earlier`` one keeps its classes and its scale.

    Raises InputError for an option that changes what the outputs of an earlier task mean.
    """
    specs_by_name = {task.name: task for task in earlier}
    for label in labels:
        if label.name in specs_by_name:
            check_meaning(label, specs_by_name[label.name])
    statistics = [label.new_statistics() for label in labels]
    for frame, file in blocks(list(dict.fromkeys(label.column for label in labels))):
        for label, values in zip(labels, statistics, strict=True):
            label.update(values, frame, file)
    return finish_labels(labels, statistics, where, specs_by_name)


def check_meaning(label: TargetOptions, task: TaskSpec) -> None:
    """Raise InputError if an option of ``label`` contradicts what the outputs of the trained ``task`` mean."""
    options: dict[str, Any] = {name: getattr(label, name) for name in ("kind", "loss", "transform", "after")}
    options["quantiles"] = label.objective.get("quantiles", ())
    differing = {name: value for name, value in options.items() if value != getattr(task, name)}
    if label.positive is not None and as_text(pl.Series([label.positive]))[0] not in task.classes[-1:]:
        differing["positive"] = label.positive
    scaled = (task.mean, task.std) != (0.0, 1.0)
    if label.standardize is not None and label.standardize != scaled:
        differing["standardize"] = label.standardize
    changed = join_names(f"{name}={format_value(value)}" for name, value in differing.items())
    require(not differing, f"data.tasks.{label.name}: {changed} is not as in the run of start_from; {ANEW}")

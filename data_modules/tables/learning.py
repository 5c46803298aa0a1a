"""Learn vocabularies, scales and classes from training rows: all at once, or block by block.

There are two passes, which read only the columns that they need. The first counts values, to find the kind of each
column; the second measures numbers and dates. Rows in memory are a single block. Memory grows with the number of
distinct values in columns that are or may be categorical. polars' own streaming engine is not used, since it adds
numbers in an order that depends on its threads; here all processes and repeated runs learn exactly the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from mtl.checks import join_names, require
from mtl.types import TaskSpec

from .cells import Remarks
from .chained import tasks_filled_after
from .dates import part_names
from .encoder import TableEncoder
from .inferring import Blocks, ColumnLearner
from .labels import TargetOptions
from .options import TableOptions
from .overview import overview
from .statistics import Sample


def infer(
    blocks: Blocks,
    rows: int,
    columns: Sequence[str],
    labels: Sequence[TargetOptions],
    where: str,
    options: TableOptions,
    empty: Sequence[str] = (),
    remarks: Remarks | None = None,
) -> tuple[list[ColumnLearner], list[TaskSpec], pl.DataFrame]:
    """Return what ``columns`` hold, the tasks, and a sample of the rows, from one pass. Raises InputError."""
    found = [ColumnLearner(name, options, empty, remarks or Remarks()) for name in columns]
    targets = [task.collector() for task in labels]
    sample = Sample(rows)
    for frame, file in blocks([*columns, *(task.column for task in labels)]):
        for task, target in zip(labels, targets, strict=True):
            task.collect(target, frame, file)
        for column in found:
            column.count(frame, file)
        sample.add(frame)
    specs = [task.conclude(target, where) for task, target in zip(labels, targets, strict=True)]
    some = sample.rows
    for column in found:
        column.decide_kind(blocks, some[column.name])
    return found, specs, some


def learn(
    blocks: Blocks,
    rows: int,
    columns: Sequence[str],
    labels: Sequence[TargetOptions],
    where: str,
    options: TableOptions,
    **reading: Any,
) -> tuple[TableEncoder, list[TaskSpec]]:
    """Learn the encoder of ``columns`` and the tasks from the training rows, of which there are ``rows``.

    Constant columns, identifiers and free text are left out; a table that is logged says what each column is taken for.
    ``where`` names the table in messages; ``reading``: separator, null_values and from_text. Raises InputError.
    """
    encoder = TableEncoder({}, {}, {}, {}, options.on_invalid, **reading)
    require(bool(columns), f"{where}: no column is left as input")
    found, specs, sample = infer(blocks, rows, columns, labels, where, options, encoder.empty, encoder.remarks)
    overview(found, labels, sample, f"{where}, {rows:,} training rows", rows)
    for column in found:
        require(not column.problem, column.problem)
        if column.measured and column.kind == "date":
            taken = [part for part in part_names(column.name) if part in columns]
            named = f"the date {column.name!r} becomes parts of this name"
            require(not taken, f"{where}: rename the column {join_names(taken)}: {named}")
    none = f"{where}: every input column is constant in the training rows, an identifier, or free text"
    require(any(column.used for column in found), none)
    share_vocabularies(found, options, where)
    measured = [column for column in found if column.measured]
    for frame, file in blocks([column.name for column in measured]) if measured else ():
        for column in measured:
            column.measure(frame, file)
    for column in found:
        column.to_encoder(encoder, blocks, where)
        if column.used:
            encoder.histograms[column.name] = column.histogram(encoder, rows)
    encoder.filled_after.extend(tasks_filled_after(labels, specs, blocks))
    return encoder, specs


def share_vocabularies(columns: Sequence[ColumnLearner], options: TableOptions, where: str) -> None:
    """Let each target and its lists have one vocabulary. Raises InputError if a target is no input."""
    used = {column.name: column for column in columns if column.used}
    for target in dict.fromkeys(options.targets.values()):
        lists = [name for name, other in options.targets.items() if other == target and name in used]
        if lists:
            constant = f"{where}, column {target!r}: it is constant in the training rows, or no input"
            require(target in used, f"{constant}; take it from data.columns.{lists[0]}.target")
            alike = [used[target].counts, *(used[name].elements for name in lists)]
            for name in (target, *lists):
                used[name].alike = [counts for counts in alike if counts is not None]

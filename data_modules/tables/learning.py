"""Learn vocabularies, scales and classes from training rows: all at once, or block by block.

There are two passes, which read only the columns that they need. The first counts values, to find the kind of each
column; the second measures numbers and dates, and counts the elements of lists and texts. Rows in memory are a single
block. Memory grows with the number of distinct values in columns that are or may be categorical. polars' own streaming
engine is not used, since it adds numbers in an order that depends on its threads; here all processes and repeated runs
learn exactly the same values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from mtl.checks import join_names, require
from mtl.types import TaskSpec

from .cells import Cells, Remarks
from .chain_labels import find_filled_tasks
from .column_report import log_overview
from .columns.base import Learner
from .columns.category import CategoryLearner
from .columns.date import DateLearner, part_names
from .columns.list import ListColumn, ListLearner
from .columns.number import NumberLearner
from .encoder import NUMERIC, TableEncoder
from .labels import TargetOptions
from .options import TableOptions
from .patterns import finish_labels
from .profile import Blocks, Profile
from .statistics import Sample

LEARNERS: Mapping[str, type[Learner]] = {
    "category": CategoryLearner,
    "number": NumberLearner,
    "date": DateLearner,
    "list": ListLearner,
    "text": ListLearner,
    "molecule": ListLearner,
}


def infer(
    blocks: Blocks,
    rows: int,
    columns: Sequence[str],
    labels: Sequence[TargetOptions],
    where: str,
    options: TableOptions,
) -> tuple[list[Profile], list[TaskSpec], pl.DataFrame]:
    """Return what ``columns`` hold, the tasks, and a sample of the rows, from one pass. Raises InputError."""
    profiles = [Profile(name, options) for name in columns]
    statistics = [label.new_statistics() for label in labels]
    sample, remarks = Sample(rows), Remarks(options.on_invalid)  # the second pass reports invalid cells
    for frame, file in blocks([*columns, *(task.column for task in labels)]):
        for label, values in zip(labels, statistics, strict=True):
            label.update(values, frame, file)
        for profile in profiles:
            profile.add(Cells(frame, profile.name, file, remarks))
        sample.add(frame)
    specs = finish_labels(labels, statistics, where)
    for profile in profiles:
        profile.decide_kind(blocks)
    return profiles, specs, sample.rows


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
    require(bool(columns), f"{where}: no column is left as input")
    encoder = TableEncoder({}, options.on_invalid, **reading)
    profiles, specs, sample = infer(blocks, rows, columns, labels, where, options)
    log_overview(profiles, labels, sample, f"{where}, {rows:,} training rows", rows)
    for profile in profiles:
        require(not profile.problem, profile.problem)
        if profile.used and profile.kind == "date":
            taken = [part for part in part_names(profile.name) if part in columns]
            parts = f"the date {profile.name!r} becomes parts of this name"
            require(not taken, f"{where}: rename the column {join_names(taken)}: {parts}")
    used = [profile for profile in profiles if profile.used]
    require(bool(used), f"{where}: every input column is constant in the training rows, an identifier, or free text")
    learners: dict[str, Learner] = {}
    for profile in used:
        learner = LEARNERS["number" if profile.repeats else str(profile.kind)]
        learners[profile.name] = learner(profile, options, sample[profile.name])
    share_vocabularies(learners, options, where)
    needed = [name for name, learner in learners.items() if learner.needs_rows]
    for frame, file in blocks(needed) if needed else ():
        for name in needed:
            learners[name].add(Cells(frame, name, file, encoder.remarks, encoder.empty))
    columns_by_name: dict[str, Any] = {name: learner.column(rows, blocks) for name, learner in learners.items()}
    encoder.columns_by_name.update(sorted(columns_by_name.items(), key=lambda item: isinstance(item[1], ListColumn)))
    require(NUMERIC not in encoder.vocabularies, f"{where}: rename the column {NUMERIC!r}, a name that is in use")
    encoder.filled_after.extend(find_filled_tasks(labels, specs, blocks))
    return encoder, specs


def share_vocabularies(learners: Mapping[str, Learner], options: TableOptions, where: str) -> None:
    """Let each target and its lists have one vocabulary. Raises InputError if a target is no input."""
    for target in dict.fromkeys(options.targets.values()):
        lists = [name for name, other in options.targets.items() if other == target and name in learners]
        if lists:
            constant = f"{where}, column {target!r}: it is constant in the training rows, or no input"
            require(target in learners, f"{constant}; take it from data.columns.{lists[0]}.target")
            counts = [learners[name].counts for name in (target, *lists)]
            for name in (target, *lists):
                learners[name].shared_counts = counts

"""Tasks whose columns are named by a pattern, and those of them whose labels teach nothing."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from mtl.checks import join_names, require
from mtl.types import TaskSpec

from .labels import TargetOptions, count_classes
from .statistics import Counts, Moments

logger = logging.getLogger(__name__)

MAX_DESCRIBED_TASKS = 32  # tasks whose labels the log describes one by one
MAX_LEFT_OUT_LISTED = 5  # tasks in the warning of those that are left out


def expand_patterns(
    tasks: Mapping[str, Any], columns: Sequence[str], reserved: Collection[Any], where: str
) -> dict[str, Any]:
    """Return ``tasks`` with the ``columns`` that fit in place of each pattern, such as ``genre_*``, and its options.

    The first pattern that fits a column counts. Tasks' own columns and ``reserved`` ones, which have other roles, are
    left out. Raises InputError, with the file ``where``, for a pattern without a column, and if two columns give tasks
    of one name.
    """
    entries = {name: entry if isinstance(entry, Mapping) else {"kind": entry} for name, entry in tasks.items()}
    option_columns = [entry.get(option) for entry in entries.values() for option in ("column", "weight_column")]
    used = {str(name) for name in (*tasks, *option_columns, *reserved) if name is not None}
    column_of = {name: str(entry.get("column") or name) for name, entry in entries.items()}
    expanded: dict[str, Any] = {}
    for name, entry in entries.items():
        if "*" not in str(name) or name in columns:
            expanded[name] = tasks[name]
            continue
        fitting = [column for column in columns if fnmatchcase(column, name) and column not in used]
        left = f"data.tasks.{name}: no column with such a name is left; {where} has {join_names(columns)}"
        require(bool(fitting), left)
        for column in fitting:
            task = re.sub(r"[./\\]", "_", column)  # which the name of a task may not have
            first = column_of.setdefault(task, column)
            both = f"data.tasks.{name}: columns {first!r} and {column!r} would be one task; name one by itself"
            require(first == column, both)
            expanded.setdefault(task, {**entry, "column": column, "pattern": name})
    return expanded


def finish_labels(
    labels: Sequence[TargetOptions],
    statistics: Sequence[Counts | Moments],
    where: str,
    earlier: Mapping[str, TaskSpec] | None = None,
) -> list[TaskSpec]:
    """Return the tasks that follow from the ``statistics`` of ``labels``, see ``TargetOptions.finish``.

    Of a pattern, tasks whose training rows have no label, or equal ones, are left out with one warning, unless all are
    such, or another task names one. Raises InputError.
    """
    earlier, named = earlier or {}, {name for label in labels for name in (label.after, label.where)}
    pairs = [*zip(labels, statistics, strict=True)]
    useless = {label.name for label, values in pairs if not _can_teach(values, is_new=label.name not in earlier)}
    patterns = {label.pattern for label in labels if label.name not in useless} - {None}
    left_out = [label.name for label in labels if label.name in useless - named and label.pattern in patterns]
    if left_out:
        reason = "%d of %d tasks are left out: their training rows have no label, or all the same one: %s%s"
        more = ", ..." if len(left_out) > MAX_LEFT_OUT_LISTED else ""
        logger.warning(reason, len(left_out), len(labels), join_names(left_out[:MAX_LEFT_OUT_LISTED]), more)
    level = logging.INFO if len(labels) <= MAX_DESCRIBED_TASKS else logging.DEBUG
    kept = [(label, values) for label, values in pairs if label.name not in left_out]
    return [label.finish(values, where, earlier.get(label.name), level) for label, values in kept]


def _can_teach(values: Counts | Moments, is_new: bool) -> bool:
    """Return whether the labels are enough: two different ones for a new task, one for a trained task."""
    if isinstance(values, Moments):
        return (values.std if is_new else values.count) > 0
    return len(count_classes(values)) > is_new

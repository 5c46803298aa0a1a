"""Labels of tasks in a chain, such as a purchase after a click."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl
import torch
from torch import Tensor

from mtl.chains import chain
from mtl.checks import InputError
from mtl.types import TaskSpec

from .cells import Cells
from .labels import TargetOptions
from .profile import Blocks


def find_filled_tasks(labels: Sequence[TargetOptions], specs: Sequence[TaskSpec], blocks: Blocks) -> list[str]:
    """Return the tasks whose column is empty in all training rows without the task before, such as without a click.

    In such a column, an empty cell without a click means no purchase; in others, it is a missing label. This follows
    from all training rows together, so it does not depend on the blocks that they are read in.
    """
    specs_by_name = {spec.name: spec for spec in specs}
    ordered = [task for task in _by_depth(labels) if task.name in specs_by_name]
    if all(task.after is None for task in ordered):
        return []
    columns = [task.column for task in ordered]
    parts = []
    for frame, where in blocks(columns):
        distinct = frame.unique(columns, keep="first", maintain_order=True)
        parts.append({task.name: task.targets(specs_by_name[task.name], distinct, where) for task in ordered})
    targets, filled = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}, list[str]()
    for task in ordered:
        if task.after is not None and bool(targets[task.name][targets[task.after] == 0].isnan().all()):
            filled.append(task.name)
            targets[task.name] = torch.where(targets[task.after] == 0, 0.0, targets[task.name])
    return filled


def fill_chains(
    labels: Sequence[TargetOptions],
    targets: Mapping[str, Tensor],
    filled: Sequence[str],
    frame: pl.DataFrame,
    where: str,
) -> dict[str, Tensor]:
    """Return ``targets``, the labels of the rows of ``frame``, with those of the tasks ``filled`` completed.

    Raises InputError for a row with a purchase but without a click.
    """
    completed, columns = dict(targets), {task.name: task.column for task in labels}
    for task in _by_depth(labels):
        if task.after is None:
            continue
        target, never = completed[task.name], completed[task.after] == 0
        wrong = (never & (target == 1)).nonzero()
        if len(wrong):
            row, before = int(wrong[0]), columns[task.after]
            cell = Cells(frame, task.column, where).describe(row)
            raise InputError(
                f"{cell}: a row cannot have {task.name} without {task.after}, and its column {before!r} is "
                f"{frame[before][row]!r}; correct or empty one of the two cells"
            )
        if task.name in filled:
            completed[task.name] = torch.where(never, 0.0, target)
    return completed


def _by_depth(labels: Sequence[TargetOptions]) -> list[TargetOptions]:
    """Return the binary tasks of chains, each behind the task that it is after."""
    tasks_by_name = {task.name: task for task in labels}
    chains = {task.name: chain(task, tasks_by_name) for task in labels}
    linked = {link.name for task in labels if task.after is not None for link in chains[task.name]}
    return sorted((tasks_by_name[name] for name in linked), key=lambda task: (len(chains[task.name]), task.name))

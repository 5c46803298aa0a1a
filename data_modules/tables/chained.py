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


def tasks_filled_after(labels: Sequence[TargetOptions], specs: Sequence[TaskSpec], blocks: Blocks) -> list[str]:
    """Return the tasks whose column is empty in all training rows without the task before, such as without a click.

    In such a column, an empty cell without a click means no purchase; in others, it is a missing label. This follows
    from all training rows together, so it does not depend on the blocks that they are read in.
    """
    ordered = _by_depth(labels)
    if all(task.after is None for task in ordered):
        return []
    columns, spec = [task.column for task in ordered], {task.name: task for task in specs}
    parts = []
    for frame, where in blocks(columns):
        distinct = frame.unique(columns, keep="first", maintain_order=True)
        parts.append({task.name: task.targets(spec[task.name], distinct, where) for task in ordered})
    found, filled = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}, list[str]()
    for task in ordered:
        if task.after is not None and bool(found[task.name][found[task.after] == 0].isnan().all()):
            filled.append(task.name)
            found[task.name] = torch.where(found[task.after] == 0, 0.0, found[task.name])
    return filled


def chained(
    labels: Sequence[TargetOptions],
    targets: Mapping[str, Tensor],
    filled: Sequence[str],
    frame: pl.DataFrame,
    where: str,
) -> dict[str, Tensor]:
    """Return ``targets``, the labels of the rows of ``frame``, with those of the tasks ``filled`` completed.

    Raises InputError for a row with a purchase but without a click.
    """
    found, column = dict(targets), {task.name: task.column for task in labels}
    for task in _by_depth(labels):
        if task.after is None:
            continue
        own, never = found[task.name], found[task.after] == 0
        wrong = (never & (own == 1)).nonzero()
        if len(wrong):
            number, before = int(wrong[0]), column[task.after]
            here = Cells(frame, task.column, where).describe(number)
            raise InputError(
                f"{here}: a row cannot have {task.name} without {task.after}, and its column {before!r} is "
                f"{frame[before][number]!r}; correct or empty one of the two cells"
            )
        if task.name in filled:
            found[task.name] = torch.where(never, 0.0, own)
    return found


def _by_depth(labels: Sequence[TargetOptions]) -> list[TargetOptions]:
    """Return the binary tasks of chains, each behind the task that it is after."""
    known = {task.name: task for task in labels}
    linked = {one.name for task in labels if task.after is not None for one in chain(task, known)}
    return sorted((known[name] for name in linked), key=lambda task: (len(chain(task, known)), task.name))

"""Labels of tasks in chains: what the label of a click says about that of a purchase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl
import torch
from torch import Tensor

from mtl.chains import chain
from mtl.checks import InputError

from .columns import cell
from .labels import Labels


def chained(
    labels: Sequence[Labels], targets: Mapping[str, Tensor], frame: pl.DataFrame, where: str
) -> dict[str, Tensor]:
    """Return ``targets`` for the rows of ``frame``, after a look at the labels of tasks that are after another.

    If no row with a label of 0 has one of the next task, as in a column that is filled for clicks alone, the next label
    of such a row is 0, since it can be no other. Raises InputError for a row with a purchase but without a click.
    """
    found, known = dict(targets), {task.name: task for task in labels}
    for task in sorted(labels, key=lambda task: len(chain(task, known))):
        if task.after is None:
            continue
        own, never = found[task.name], found[task.after] == 0
        wrong = (never & (own == 1)).nonzero()
        if len(wrong):
            number = int(wrong[0])
            here, column = cell(frame, task.column, number, where), known[task.after].column
            raise InputError(
                f"{here} is the label of a {task.name} without a {task.after}, as column {column!r} of this row says "
                f"{frame[column][number]!r}, but task {task.name!r} is after {task.after!r}: correct or empty a cell"
            )
        if not bool((never & ~own.isnan()).any()):
            found[task.name] = torch.where(never, 0.0, own)
    return found

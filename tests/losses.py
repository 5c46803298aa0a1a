"""The loss of one task."""

from __future__ import annotations

from torch import Tensor

from mtl.training.losses import task_loss_sums
from mtl.types import TaskSpec


def summed_loss(
    task: TaskSpec, prediction: Tensor, target: Tensor, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of ``task`` and its number of labels: two scalars."""
    weights = {} if weight is None else {task.name: weight}
    _, totals, counts = task_loss_sums({task.name: task}, {task.name: prediction}, {task.name: target}, weights)
    return totals[0], counts[0]

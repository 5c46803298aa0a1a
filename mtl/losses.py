"""Compute task losses over the labels that are there."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mtl.functional import at_least_float32
from mtl.types import MISSING_CLASS, TaskSpec


def labelled(task: TaskSpec, target: Tensor) -> Tensor:
    """Return which of ``target [B]`` are known, as bool ``[B]``."""
    return target != MISSING_CLASS if task.kind == "multiclass" else ~target.isnan()


def summed_loss(task: TaskSpec, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss summed over the labelled rows, and their number, as scalars.

    ``binary``: cross-entropy of the logit ``prediction [B]``; ``multiclass``: cross-entropy of the logits
    ``[B, C]``; ``regression``: squared error of ``[B]``. A row without a label adds exactly 0 to loss and gradient.
    """
    prediction, mask = at_least_float32(prediction), labelled(task, target)
    count = mask.sum()
    if task.kind == "multiclass":
        return F.cross_entropy(prediction, target, ignore_index=MISSING_CLASS, reduction="sum"), count
    # 0 stands in for both sides where there is no label: NaN * 0 would be NaN in the gradient
    prediction = torch.where(mask, prediction, 0.0)
    target = torch.where(mask, target, 0.0).to(prediction.dtype)
    loss = F.binary_cross_entropy_with_logits if task.kind == "binary" else F.mse_loss
    each = loss(prediction, target, reduction="none")
    return torch.where(mask, each, 0.0).sum(), count


def mean_loss(task: TaskSpec, prediction: Tensor, target: Tensor) -> Tensor:
    """Return the mean loss over the labelled rows of a batch; exactly 0 where there are none."""
    total, count = summed_loss(task, prediction, target)
    return total / count.clamp(min=1)

"""Compute task losses over the rows that have a label."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from mtl.functional import at_least_float32
from mtl.types import MISSING_CLASS, TaskSpec

STACKED = ("binary", "regression")  # kinds whose tasks have predictions of one shape


def labelled(task: TaskSpec, target: Tensor) -> Tensor:
    """Return which rows of ``target [B]``, of a span task ``[B, 2]``, have a label, as bool ``[B]``."""
    if task.kind == "span":
        return target[:, 0] != MISSING_CLASS
    return target != MISSING_CLASS if task.kind == "multiclass" else ~target.isnan()


def summed_loss(task: TaskSpec, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss summed over the labelled rows, and the number of these rows, as scalars.

    ``binary``: cross-entropy of the logit ``prediction [B]``; ``multiclass``: cross-entropy of the logits
    ``[B, C]``; ``regression``: squared error of ``[B]``; ``span``: the mean of the cross-entropies of the first and of
    the last token, over the positions of ``[B, S, 2]``. A row without a label adds exactly 0 to loss and gradient.
    Binary and regression tasks may come stacked, ``[N, B]``; then both results are ``[N]``.
    """
    prediction, mask = at_least_float32(prediction), labelled(task, target)
    count = mask.sum(-1)
    if task.kind == "multiclass":
        return F.cross_entropy(prediction, target, ignore_index=MISSING_CLASS, reduction="sum"), count
    if task.kind == "span":
        both = F.cross_entropy(prediction, target, ignore_index=MISSING_CLASS, reduction="sum")
        return both / 2, count
    loss = F.binary_cross_entropy_with_logits if task.kind == "binary" else F.mse_loss
    # Use 0 for prediction and target where the label is missing: masking only the loss would leave NaN * 0 = NaN in the
    # gradient
    prediction = torch.where(mask, prediction, 0.0)
    target = torch.where(mask, target, 0.0).to(prediction.dtype)
    each = loss(prediction, target, reduction="none")
    return torch.where(mask, each, 0.0).sum(-1), count


def summed_losses(
    tasks: Mapping[str, TaskSpec], predictions: Mapping[str, Tensor], targets: Mapping[str, Tensor]
) -> tuple[list[str], Tensor, Tensor]:
    """Return the names of the predicted tasks, and ``summed_loss`` of each: losses ``[N]``, numbers of labels ``[N]``.

    Tasks of the same kind are computed in one operation: with 128 tasks, a loop would take longer than the network.
    """
    kinds: dict[tuple[str, str], list[str]] = {}
    for name in predictions:
        kind = tasks[name].kind
        kinds.setdefault((kind, "" if kind in STACKED else name), []).append(name)
    names, totals, counts = [], [], []
    for members in kinds.values():
        task, alone = tasks[members[0]], tasks[members[0]].kind not in STACKED
        prediction = predictions[members[0]] if alone else torch.stack([predictions[name] for name in members])
        target = targets[members[0]] if alone else torch.stack([targets[name] for name in members])
        total, count = summed_loss(task, prediction, target)
        names += members
        totals.append(total.reshape(-1))
        counts.append(count.reshape(-1))
    return names, torch.cat(totals), torch.cat(counts)

"""Compute task losses over the rows that have a label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from mtl.functional import at_least_float32
from mtl.types import MISSING_CLASS, TaskSpec, labelled, side_by_side

STACKED = ("binary", "regression")  # kinds whose tasks have predictions of one shape


def summed_loss(
    task: TaskSpec, prediction: Tensor, target: Tensor, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return two scalars: the loss summed over the labelled rows, and the number of these rows.

    ``binary``: cross-entropy of the logit ``prediction [B]``; ``multiclass``: cross-entropy of the logits
    ``[B, C]``; ``regression``: squared error of ``[B]``, in standard units; ``span``: the mean of the cross-entropies
    of the first and of the last token, over the positions of ``[B, S, 2]``. A row without a label adds exactly 0 to
    loss and gradient. ``weight [B]``, ``TaskSpec.pos_weight`` and ``TaskSpec.class_weights`` multiply the losses of
    rows, but do not change the number of rows.
    """
    weights = {} if weight is None else {task.name: weight}
    _, totals, counts = summed_losses({task.name: task}, {task.name: prediction}, {task.name: target}, weights)
    return totals[0], counts[0]


def summed_losses(
    tasks: Mapping[str, TaskSpec],
    predictions: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
    weights: Mapping[str, Tensor] | None = None,
) -> tuple[list[str], Tensor, Tensor]:
    """Return the names of the predicted tasks, and ``summed_loss`` of each: losses ``[N]``, numbers of labels ``[N]``.

    ``weights[task] [B]``: the weights of the rows, for all tasks or none. Tasks of the same kind are computed in one
    operation: with 128 tasks, a loop would take longer than the network.
    """
    kinds: dict[tuple[str, str], list[str]] = {}
    for name in predictions:
        kind = tasks[name].kind
        kinds.setdefault((kind, "" if kind in STACKED else name), []).append(name)
    names, totals, counts = [], [], []
    for members in kinds.values():
        specs = [tasks[name] for name in members]
        if specs[0].kind in STACKED:
            prediction, target = side_by_side(predictions, members), side_by_side(targets, members)
            each, mask = _stacked(specs, at_least_float32(prediction), target)  # [N, B]
        else:
            each = _of_classes(specs[0], at_least_float32(predictions[members[0]]), targets[members[0]])[None]
            mask = labelled(specs[0], targets[members[0]])[None]  # [1, B]
        if weights:
            each = each * side_by_side(weights, members).to(each.dtype)
        names += members
        totals.append(each.sum(-1))
        counts.append(mask.count_nonzero(-1))
    return names, torch.cat(totals), torch.cat(counts)


def _stacked(tasks: Sequence[TaskSpec], prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each row of N binary tasks or N regressions, and whether it has a label: both ``[N, B]``."""
    mask = target == target  # false for NaN
    if tasks[0].kind == "binary":
        # Use 0 for prediction and target where the label is missing: masking only the loss would leave NaN * 0 = NaN in
        # the gradient
        prediction = torch.where(mask, prediction, 0.0)
        target = torch.where(mask, target, 0.0).to(prediction.dtype)
        own = _constants_of(tasks, "pos_weight", 1.0, target)
        each = F.binary_cross_entropy_with_logits(prediction, target, reduction="none", pos_weight=own)
        return torch.where(mask, each, 0.0), mask
    target = target.to(torch.promote_types(target.dtype, prediction.dtype))  # 1.7e9 +- 20 are equal in float32
    mean, std = _constants_of(tasks, "mean", 0.0, target), _constants_of(tasks, "std", 1.0, target)
    target = target if mean is None else target - mean
    target = (target if std is None else target / std).to(prediction.dtype)
    error = torch.where(mask, prediction - target, 0.0)  # before squaring, since the gradient at NaN is NaN
    return error.square(), mask


def _of_classes(task: TaskSpec, prediction: Tensor, target: Tensor) -> Tensor:
    """Return the loss ``[B]`` of each row of a multiclass or span task; 0 for a row without a label."""
    own = _constants(task.class_weights, prediction.device, prediction.dtype) if task.class_weights else None
    each = F.cross_entropy(prediction, target, own, ignore_index=MISSING_CLASS, reduction="none")
    return each if task.kind == "multiclass" else each.mean(-1)


def _constants_of(tasks: Sequence[TaskSpec], name: str, usual: float, like: Tensor) -> Tensor | None:
    """Return the field ``name`` of N tasks as ``[N, 1]``, None if all have the usual value."""
    values = tuple(getattr(task, name) for task in tasks)
    return None if all(value == usual for value in values) else _constants(values, like.device, like.dtype)[:, None]


@lru_cache(maxsize=256)
def _constants(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return ``values`` as a tensor; cached, since a copy to the device in each step would make the CPU wait."""
    with torch.inference_mode(False):  # else a first call in evaluation would cache a tensor that training cannot use
        return torch.tensor(values, device=device, dtype=dtype)

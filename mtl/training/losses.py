"""Compute task losses over the rows that have a label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtl.nn.functional import at_least_float32
from mtl.types import MISSING_CLASS, TaskSpec, has_label, standardize


def task_loss_sums(
    tasks: Mapping[str, TaskSpec],
    predictions: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
    weights: Mapping[str, Tensor] | None = None,
) -> tuple[list[str], Tensor, Tensor]:
    """Return the names of the N predicted tasks, their losses summed over labelled rows, and the numbers of these rows.

    ``binary``: cross-entropy of the logit ``prediction [B]``; ``multiclass``: cross-entropy of the logits
    ``[B, C]``; ``regression``: squared error of ``[B]``, in standard units; ``span``: the mean of the cross-entropies
    of the first and of the last token, over the positions of ``[B, S, 2]``. The other losses of ``Objective``, with
    p the predicted probability of the label, e = prediction - target in standard units, and m the mean label:

    * ``focal``: -(1 - p)^gamma log p (Lin et al. 2017, equation 4)
    * ``huber``: e^2 / 2 for |e| <= delta, else delta (|e| - delta / 2) (Huber 1964); ``mae``: |e|
    * ``quantile``: max(-t e, (1 - t) e), the mean over the quantiles t (Koenker and Bassett 1978)
    * ``poisson``: half the deviance, y log(y / f) - y + f with the rate f and the label y, both divided by m

    ``smoothing`` s replaces a label of 1 by 1 - s + s / C and of 0 by s / C, with C classes (Szegedy et al. 2016).

    A row without a label adds exactly 0 to loss and gradient. ``weights[task] [B]``, for all tasks or none,
    ``TaskSpec.pos_weight`` and ``TaskSpec.class_weights`` multiply the losses of rows, but do not change their number.
    Tasks of the same kind are computed in one operation: with 128 tasks, a loop would take longer than the network.
    """
    kinds: dict[tuple[object, ...], list[str]] = {}
    for name in predictions:
        task = tasks[name]
        alike = (task.loss, task.is_log, "") if _is_stacked(task) else (None, False, name)
        kinds.setdefault((task.kind, *alike), []).append(name)
    names, totals, counts = [], [], []
    for members in kinds.values():
        specs = [tasks[name] for name in members]
        if _is_stacked(specs[0]):
            prediction, target = (torch.stack([part[name] for name in members]) for part in (predictions, targets))
            losses, mask = _batched_losses(specs, at_least_float32(prediction), target)  # [N, B]
        else:
            compute = _quantile_losses if specs[0].quantiles else _class_losses
            losses = compute(specs[0], at_least_float32(predictions[members[0]]), targets[members[0]])[None]
            mask = has_label(specs[0], targets[members[0]])[None]  # [1, B]
        if weights:
            losses = losses * torch.stack([weights[name] for name in members]).to(losses.dtype)
        names += members
        totals.append(losses.sum(-1))
        counts.append(mask.count_nonzero(-1))
    return names, torch.cat(totals), torch.cat(counts)


def _is_stacked(task: TaskSpec) -> bool:
    """Return whether tasks like this one have predictions of one shape."""
    return task.kind in ("binary", "regression") and not task.quantiles


def _batched_losses(tasks: Sequence[TaskSpec], prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each row of N binary tasks or N regressions, and whether it has a label: both ``[N, B]``.

    The N tasks have the same loss and transform.
    """
    loss = tasks[0].loss
    mask = target == target  # false for NaN
    if tasks[0].kind == "binary":
        # Use 0 for prediction and target where the label is missing: masking only the loss would leave NaN * 0 = NaN in
        # the gradient
        prediction = torch.where(mask, prediction, 0.0)
        target = torch.where(mask, target, 0.0).to(prediction.dtype)
        pos_weight, smoothing = (
            _fields_unless(usual, tasks, name, target) for name, usual in (("pos_weight", 1.0), ("smoothing", 0.0))
        )
        soft = target if smoothing is None else target * (1 - smoothing) + smoothing / 2
        losses = F.binary_cross_entropy_with_logits(prediction, soft, reduction="none")
        losses = losses if pos_weight is None else losses * torch.where(target > 0, pos_weight, 1.0)
        if loss == "focal":
            log_rest = F.logsigmoid(prediction * (1 - 2 * target))  # log(1 - p): a power of 1 - p has no gradient at 0
            losses = losses * (log_rest * _fields(tasks, "gamma", target)).exp()
        return torch.where(mask, losses, 0.0), mask
    target = _standardized(tasks, prediction, target)
    if loss == "poisson":
        prediction, target = (torch.where(mask, x, 0.0) for x in (prediction, target))
        losses = torch.xlogy(target, target) - target * prediction - target + prediction.exp()
        return torch.where(mask, losses, 0.0), mask
    error = torch.where(mask, prediction - target, 0.0)  # before squaring, since the gradient at NaN is NaN
    if loss is None:
        return error.square(), mask
    size = error.abs()
    if loss == "mae":
        return size, mask
    slope = torch.minimum(size, _fields(tasks, "delta", size))
    return slope * (size - slope / 2), mask


def _standardized(tasks: Sequence[TaskSpec], prediction: Tensor, target: Tensor) -> Tensor:
    """Return the labels ``target [N, B]`` in standard units and in the dtype of ``prediction``.

    For a Poisson loss, they are divided by the mean label, whose logarithm is ``TaskSpec.mean``.
    """
    target = target.to(torch.promote_types(target.dtype, prediction.dtype))  # 1.7e9 +- 20 are equal in float32
    mean, std = _fields_unless(0.0, tasks, "mean", target), _fields_unless(1.0, tasks, "std", target)
    if tasks[0].loss == "poisson":
        return (target if mean is None else target * (-mean).exp()).to(prediction.dtype)
    return standardize(target, mean, std, tasks[0].is_log).to(prediction.dtype)


def _quantile_losses(task: TaskSpec, prediction: Tensor, target: Tensor) -> Tensor:
    """Return the pinball loss ``[B]`` of a task with quantiles; 0 for a row without a label."""
    standard = _standardized([task], prediction, target[None])[0]
    return pinball(task, prediction.reshape(-1, task.outputs), standard)


def pinball(task: TaskSpec, prediction: Tensor, target: Tensor) -> Tensor:
    """Return the mean over the quantiles of the pinball loss ``[B]`` of each row, 0 where ``target [B]`` is NaN.

    ``prediction``: ``[B, Q]``, in the units of ``target``.
    """
    below = torch.where(target.isnan()[:, None], 0.0, target[:, None] - prediction)
    levels = _constants(task.quantiles, below.device, below.dtype)
    return torch.maximum(levels * below, (levels - 1) * below).mean(-1)


def _class_losses(task: TaskSpec, prediction: Tensor, target: Tensor) -> Tensor:
    """Return the loss ``[B]`` of each row of a multiclass or span task; 0 for a row without a label."""
    options: dict[str, Any] = {"ignore_index": MISSING_CLASS, "reduction": "none"}
    losses = F.cross_entropy(prediction, target, label_smoothing=task.smoothing, **options)
    if task.class_weights:
        weights = _constants(task.class_weights, prediction.device, prediction.dtype)
        losses = losses * weights[target.clamp(min=0)]
    if task.loss == "focal":
        rest = -torch.expm1(-F.cross_entropy(prediction, target, **options))  # 1 - p
        # A power below 1 has no gradient at 0, nor has the loss of a row without a label
        losses = losses * rest.clamp(min=torch.finfo(rest.dtype).tiny) ** task.gamma
    return losses if task.kind == "multiclass" else losses.mean(-1)


def _fields_unless(usual: float, tasks: Sequence[TaskSpec], name: str, like: Tensor) -> Tensor | None:
    """Return ``_fields``, or None if all tasks have the ``usual`` value."""
    return None if all(getattr(task, name) == usual for task in tasks) else _fields(tasks, name, like)


def _fields(tasks: Sequence[TaskSpec], name: str, like: Tensor) -> Tensor:
    """Return the field ``name`` of N tasks as ``[N, 1]``."""
    return _constants(tuple(getattr(task, name) for task in tasks), like.device, like.dtype)[:, None]


@lru_cache(maxsize=256)
def _constants(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return ``values`` as a tensor; cached, since a copy to the device in each step would make the CPU wait."""
    with torch.inference_mode(False):  # else a first call in evaluation would cache a tensor that training cannot use
        return torch.tensor(values, device=device, dtype=dtype)

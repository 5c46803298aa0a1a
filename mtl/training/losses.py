"""Compute task losses over the rows that have a label."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtl.nn.functional import at_least_float32
from mtl.types import MISSING_CLASS, TaskSpec, has_label, standardize
from mtl.types.task_tensors import group_by, stack_tasks


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
    For several calls with the same tasks, see ``LossSums``.
    """
    return LossSums(tasks)(predictions, targets, weights)


class LossSums:
    """Compute ``task_loss_sums`` of ``tasks``; those that are alike in one operation.

    With 128 tasks, a loop would take longer than the network.
    """

    def __init__(self, tasks: Mapping[str, TaskSpec]) -> None:
        self.tasks = tasks
        self._groups: dict[tuple[str, ...], list[TaskGroup]] = {}  # by the names of predictions

    def __call__(
        self,
        predictions: Mapping[str, Tensor],
        targets: Mapping[str, Tensor],
        weights: Mapping[str, Tensor] | None = None,
    ) -> tuple[list[str], Tensor, Tensor]:
        names = tuple(predictions)
        if names not in self._groups:
            groups = group_by((self.tasks[name] for name in names), _group_key).values()
            self._groups[names] = [TaskGroup(group, group[0], [task.name for task in group]) for group in groups]
        totals, counts = [], []
        for group in self._groups[names]:
            prediction, target = (stack_tasks(part, group.names).transpose(0, 1) for part in (predictions, targets))
            losses = LOSSES[group.spec.kind](group, at_least_float32(prediction), target)  # [N, B]
            if weights:
                losses = losses * stack_tasks(weights, group.names).T.to(losses.dtype)
            totals.append(losses.contiguous().sum(-1))  # a sum in another order would have other last digits
            counts.append(has_label(group.spec, target).count_nonzero(-1))
        return [name for group in self._groups[names] for name in group.names], torch.cat(totals), torch.cat(counts)


@dataclass(frozen=True)
class TaskGroup:
    """N tasks whose losses are one operation; they are like ``spec``, the first of them, but for numbers."""

    tasks: list[TaskSpec]
    spec: TaskSpec
    names: list[str]
    _constants: dict[tuple[Any, ...], Tensor | None] = field(default_factory=dict)

    def constants(self, name: str, like: Tensor, usual: float | None = None) -> Any:
        """Return the field ``name`` of the tasks, ``[N, 1]`` or ``[N, C]``; None if all have the ``usual`` value."""
        key = (name, like.device, like.dtype)  # cached: a copy to the device in each step would make the CPU wait
        if key not in self._constants:
            values = [getattr(task, name) for task in self.tasks]
            with torch.inference_mode(False):  # else training could not use what evaluation has cached
                tensor = torch.tensor(values, device=like.device, dtype=like.dtype).view(len(values), -1)
            self._constants[key] = None if all(value == usual for value in values) else tensor
        return self._constants[key]


def _group_key(task: TaskSpec) -> Hashable:
    """Return what tasks of a group have in common."""
    options: Hashable = None
    if task.kind == "multiclass":
        options = (task.smoothing, task.gamma, bool(task.class_weights))
    elif task.kind == "span":
        options = task.name  # their texts may have different lengths
    return task.kind, task.loss, task.is_log, task.quantiles, task.num_classes, options


def _binary_losses(group: TaskGroup, prediction: Tensor, target: Tensor) -> Tensor:
    """Return the losses ``[N, B]``, 0 without a label, of ``prediction [N, B, ...]`` and ``target [N, B]``."""
    mask = target == target  # false for NaN
    # Use 0 for prediction and target where the label is missing: masking only the loss would leave NaN * 0 = NaN in
    # the gradient
    prediction = torch.where(mask, prediction, 0.0)
    target = torch.where(mask, target, 0.0).to(prediction.dtype)
    pos_weight = group.constants("pos_weight", target, 1.0)
    smoothing = group.constants("smoothing", target, 0.0)
    soft = target if smoothing is None else target * (1 - smoothing) + smoothing / 2
    losses = F.binary_cross_entropy_with_logits(prediction, soft, reduction="none")
    losses = losses if pos_weight is None else losses * torch.where(target > 0, pos_weight, 1.0)
    if group.spec.loss == "focal":
        log_rest = F.logsigmoid(prediction * (1 - 2 * target))  # log(1 - p): a power of 1 - p has no gradient at 0
        losses = losses * (log_rest * group.constants("gamma", target)).exp()
    return torch.where(mask, losses, 0.0)


def _regression_losses(group: TaskGroup, prediction: Tensor, target: Tensor) -> Tensor:
    """See ``_binary_losses``."""
    loss, mask = group.spec.loss, target == target
    target = _standardized(group, prediction, target)
    if group.spec.quantiles:
        return pinball(group.constants("quantiles", target)[0], prediction, target)
    if loss == "poisson":
        prediction, target = (torch.where(mask, x, 0.0) for x in (prediction, target))
        losses = torch.xlogy(target, target) - target * prediction - target + prediction.exp()
        return torch.where(mask, losses, 0.0)
    error = torch.where(mask, prediction - target, 0.0)  # before squaring, since the gradient at NaN is NaN
    if loss is None:
        return error.square()
    size = error.abs()
    if loss == "mae":
        return size
    slope = torch.minimum(size, group.constants("delta", size))
    return slope * (size - slope / 2)


def _standardized(group: TaskGroup, prediction: Tensor, target: Tensor) -> Tensor:
    """Return the labels ``target [N, B]`` in standard units and in the dtype of ``prediction``.

    For a Poisson loss, they are divided by the mean label, whose logarithm is ``TaskSpec.mean``.
    """
    target = target.to(torch.promote_types(target.dtype, prediction.dtype))  # 1.7e9 +- 20 are equal in float32
    mean, std = group.constants("mean", target, 0.0), group.constants("std", target, 1.0)
    if group.spec.loss == "poisson":
        return (target if mean is None else target * (-mean).exp()).to(prediction.dtype)
    return standardize(target, mean, std, group.spec.is_log).to(prediction.dtype)


def pinball(quantiles: Tensor, prediction: Tensor, target: Tensor) -> Tensor:
    """Return the mean over the ``quantiles [Q]`` of the pinball loss ``[B]`` of each row, 0 where the target is NaN.

    ``prediction [B, Q]`` and ``target [B]`` have the same units; there may be more dimensions before B.
    """
    prediction = prediction.reshape(*target.shape, len(quantiles))
    below = torch.where(target.isnan()[..., None], 0.0, target[..., None] - prediction)
    return torch.maximum(quantiles * below, (quantiles - 1) * below).mean(-1)


def _class_losses(group: TaskGroup, prediction: Tensor, target: Tensor) -> Tensor:
    """See ``_binary_losses``; of a span task, ``target`` is ``[N, B, 2]``."""
    task, shape = group.spec, target.shape
    prediction, target = prediction.flatten(0, 1), target.flatten(0, 1)
    options: dict[str, Any] = {"ignore_index": MISSING_CLASS, "reduction": "none"}
    losses = F.cross_entropy(prediction, target, label_smoothing=task.smoothing, **options)
    if task.class_weights:
        weights = group.constants("class_weights", prediction)  # [N, C]
        losses = losses * weights.gather(1, target.clamp(min=0).view(shape)).flatten()
    if task.loss == "focal":
        rest = -torch.expm1(-F.cross_entropy(prediction, target, **options))  # 1 - p
        # A power below 1 has no gradient at 0, nor has the loss of a row without a label
        losses = losses * rest.clamp(min=torch.finfo(rest.dtype).tiny) ** task.gamma
    losses = losses.view(shape)
    return losses if task.kind == "multiclass" else losses.mean(-1)


LOSSES = {
    "binary": _binary_losses,
    "regression": _regression_losses,
    "multiclass": _class_losses,
    "span": _class_losses,
}

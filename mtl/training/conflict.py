"""Measure how the gradients of tasks agree, and how a step for one task changes the losses of the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.func import functional_call

from mtl.distributed import all_reduce_sum
from mtl.training.module import MultiTaskModule
from mtl.training.weighting.base import TaskLosses, shared_parameters, sum_by_task
from mtl.training.weighting.jacobian import task_jacobian
from mtl.types import Batch

Row = tuple[str, str, str, str, float]  # quantity (norm, cosine, affinity), layer, task, other task, value
ALL = "all"  # layers together


def measure(module: MultiTaskModule, first: Sequence[Batch], second: Sequence[Batch], rate: float) -> list[Row]:
    """Return norms and cosines of the tasks' gradients at shared parameters, by layer, and TAG's affinities.

    The affinity of task i to task j is Z(i -> j) = 1 - L_j(after a step on L_i) / L_j(before) (Fifty et al. 2021,
    equation 1): the step is of plain gradient descent with the learning ``rate``, on shared parameters only. Gradients
    are those on the batches ``first``, losses those on the batches ``second``, in evaluation mode; each task has labels
    in one batch of both. A value is NaN for a task without labels or with a gradient of 0, or if a loss is 0.
    Without shared parameters there is nothing to measure.
    """
    names, parameters = list(module.tasks), dict(module.network.named_parameters())
    shared = shared_parameters(module.network)[0]
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    layers = [name_of[id(parameter)].rpartition(".")[0] for parameter in shared]
    if not shared:
        return []
    losses = [_losses(module, batch, {}) for batch in first]
    jacobian = all_reduce_sum(task_jacobian(losses, shared, len(names))[0])  # [T, P]
    pieces = torch.split(jacobian, [parameter.numel() for parameter in shared], 1)
    by_layer: dict[str, list[Tensor]] = {}
    for layer, piece in zip(layers, pieces, strict=True):
        by_layer.setdefault(layer, []).append(piece)
    rows: list[Row] = []
    for layer, gradients in {ALL: jacobian, **{name: torch.cat(parts, 1) for name, parts in by_layer.items()}}.items():
        norms = gradients.norm(dim=1)
        cosines = (gradients @ gradients.T / norms.outer(norms)).tolist()
        for i, norm in enumerate(norms.tolist()):
            rows.append(("norm", layer, names[i], names[i], norm if norm else math.nan))
            rows += [("cosine", layer, names[i], names[j], cosines[i][j]) for j in range(i + 1, len(names))]
    with torch.no_grad():
        before = _mean_losses(module, second, {})
        for i, name in enumerate(names):
            stepped = {name_of[id(p)]: p - rate * piece[i].view_as(p) for p, piece in zip(shared, pieces, strict=True)}
            has_gradient = bool(jacobian[i].any())
            ratios = (_mean_losses(module, second, stepped) / before).tolist() if has_gradient else [math.nan]
            rows += [("affinity", ALL, name, *pair) for pair in zip(names, [1 - r for r in ratios], strict=False)]
    return rows


def _losses(module: MultiTaskModule, batch: Batch, changed: Mapping[str, Tensor]) -> TaskLosses:
    """Return the losses of a batch, with some parameters ``changed``."""
    batch = module.converted(batch)
    output = functional_call(module.network, dict(changed), (batch.inputs, list(batch.targets)))
    return module.task_losses(output, batch, count_in_epoch=False)


def _mean_losses(module: MultiTaskModule, batches: Sequence[Batch], changed: Mapping[str, Tensor]) -> Tensor:
    """Return the mean losses of the tasks ``[T]``."""
    return sum_by_task([_losses(module, batch, changed) for batch in batches], len(module.tasks))[1]

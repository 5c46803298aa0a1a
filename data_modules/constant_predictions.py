"""Learn the constant predictions with which tests compare networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from torch import Tensor

from mtl.types import DataSpec, TaskSpec, has_label


def with_constants(spec: DataSpec, targets: Mapping[str, Tensor]) -> DataSpec:
    """Return ``spec`` with the constant of each task that has none yet, from the labels ``[N]`` of training rows."""
    tasks = [
        task if task.constant or task.kind == "span" else replace(task, constant=fit_constant(task, targets[task.name]))
        for task in spec.tasks
    ]
    return replace(spec, tasks=tasks)


def fit_constant(task: TaskSpec, target: Tensor) -> tuple[float, ...]:
    """Return the output of a network ``[outputs]`` that fits the labels among ``target [N]`` best for each row.

    It is the logit or the logarithms of the shares of the classes (one without a label counts as half a label), the
    mean in standard units, or, for an absolute or quantile loss, the quantiles. Empty if there is none: without labels,
    and for a Poisson loss if all are 0.
    """
    labels = target[has_label(task, target)]
    if not len(labels):
        return ()
    if task.kind != "regression":
        counts = labels.long().bincount(minlength=max(task.num_classes, 2)).clamp(min=0.5)
        logs = (counts / counts.sum()).log().tolist()
        return tuple(logs) if task.kind == "multiclass" else (logs[1] - logs[0],)
    if task.loss == "poisson":  # whose labels may be 0
        return (float(task.standardize(labels.double().mean())),) if labels.any() else ()
    values, levels = task.standardize(labels).numpy(), task.quantiles or ((0.5,) if task.loss == "mae" else ())
    return tuple(np.quantile(values, levels).tolist()) if levels else (float(values.mean()),)

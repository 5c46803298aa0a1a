"""Turn the outputs of a network into probabilities, classes, and values in the units of the data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from mtl.chains import chain
from mtl.checks import InputError
from mtl.types import TaskSpec

DIGITS = 17  # binary digits in which two predictions differ: about five decimal ones


def to_predictions(task: TaskSpec, output: Tensor) -> Tensor:
    """Convert the network's ``output`` for ``task`` to probabilities or to the units of the labels.

    The logits ``[B]`` of a binary task become probabilities of the positive class, the logits ``[B, C]`` of a
    multiclass task probabilities of the classes, both float32. The outputs ``[B]`` of a regression become values in the
    units of its labels, float64; so do several quantiles ``[B, Q]``, in ascending order. The logits ``[B, S, 2]`` of a
    span task are returned unchanged. Logits are calibrated first, see ``TaskSpec.calibration``.

    If only the share w of the negatives is among the rows (``TaskSpec.sampling_rate``), the odds p / (1 - p) among them
    are 1 / w times those of all rows, so log w is added to the logit (Elkan 2001, theorem 2; He et al. 2014, section
    6.3). Metrics compare predictions without it, since validation and test rows are sampled as the training rows are.
    """
    if task.kind == "binary":
        logit = task.calibrate(output.float())
        return (logit if task.sampling_rate == 1 else logit + math.log(task.sampling_rate)).sigmoid()
    if task.kind == "multiclass":
        return task.calibrate(output.float()).softmax(-1)
    return task.unstandardize(output) if task.kind == "regression" else output.float()


def readable(tasks: Mapping[str, TaskSpec], outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``to_predictions`` of the network's ``outputs`` by task.

    A task after another has two entries: under its name its probability, the product over its chain, and under
    ``conditional(task)`` the probability given the task before it.
    """
    values = {name: to_predictions(tasks[name], output) for name, output in outputs.items()}
    postprocessed: dict[str, Tensor] = {}
    for name, value in values.items():
        if tasks[name].after is None:
            postprocessed[name] = value
        else:
            steps = [values[earlier.name] for earlier in chain(tasks[name], tasks)]
            postprocessed |= {name: torch.stack(steps).prod(0), conditional(tasks[name]): value}
    return postprocessed


def outermost(task: TaskSpec, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest ``[B]`` of the predictions ``[B]`` or quantiles ``[B, Q]`` of a regression.

    ``values`` are in units. With ``transform="log"`` the results are logarithms.
    """
    several = (values.log() if task.transform else values).reshape(-1, task.outputs)
    return several[:, 0], several[:, -1]


def interval(task: TaskSpec, values: Tensor, margin: float) -> tuple[Tensor, Tensor]:
    """Return the ends ``[B]`` of the intervals of a regression, in units; for ``values`` see ``outermost``.

    ``margin``: see ``mtl.training.fit_calibration.conformal_scores``. If it is so negative that the ends would change
    places, both are in the middle.
    """
    low, high = outermost(task, values)
    middle = (low + high) / 2
    low, high = torch.minimum(low - margin, middle), torch.maximum(high + margin, middle)
    if task.transform:
        return low.exp(), high.exp()
    least = 0.0 if task.not_negative or task.loss == "poisson" else -torch.inf
    return low.clamp(min=least), high.clamp(min=least)


def spread(tasks: Mapping[str, TaskSpec], members: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the standard deviation ``[B]`` over the K members of an ensemble of each task's prediction.

    ``members``: ``NetworkOutput.members``. Of a multiclass task, it is that of the probability of the class with the
    largest mean, and of quantiles, of the one nearest to the median.
    """
    of_members = zip(*members.values(), strict=True)
    outputs = [readable(tasks, dict(zip(members, tensors, strict=True))) for tensors in of_members]
    spreads = {}
    for name in members:
        values, task = torch.stack([output[name] for output in outputs]), tasks[name]  # [K, B] or [K, B, outputs]
        if values.dim() == 3 and task.kind == "multiclass":
            values = values.gather(2, values.mean(0).argmax(-1).expand(len(values), -1)[..., None]).squeeze(2)
        elif values.dim() == 3:
            values = values[..., task.middle]
        spreads[name] = values.std(0)
    return spreads


def conditional(task: TaskSpec) -> str:
    """Return the name of the probability of ``task`` given the task before it."""
    return f"{task.name}_given_{task.after}"


def class_names(task: TaskSpec) -> list[str]:
    """Return the names of the classes of a binary or multiclass task; numbers from 0 if they have none."""
    return list(task.classes) or [str(number) for number in range(max(2, task.num_classes))]


def task_summary(task: TaskSpec) -> dict[str, Any]:
    """Return the kind of a task and the names of its classes, if any, as plain data for other programs."""
    classes = {"classes": class_names(task)} if task.kind in ("binary", "multiclass") else {}
    quantiles = {"quantiles": list(task.quantiles)} if task.quantiles else {}
    after = {"after": task.after} if task.after else {}
    return {"kind": task.kind, **classes, **quantiles, **after}


def columns(task: TaskSpec, values: Tensor) -> dict[str, pl.Series]:
    """Return the columns of a table of predictions, by name; ``values``: of ``to_predictions``, on the CPU.

    A binary task has TASK_class and TASK_probability (of the positive class), a multiclass task TASK_class and
    TASK_probability_CLASS for each class, and a regression TASK_prediction, or TASK_quantile_Q for each quantile, such
    as price_quantile_0.9. Raises InputError for a span task.
    """
    numbers = values.numpy()
    if task.quantiles:
        return dict(zip(quantile_columns(task), map(pl.Series, numbers.reshape(-1, task.outputs).T), strict=True))
    if task.kind == "regression":
        return {f"{task.name}_prediction": pl.Series(numbers)}
    if task.kind == "span":
        answers = f"task {task.name!r} finds answers in texts, which is no column of a table"
        raise InputError(f"{answers}; call .network on its inputs")
    names = pl.Series(class_names(task))
    best = (values > 0.5).long() if task.kind == "binary" else values.argmax(-1)
    class_column = {f"{task.name}_class": names[best.numpy()] if len(best) else names.clear()}
    if task.kind == "binary":
        return class_column | {f"{task.name}_probability": pl.Series(numbers)}
    probabilities = {f"{task.name}_probability_{name}": pl.Series(numbers[:, i]) for i, name in enumerate(names)}
    return class_column | probabilities


def quantile_columns(task: TaskSpec) -> list[str]:
    """Return the names of the columns of a task that predicts quantiles."""
    return [f"{task.name}_quantile_{level:.15g}" for level in task.quantiles]


def main_column(task: TaskSpec) -> str:
    """Return the column of the task's one prediction: its class, its value, or the quantile nearest to the median."""
    if task.quantiles:
        return quantile_columns(task)[task.middle]
    return f"{task.name}_{'prediction' if task.kind == 'regression' else 'class'}"


def main_number(task: TaskSpec, values: Tensor) -> Tensor:
    """Return a number for each row ``[N]`` of the result of ``to_predictions``: that of ``main_column``.

    It is the value of a regression, the probability of yes, or the number of the class.
    """
    if task.kind == "multiclass":
        return values.argmax(-1)
    return values[:, task.middle] if task.quantiles and values.dim() == 2 else values


def distribution(task: TaskSpec, values: Tensor) -> dict[str, Any]:
    """Return as plain data how the predictions ``values [N]`` of a task, see ``main_number``, are distributed.

    ``counts``: how many values are below the first of the ``edges``, between two of them, and so on. For classes the
    edges are their numbers from 1. Else they are near the deciles, but in the middle between two values that differ in
    the first ``DIGITS`` binary digits: other batches or processors change the last digits, and then equal predictions
    of many rows must stay in their bin. ``mean``: of a task without several classes.
    """
    numbers = values.double().numpy()
    edges: list[float] = np.arange(1.0, task.num_classes).tolist()
    if task.kind != "multiclass":
        mantissa, exponent = np.frexp(numbers)
        rounded = np.ldexp(np.round(mantissa * 2.0**DIGITS) / 2.0**DIGITS, exponent)
        distinct, index = np.unique(rounded, return_inverse=True)
        deciles = np.unique(np.quantile(index, np.linspace(0.1, 0.9, 9), method="inverted_cdf")).astype(int)
        deciles = deciles[deciles > 0]
        edges = ((distinct[deciles - 1] + distinct[deciles]) / 2).tolist()
    mean = None if task.kind == "multiclass" else float(numbers.mean())
    return {"edges": edges, "counts": bin_counts(numbers, edges), "mean": mean}


def bin_counts(numbers: Any, edges: Sequence[float]) -> list[int]:
    """Return how many of ``numbers [N]`` are below the first of the ascending ``edges``, between two, and above."""
    bins = np.searchsorted(edges, numbers, side="right")
    counts: list[int] = np.bincount(bins, minlength=len(edges) + 1).tolist()
    return counts


def empty(task: TaskSpec) -> Tensor:
    """Return the result of ``to_predictions`` for 0 rows."""
    rows = torch.zeros(0, dtype=torch.float64 if task.kind == "regression" else torch.float32)
    return rows if task.outputs == 1 else rows[:, None].expand(0, task.outputs)

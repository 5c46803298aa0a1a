"""Quick models of the inputs of a table, with which a test compares the network: LightGBM's trees, or a linear one.

They take at most ``ROWS`` training rows, as the network sees them, and predict what a network would output, so that
the same code computes losses and metrics of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mtl.training.losses import task_loss_sums
from mtl.types import Bag, Batch, Categorical, DataSpec, Numeric, TaskSpec, labelled

ROWS = 20_000  # training rows of a model
STEPS = 50  # iterations of L-BFGS for the linear model
TREES = 100  # for each output, at most
OUTPUTS = 32  # of all tasks together, up to which trees are grown
PATIENCE = 10  # trees that do not lower the loss of the held-out rows, after which the last ones are dropped
HELD_OUT = 5  # every fifth row stops the trees
OBJECTIVES = {"huber": "huber", "mae": "regression_l1", "poisson": "poisson", "quantile": "quantile"}  # of LightGBM

Model = Literal["auto", "lightgbm", "linear", "none"]
Predict = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]  # inputs -> outputs by task, as of a network


def constant(tasks: Sequence[TaskSpec]) -> Predict:
    """Return what predicts ``TaskSpec.constant`` for each row."""

    def predict(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        rows = len(next(iter(inputs.values())))
        return outputs_of(tasks, torch.tensor([each for task in tasks for each in task.constant]).expand(rows, -1))

    return predict


def outputs_of(tasks: Sequence[TaskSpec], values: Tensor) -> dict[str, Tensor]:
    """Return the outputs of the tasks, ``[B]`` or ``[B, outputs]``, from those of all in a row ``[B, sum]``."""
    parts = values.split([task.outputs for task in tasks], -1)
    return {task.name: each[:, 0] if task.outputs == 1 else each for task, each in zip(tasks, parts, strict=True)}


def chosen(model: Model, spec: DataSpec, tasks: Sequence[TaskSpec]) -> Model:
    """Return the model to fit: for "auto", trees if LightGBM is installed and there are few outputs.

    Without ids and numbers, which trees read, it is a linear model.
    """
    few = sum(task.outputs for task in tasks) <= OUTPUTS
    trees = model == "lightgbm" or (model == "auto" and few and find_spec("lightgbm") is not None)
    readable = any(isinstance(one, Categorical | Numeric) for one in spec.inputs.values())
    return model if model == "none" else "lightgbm" if trees and readable else "linear"


def fit(model: Model, spec: DataSpec, tasks: Sequence[TaskSpec], rows: Batch) -> Predict:
    """Return the ``model`` of ``tasks``, which have constants, fitted to the training ``rows``.

    Inputs are ids, lists of ids, and numbers.
    """
    return trees(spec, tasks, rows) if model == "lightgbm" else linear(spec, tasks, rows)


def linear(spec: DataSpec, tasks: Sequence[TaskSpec], rows: Batch) -> Predict:
    """Return a linear model of all tasks: a weight for each id and each number, and a bias, for each output.

    It minimises the sum of the tasks' mean losses plus |w|^2 / (2 N) of its weights w with N rows, as a ridge or a
    logistic regression does. The weight of ids that the rows do not have is 0.
    """
    ids, _ = design(spec, rows.inputs)
    known = ids[ids >= 0].unique()  # [V]
    width = sum(one.width for one in spec.inputs.values() if isinstance(one, Numeric))
    constants = [each for task in tasks for each in task.constant]
    bias = torch.tensor(constants, dtype=torch.double)  # [outputs of all tasks]
    table = bias.new_zeros(len(known) + 1, len(bias))  # the first row is for unknown ids and padding
    weight = bias.new_zeros(width, len(bias))

    def encoded(inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        ids, numbers = design(spec, inputs)
        if not len(known):
            return torch.zeros(len(ids), 0, dtype=torch.long), numbers
        place = torch.searchsorted(known, ids).clamp(max=len(known) - 1)
        return torch.where(known[place] == ids, place + 1, 0), numbers

    def output(places: Tensor, numbers: Tensor) -> dict[str, Tensor]:
        values = bias + numbers.double() @ weight
        if places.shape[1]:
            values = values + F.embedding_bag(places, table, mode="sum", padding_idx=0)
        return outputs_of(tasks, values)

    inputs, by_name = encoded(rows.inputs), {task.name: task for task in tasks}
    parameters = [each.requires_grad_() for each in (bias, table, weight)]
    optimizer = torch.optim.LBFGS(parameters, max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        _, totals, counts = task_loss_sums(by_name, output(*inputs), rows.targets, rows.weights)
        size = (table.square().sum() + weight.square().sum()) / (2 * len(rows))
        value: Tensor = (totals / counts.clamp(min=1)).sum() + size
        value.backward()
        return value

    optimizer.step(loss)
    for parameter in parameters:
        parameter.requires_grad_(False)
    return lambda inputs: {name: value.float() for name, value in output(*encoded(inputs)).items()}


def trees(spec: DataSpec, tasks: Sequence[TaskSpec], rows: Batch) -> Predict:
    """Return LightGBM's trees for each task, of ids and numbers; lists are left out."""
    import lightgbm

    read = {name: one for name, one in spec.inputs.items() if isinstance(one, Categorical | Numeric)}
    spec = replace(spec, inputs=read)

    def matrix(ids: Tensor, numbers: Tensor, seen: Sequence[Tensor]) -> Any:
        """Number the ids that were ``seen`` in each column from 0; all others have the next number.

        LightGBM warns of gaps, and its verbosity does not silence its threads.
        """
        places = [torch.searchsorted(each, column) for each, column in zip(seen, ids.T.contiguous(), strict=True)]
        for each, column, place in zip(seen, ids.T, places, strict=True):
            place[~torch.isin(column, each)] = len(each)
        return torch.cat([*(place[:, None].double() for place in places), numbers.double()], 1).numpy()

    ids, numbers = design(spec, rows.inputs)
    common = {"verbosity": -1, "num_threads": torch.get_num_threads(), "deterministic": True, "force_row_wise": True}
    grown, seen = dict[str, list[Any]](), dict[str, list[Tensor]]()
    for task in tasks:
        target = rows.targets[task.name]
        there = labelled(task, target)
        y, w = target[there], rows.weights[task.name][there].numpy() if rows.weights else None
        if task.kind == "regression":  # of a Poisson loss, the rate in units of the mean
            y = y / np.exp(task.mean) if task.loss == "poisson" else task.standardized(y)
            options: dict[str, Any] = {"objective": OBJECTIVES.get(task.loss or "", "regression")}
        else:
            options = {"objective": task.kind} | ({"num_class": task.num_classes} if task.num_classes > 1 else {})
        held = np.arange(len(y)) % HELD_OUT == 0 if len(y) > HELD_OUT**2 else np.zeros(len(y), dtype=bool)
        learnt = ids[there][torch.from_numpy(~held)]
        seen[task.name] = [column.unique() for column in learnt.T]
        x = matrix(ids[there], numbers[there], seen[task.name])
        train, valid = (
            lightgbm.Dataset(
                x[part],
                y.numpy()[part],
                weight=None if w is None else w[part],
                categorical_feature=list(range(ids.shape[1])),
                params=common,
            )
            for part in (~held, held)
        )
        stop: list[Any] = [lightgbm.early_stopping(PATIENCE, verbose=False)] if held.any() else []
        for level in task.quantiles or (None,):
            options |= {} if level is None else {"alpha": level}
            others = [valid] if held.any() else []  # without them, nothing stops the trees
            model = lightgbm.train({**common, **options}, train, TREES, valid_sets=others, callbacks=stop)
            grown.setdefault(task.name, []).append(model)

    def predict(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        (ids, numbers), found = design(spec, inputs), {}
        for task in tasks:
            x = matrix(ids, numbers, seen[task.name])
            values = [
                torch.from_numpy(np.asarray(model.predict(x, raw_score=True))).float() for model in grown[task.name]
            ]
            found[task.name] = values[0] if len(values) == 1 else torch.stack(values, 1)
        return found

    return predict


def design(spec: DataSpec, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the ids of all columns ``[B, columns]``, each id in one column only, and the numbers ``[B, width]``.

    A list has a column for each of its elements, with -1 for padding.
    """
    rows, first = len(next(iter(inputs.values()))), 0
    ids, numbers = [torch.zeros(rows, 0, dtype=torch.long)], [torch.zeros(rows, 0)]
    for name, one in spec.inputs.items():
        values = inputs[name].cpu()
        if isinstance(one, Numeric):
            numbers.append(values.float())
        elif isinstance(one, Categorical | Bag):
            padding = values.eq(0) if isinstance(one, Bag) else torch.zeros_like(values, dtype=torch.bool)
            ids.append((values.long() + first).masked_fill(padding, -1).reshape(rows, -1))
            first += one.size
    return torch.cat(ids, 1), torch.cat(numbers, 1)

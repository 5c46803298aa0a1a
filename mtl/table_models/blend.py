"""The blend: a weighted mean of what a network and models of a table predict, chosen after the training.

Models that are unlike each other make different errors, which the mean cancels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import reduce
from itertools import product
from statistics import fmean
from types import MappingProxyType

import torch
from torch import Tensor, nn

from mtl.networks.base import MultiTaskNetwork
from mtl.nn.functional import at_least_float32
from mtl.training.labeled_predictions import LabeledPredictions, labelled_after
from mtl.training.losses import task_loss_sums
from mtl.training.measurements import NETWORK
from mtl.types import DataSpec, NetworkOutput, TaskSpec

STEPS = 10  # of the grid: its weights are multiples of 1 / STEPS
PRIOR = 300  # labels of a task that its own validation rows need to count as much as those of all tasks
LEAST = 0.005  # smaller weights are 0
MAX_NUMBERS = 2**22  # outputs of points of the grid that are in memory at once

Weights = Mapping[str, Mapping[str, float]]  # by task and model


class Blend(MultiTaskNetwork):
    """Predict the weighted mean of the outputs of ``network`` and ``models``: logits, or values in standard units.

    ``weights``: of each task, by "network" and the names of ``models``, which may lack some; they add up to 1. Routings
    and auxiliary losses are those of the network. If that is an ensemble, ``members`` are blends with each member.
    """

    def __init__(self, network: MultiTaskNetwork, models: Mapping[str, nn.Module], weights: Weights) -> None:
        super().__init__(DataSpec({}, network.tasks))
        self.network, self.models, self.weights = network, nn.ModuleDict(dict(models)), weights

    def forward(self, inputs: Mapping[str, Tensor], tasks: Sequence[str] | None = None) -> NetworkOutput:
        """Predict the named ``tasks`` (default all) for a batch."""
        output = self.network(inputs, tasks)
        used = {name for weights in self.weights.values() for name in weights}
        others = {name: model(inputs) for name, model in self.models.items() if name in used}
        predictions, members = (
            blend_outputs(self.weights, {NETWORK: of_network, **others})
            for of_network in (output.predictions, output.members)  # [B, ...] and [K, B, ...]
        )
        return replace(output, predictions=predictions, members=members)


def blend_outputs(weights: Weights, outputs_by_model: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the weighted means of ``outputs_by_model[model][task]`` for the tasks of the network's outputs."""
    return {
        task: reduce(
            torch.add, (w * at_least_float32(outputs_by_model[model][task]) for model, w in weights[task].items())
        )
        for task in outputs_by_model[NETWORK]
    }


def choose_weights(
    tasks: Sequence[TaskSpec],
    rows_by_model: Mapping[str, Mapping[str, LabeledPredictions]],
    left_out: Mapping[str, Set[str]] = MappingProxyType({}),
) -> dict[str, dict[str, float]]:
    """Return, by task, the weights of the network and the other models whose mean is best on validation rows.

    On a grid of the simplex, r_t(w) is the loss of task t divided by its smallest one on the grid, and r(w) the mean of
    these over the tasks. The weights of a task with n labels are the mean of the grid's points w, weighted by exp(-(n
    r_t(w) + m r(w)) / 2), where m is PRIOR or, if it is less, the number of all labels: points that few rows cannot
    tell apart count alike, and a task with few labels has the weights of the table (measured beside other rules in
    benchmarks/accuracy/blend_candidates.md). ``rows_by_model[model][task]``: the same labelled rows for each model,
    with its ``output``. A task's weights have the network, and each other model whose weight is not 0. ``left_out``:
    tasks that a model does not predict, by model; the means are then those of the other tasks.
    """
    models = list(rows_by_model)
    points = product(range(STEPS + 1), repeat=len(models))
    grid = torch.tensor([point for point in points if sum(point) == STEPS]).double() / STEPS  # [G, models]
    relative, labels, impossible = dict[str, Tensor](), dict[str, int](), dict[str, Tensor]()
    for task in tasks:
        lacking = torch.tensor([task.name in left_out.get(model, ()) for model in models])
        impossible[task.name] = (grid[:, lacking] > 0).any(1)
        rows = [labelled_after(task, rows_by_model[model]) for model in models]
        of_network = rows[models.index(NETWORK)]
        if not len(of_network):
            continue
        missing, pairs = torch.full_like(of_network.output, torch.nan), zip(lacking, rows, strict=True)
        outputs = torch.stack([(missing if lacks else part.output).double() for lacks, part in pairs])
        is_finite = outputs.flatten(1).isfinite().all(1)
        outputs = outputs.nan_to_num(0.0, 0.0, 0.0)  # [models, N, ...]
        blocks = grid.split(max(1, MAX_NUMBERS // outputs[0].numel()))
        losses = torch.cat([mean_losses(task, torch.tensordot(block, outputs, 1), of_network) for block in blocks])
        losses[(grid[:, ~is_finite] > 0).any(1)] = torch.inf
        relative[task.name] = (losses - losses.min()) / losses.min().abs().clamp(min=1e-6)  # r_t - 1
        labels[task.name] = len(of_network)
    if not relative:
        return {task.name: {NETWORK: 1.0} for task in tasks}
    possible = [part.masked_fill(impossible[name], torch.nan) for name, part in relative.items()]
    mean = torch.stack(possible).nanmean(0).nan_to_num(torch.inf)  # inf: no task with labels can have these weights
    chosen = dict[str, dict[str, float]]()
    prior = min(PRIOR, sum(labels.values()))
    for task in tasks:
        evidence = labels[task.name] * relative[task.name] if task.name in labels else torch.zeros(())
        cost = (evidence + prior * mean).masked_fill(impossible[task.name], torch.inf)
        weights = torch.softmax(-cost / 2, 0) @ grid
        weights = torch.where(weights < LEAST, 0.0, weights)
        weights /= weights.sum()
        by_model = dict(zip(models, weights.tolist(), strict=True))
        chosen[task.name] = {model: weight for model, weight in by_model.items() if weight or model == NETWORK}
    return chosen


def mean_losses(task: TaskSpec, outputs: Tensor, rows: LabeledPredictions) -> Tensor:
    """Return the task's mean losses ``[G]`` of ``outputs [G, N]`` or ``[G, N, outputs]`` for its labelled ``rows``."""
    names = [str(index) for index in range(len(outputs))]
    alone = {name: replace(task, name=name, after=None, calibration=None) for name in names}
    label = rows.label.double() if task.kind == "binary" else rows.label
    weights = dict.fromkeys(names, rows.weight) if rows.weight.dim() else None
    predictions, labels = dict(zip(names, outputs, strict=True)), dict.fromkeys(names, label)
    _, totals, counts = task_loss_sums(alone, predictions, labels, weights)
    return totals / counts.clamp(min=1)


def mean_weights(weights: Weights) -> dict[str, float]:
    """Return the means over the tasks, by model."""
    models = dict.fromkeys(model for of_task in weights.values() for model in of_task)
    return {model: fmean(of_task.get(model, 0.0) for of_task in weights.values()) for model in models}


def in_words(weights: Weights) -> str:
    """Return the weights of a blend in words."""
    means = ", ".join(f"{model} {weight:.2f}" for model, weight in mean_weights(weights).items())
    return f"blend of {means}" + " (means over the tasks)" * (len(weights) > 1)

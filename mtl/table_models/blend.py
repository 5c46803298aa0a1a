"""The blend: a weighted mean of what a network and models of a table predict, chosen after the training.

Models that are unlike each other make different errors, which the mean cancels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor, nn

from mtl.networks.base import MultiTaskNetwork
from mtl.nn.functional import at_least_float32
from mtl.training.labeled_predictions import LabeledPredictions, labelled_after
from mtl.training.losses import task_loss_sums
from mtl.training.measurements import NETWORK
from mtl.types import DataSpec, NetworkOutput, TaskSpec

STEPS = 10  # weights are multiples of 1 / STEPS
TIE = 1e-9  # summed relative losses that differ by less are equal


class Blend(MultiTaskNetwork):
    """Predict the weighted mean of the outputs of ``network`` and ``models``: logits, or values in standard units.

    ``weights``: by "network" and the names of ``models``, which may lack some; they add up to 1. Routings and auxiliary
    losses are those of the network. If that is an ensemble, ``members`` are blends with each of its members.
    """

    def __init__(
        self, network: MultiTaskNetwork, models: Mapping[str, nn.Module], weights: Mapping[str, float]
    ) -> None:
        super().__init__(DataSpec({}, network.tasks))
        self.network, self.models, self.weights = network, nn.ModuleDict(dict(models)), dict(weights)

    def forward(self, inputs: Mapping[str, Tensor], tasks: Sequence[str] | None = None) -> NetworkOutput:
        """Predict the named ``tasks`` (default all) for a batch."""
        output = self.network(inputs, tasks)
        others = {name: model(inputs) for name, model in self.models.items() if name in self.weights}
        predictions, members = (
            blend_outputs(self.weights, {NETWORK: of_network, **others})
            for of_network in (output.predictions, output.members)  # [B, ...] and [K, B, ...]
        )
        return replace(output, predictions=predictions, members=members)


def blend_outputs(
    weights: Mapping[str, float], outputs_by_model: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Return the weighted means of ``outputs_by_model[model][task]`` for the tasks of the network's outputs."""
    return {
        task: reduce(torch.add, (w * at_least_float32(outputs_by_model[model][task]) for model, w in weights.items()))
        for task in outputs_by_model[NETWORK]
    }


def choose_weights(
    tasks: Sequence[TaskSpec], rows_by_model: Mapping[str, Mapping[str, LabeledPredictions]]
) -> dict[str, float]:
    """Return the weights of the network and other models whose mean is best on validation rows; one set for all tasks.

    Of the weights on a grid with ``STEPS`` steps, those with the smallest sum over the tasks of the loss divided by the
    task's smallest loss on the grid. One weight for each task overfits the few validation rows of a small table. Equal
    ones go to fewer models. ``rows_by_model[model][task]``: the same labelled rows for each model, with its ``output``.
    The weight of the network is always among the result, the others if they are above 0.
    """
    models = list(rows_by_model)
    grid = torch.tensor(sorted(compositions(STEPS, len(models)), key=lambda parts: sum(part > 0 for part in parts)))
    grid = grid.double() / STEPS  # [G, models]
    totals = torch.zeros(len(grid), dtype=torch.double)
    for task in tasks:
        rows = [labelled_after(task, rows_by_model[model]) for model in models]
        if not len(rows[0]):
            continue
        outputs = torch.stack([labelled.output.double() for labelled in rows])  # [models, N, ...]
        is_finite = outputs.flatten(1).isfinite().all(1)
        outputs = outputs.nan_to_num(0.0, 0.0, 0.0)
        losses = torch.stack([mean_loss(task, torch.tensordot(parts, outputs, 1), rows[0]) for parts in grid])
        losses[(grid[:, ~is_finite] > 0).any(1)] = torch.inf
        totals += (losses - losses.min()) / losses.min().abs().clamp(min=1e-6)
    best = int((totals <= totals.min() + TIE).nonzero()[0])
    weights = dict(zip(models, grid[best].tolist(), strict=True))
    return {model: weight for model, weight in weights.items() if weight or model == NETWORK}


def mean_loss(task: TaskSpec, output: Tensor, rows: LabeledPredictions) -> Tensor:
    """Return the task's mean loss of ``output [N]`` or ``[N, outputs]`` for its labelled ``rows``."""
    alone = replace(task, after=None, calibration=None)
    label = rows.label.double() if task.kind == "binary" else rows.label
    weights = {task.name: rows.weight} if rows.weight.dim() else None
    _, totals, counts = task_loss_sums({task.name: alone}, {task.name: output}, {task.name: label}, weights)
    return totals[0] / counts[0].clamp(min=1)


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield all lists of ``parts`` whole numbers of at least 0 whose sum is ``total``."""
    if parts == 1:
        yield (total,)
        return
    for first in range(total, -1, -1):
        for rest in compositions(total - first, parts - 1):
            yield first, *rest


def in_words(weights: Mapping[str, float]) -> str:
    """Return the weights of a blend in words."""
    return "blend of " + ", ".join(f"{model} {weight:g}" for model, weight in weights.items())

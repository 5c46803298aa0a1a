"""Networks that are trained beside each other and predict together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtl.checks import require
from mtl.networks.base import MultiTaskNetwork
from mtl.nn.functional import at_least_float32
from mtl.types import DataSpec, NetworkOutput, Routing, TaskSpec
from mtl.types.task_tensors import TaskTensors, find_places, group_by, stack_tasks

FEATURES = "\0features"  # the input that holds the output of the bottom that members share


class Features(nn.Module):
    """Stand in for the bottom of a member: return the features ``[B, ...]`` that the ensemble has computed."""

    def __init__(self, output_dim: Any) -> None:
        super().__init__()
        self.output_dim = output_dim

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return inputs[FEATURES]


class Ensemble(MultiTaskNetwork):
    """Predict the mean of K networks that differ in their initial weights (Lakshminarayanan et al. 2017).

    If the members have a ``bottom``, which maps the inputs to features, all use that of the first, as in
    TabM (Gorishniy et al. 2024, arXiv 2410.24210): with many columns it costs more than all else. Each of the
    ``members`` has a loss of its own, so none learns to make up for the mistakes of the others. The mean is that of
    probabilities, of rates (``loss=poisson``), and of the other regressions' outputs. Auxiliary losses are means over
    the members.
    """

    def __init__(self, members: Sequence[MultiTaskNetwork]) -> None:
        super().__init__(DataSpec({}, members[0].tasks))
        self.bottom = members[0].bottom
        if self.bottom is not None:
            for member in members:
                member.bottom = Features(self.bottom.output_dim)
        self.members = nn.ModuleList(members)
        spans = [task.name for task in self.tasks if task.kind == "span"]
        message = f"ensemble={len(members)}: there are no ensembles for tasks of kind span: {', '.join(spans)}"
        require(not spans, message)

    def forward(self, inputs: Mapping[str, Tensor], tasks: Sequence[str] | None = None) -> NetworkOutput:
        """Predict the named ``tasks`` (default all) for a batch."""
        if self.bottom is not None:
            inputs = {**inputs, FEATURES: self.bottom(inputs)}
        outputs: list[NetworkOutput] = [member(inputs, tasks) for member in self.members]
        names = list(outputs[0].predictions)
        tasks_by_name = {task.name: task for task in self.tasks}
        kinds = {name: (task.kind, task.outputs, task.loss == "poisson") for name, task in tasks_by_name.items()}
        groups = group_by(names, kinds.__getitem__).values()
        places = find_places(groups, names)
        stacked = [torch.stack([stack_tasks(output.predictions, group) for output in outputs]) for group in groups]
        routings: dict[str, Routing] = {}
        losses: dict[str, Tensor] = {}
        for index, output in enumerate(outputs):
            routings |= {f"members.{index}.{name}": routing for name, routing in output.routings.items()}
            for name, loss in output.losses.items():
                losses[name] = losses.get(name, 0.0) + loss / len(outputs)
        first = [tasks_by_name[group[0]] for group in groups]
        means = [mean_prediction(task, members) for task, members in zip(first, stacked, strict=True)]
        return NetworkOutput(TaskTensors(places, means), routings, losses, members=TaskTensors(places, stacked, dim=2))

    def parameter_options(self) -> dict[nn.Parameter, dict[str, float]]:
        """Return the options of the members' parameters."""
        members: Any = self.members
        return {p: options for member in members for p, options in member.parameter_options().items()}


def mean_prediction(task: TaskSpec, members: Tensor) -> Tensor:
    """Return the prediction ``[B, ...]`` of K ``members [K, B, ...]`` together; of classes, logits as a network's."""
    wide = at_least_float32(members)
    if task.kind == "binary":
        mean = log_mean(F.logsigmoid(wide)) - log_mean(F.logsigmoid(-wide))
    elif task.kind == "multiclass":
        mean = log_mean(wide.log_softmax(-1))
    else:
        mean = log_mean(wide) if task.loss == "poisson" else wide.mean(0)
    return mean.to(members.dtype)


def log_mean(logarithms: Tensor) -> Tensor:
    """Return the logarithm of the mean over the first dimension of the numbers with these ``logarithms``."""
    return logarithms.logsumexp(0) - math.log(len(logarithms))

"""Heads that pass information along a chain of tasks (AITM: Xi et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mtl.chains import chain
from mtl.checks import InputError, require
from mtl.networks.heads import Heads
from mtl.options import Count, Dropout, validated
from mtl.types import TaskSpec


class Transfer(nn.Module):
    """Attention between a task's own features and those of the task before it (equations 2 to 5).

    z_t = sum_u w_u h1(u) over u in {p, q_t}, with p = g(z_(t-1)) and w = softmax(<h2(u), h3(u)> / sqrt(H)). The
    functions h1, h2 and h3 are linear, and g is a dense layer with a relu.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.passed = nn.Sequential(nn.Linear(width, width), nn.ReLU())  # g
        self.value, self.key, self.query = (nn.Linear(width, width) for _ in range(3))  # h1, h2, h3

    def forward(self, before: Tensor, current: Tensor) -> Tensor:
        """Map z_(t-1) and q_t, ``[B, H]`` each, to z_t ``[B, H]``."""
        both = torch.stack([self.passed(before), current], 1)  # [B, 2, H]
        scores = (self.key(both) * self.query(both)).sum(-1, keepdim=True) / both.shape[-1] ** 0.5
        mixed: Tensor = (scores.softmax(1) * self.value(both)).sum(1)
        return mixed


class AITM(Heads):
    """``Heads`` whose hidden features pass along the chains of tasks, from each task to the one after it.

    The paper predicts P(t) itself and penalises P(t) > P(before). Here the output is the logit of P(t | before), as of
    any heads, so that P(t) cannot exceed P(before).
    """

    @validated
    def __init__(
        self, tasks: Sequence[TaskSpec], input_dim: Count, units: Sequence[Count] = (), dropout: Dropout = 0.0
    ) -> None:
        super().__init__(tasks, input_dim, units, dropout)
        tasks_by_name = {task.name: task for task in tasks}
        later = [task for task in tasks if task.after in tasks_by_name]
        require(bool(later), "AITM needs a task after another: give one, as data.tasks.purchase.after=click")
        later.sort(key=lambda task: len(chain(task, tasks_by_name)))
        self.order = [task.name for task in later]
        self.transfers = nn.ModuleList(Transfer(self.hidden.output_dim) for _ in self.order)

    def features(self, x: Tensor, task_ids: Sequence[int]) -> Tensor:
        """See ``Heads``. A task needs the tasks before it among ``task_ids``."""
        hidden = super().features(x, task_ids).expand(-1, len(task_ids), -1)
        features = dict(zip(task_ids, hidden.unbind(1), strict=True))
        index = {task.name: number for number, task in enumerate(self.tasks)}
        for name, transfer in zip(self.order, self.transfers, strict=True):
            number, before = index[name], index[str(self.tasks[index[name]].after)]
            if number in features:
                require(before in features, f"heads=aitm: {name} needs a prediction of {self.tasks[before].name} too")
                features[number] = transfer(features[before], features[number])
        return torch.stack([features[number] for number in task_ids], 1)

    def task_parameters(self) -> dict[nn.Parameter, Sequence[int]]:
        """See ``Heads``."""
        index = {task.name: number for number, task in enumerate(self.tasks)}
        parts = zip(self.order, self.transfers, strict=True)
        return super().task_parameters() | {p: [index[name]] for name, part in parts for p in part.parameters()}

    def only(self, task: int) -> Heads:
        """Raise InputError: the head of a task reads those of the tasks before it."""
        raise InputError("heads=aitm: a head reads the features of other tasks, so no task can be cut out alone")

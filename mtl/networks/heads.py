"""Turn each task's mixture into its prediction."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mtl.experts.dense import StackedDense, StackedLinear
from mtl.types import TaskSpec


class Heads(nn.Module):
    """One head per task, stacked: ``units`` dense layers with dropout, then an output layer.

    Tasks with equally many outputs share one batched product; a multiclass task has C outputs, the others one.
    """

    def __init__(
        self, tasks: Sequence[TaskSpec], input_dim: int, units: Sequence[int] = (), dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.tasks = list(tasks)
        self.input_dim, self.units, self.dropout = input_dim, list(units), dropout
        self.hidden = StackedDense(len(self.tasks), input_dim, units, dropout)
        self.members: dict[int, list[int]] = {}  # number of outputs -> the tasks that have it
        for index, task in enumerate(self.tasks):
            self.members.setdefault(task.num_classes, []).append(index)
        self.output = nn.ModuleDict(
            {
                str(width): StackedLinear(len(rows), self.hidden.output_dim, width)
                for width, rows in self.members.items()
            }
        )

    def forward(self, x: Tensor, wanted: Sequence[int]) -> dict[str, Tensor]:
        """Map ``x [B, len(wanted), H]`` to predictions by task name, ``[B]`` or ``[B, C]``."""
        everything = len(wanted) == len(self.tasks)
        hidden = self.hidden(x, None if everything else wanted)
        predictions: dict[str, Tensor] = {}
        for width, rows in self.members.items():
            places = [place for place, task in enumerate(wanted) if task in rows]
            if not places:
                continue
            subset = None if len(places) == len(rows) else [rows.index(wanted[place]) for place in places]
            taken = hidden if len(places) == len(wanted) else hidden[:, places]
            outputs = self.output[str(width)](taken, subset)  # [B, places, width]
            for place, value in zip(places, outputs.unbind(1), strict=True):
                task = self.tasks[wanted[place]]
                predictions[task.name] = value if task.kind == "multiclass" else value.squeeze(-1)
        return {self.tasks[task].name: predictions[self.tasks[task].name] for task in wanted}

    @torch.no_grad()
    def only(self, place: int) -> Heads:
        """Return the head of one task, with copies of its parameters."""
        task = self.tasks[place]
        head = Heads([task], self.input_dim, self.units, self.dropout)
        row = self.members[task.num_classes].index(place)
        pairs = list(zip(head.hidden.parameters(), self.hidden.parameters(), strict=True))
        for new, old in pairs:
            new.copy_(old[[place]])
        for new, old in zip(head.output.parameters(), self.output[str(task.num_classes)].parameters(), strict=True):
            new.copy_(old[[row]])
        return head.train(self.training)


class SeparateHeads(nn.Module):
    """One ``Heads`` per task, for batches of one task: a step moves no other task's head.

    Parameters that share a tensor share their optimizer's memory too: with momentum or weight decay the other tasks'
    rows would move without a gradient.
    """

    def __init__(
        self, tasks: Sequence[TaskSpec], input_dim: int, units: Sequence[int] = (), dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Heads([task], input_dim, units, dropout) for task in tasks)

    def forward(self, x: Tensor, wanted: Sequence[int]) -> dict[str, Tensor]:
        """Map ``x [B, len(wanted), H]`` to predictions by task name, ``[B]`` or ``[B, C]``."""
        predictions: dict[str, Tensor] = {}
        for place, task in enumerate(wanted):
            predictions |= self.heads[task](x[:, [place]] if x.shape[1] > 1 else x, [0])
        return predictions

    def only(self, place: int) -> Heads:
        """Return a copy of the head of one task."""
        head = copy.deepcopy(self.heads[place])
        assert isinstance(head, Heads)
        return head


def wanted_tasks(tasks: Sequence[TaskSpec], names: Sequence[str] | None) -> list[int]:
    """Return the positions of the named tasks in the order of the data's description; None means all."""
    if names is None:
        return list(range(len(tasks)))
    unknown = set(names) - {task.name for task in tasks}
    if unknown:
        raise ValueError(f"no such task: {', '.join(sorted(unknown))}; there are {', '.join(t.name for t in tasks)}")
    return [index for index, task in enumerate(tasks) if task.name in names]

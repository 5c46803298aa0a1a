"""Turn each task's mixture into its prediction."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from mtl.checks import require
from mtl.experts.dense import StackedDense, StackedLinear
from mtl.gates.joined import task_key
from mtl.options import Count, Dropout, validated
from mtl.types import TaskSpec
from mtl.types.task_tensors import TaskTensors, find_places, group_by


class Heads(nn.Module):
    """One head per task, stacked: ``units`` dense layers with dropout, then an output layer.

    Tasks with the same number of outputs share one batched product. A multiclass task has C outputs, one
    with quantiles has Q, others have 1.
    """

    @validated
    def __init__(
        self, tasks: Sequence[TaskSpec], input_dim: Count, units: Sequence[Count] = (), dropout: Dropout = 0.0
    ) -> None:
        super().__init__()
        tokens = [task.name for task in tasks if task.kind == "span" or task.marked]
        only = "of the networks, only transformer has tasks of kind span or with marked words"
        require(not tokens, f"task {', '.join(tokens)}: {only}")
        self.tasks = list(tasks)
        self.input_dim, self.units, self.dropout = input_dim, list(units), dropout
        self.hidden = StackedDense(len(self.tasks), input_dim, units, dropout)
        # By number of outputs, the indices of the tasks with that number
        self.members = group_by(range(len(self.tasks)), lambda task: self.tasks[task].outputs)
        self.row = {task: row for members in self.members.values() for row, task in enumerate(members)}  # in its group
        self.output = nn.ModuleDict(
            {
                str(width): StackedLinear(len(rows), self.hidden.output_dim, width)
                for width, rows in self.members.items()
            }
        )

    def forward(self, x: Tensor, task_ids: Sequence[int]) -> TaskTensors:
        """Map ``x [B, len(task_ids), H]``, or ``[B, 1, H]`` for all, to predictions by name, ``[B]`` or ``[B, C]``."""
        hidden = self.features(x, task_ids)
        tasks, blocks = [self.tasks[task] for task in task_ids], []
        columns_by_width = group_by(range(len(tasks)), lambda column: tasks[column].outputs)
        for width, columns in columns_by_width.items():
            rows = [self.row[task_ids[column]] for column in columns]
            taken = hidden if hidden.shape[1] == 1 or len(columns) == len(tasks) else hidden[:, columns]
            subset = None if len(rows) == len(self.members[width]) else rows
            outputs = self.output[str(width)](taken, subset)  # [B, columns, width]
            blocks.append(outputs.squeeze(-1) if width == 1 else outputs)
        names = [[tasks[column].name for column in columns] for columns in columns_by_width.values()]
        return TaskTensors(find_places(names, [task.name for task in tasks]), blocks)

    def features(self, x: Tensor, task_ids: Sequence[int]) -> Tensor:
        """Return what the output layers read, ``[B, t, H']`` for the t ``task_ids``, after the dense layers, if any."""
        if not self.units:
            return x
        hidden: Tensor = self.hidden(x, None if len(task_ids) == len(self.tasks) else task_ids)
        return hidden

    def extra_repr(self) -> str:
        """Return the outputs of each task and the number of inputs, as ``print`` shows them."""
        return f"{{{', '.join(f'{task.name}: {task.outputs}' for task in self.tasks)}}}, inputs={self.input_dim}"

    def task_parameters(self) -> dict[nn.Parameter, Sequence[int]]:
        """Return all parameters, each with the indices of the tasks that its rows belong to."""
        parameters: dict[nn.Parameter, Sequence[int]] = dict.fromkeys(self.parameters(), range(len(self.tasks)))
        parts = ((self.members[int(width)], part) for width, part in self.output.items())
        return parameters | {parameter: members for members, part in parts for parameter in part.parameters()}

    @torch.no_grad()
    def only(self, task: int) -> Heads:
        """Return the head of one task, with copies of its parameters."""
        spec = self.tasks[task]
        head = Heads([spec], self.input_dim, self.units, self.dropout)
        for new, old in zip(head.hidden.parameters(), self.hidden.parameters(), strict=True):
            new.copy_(old[[task]]).requires_grad_(old.requires_grad)
        for new, old in zip(head.output.parameters(), self.output[str(spec.outputs)].parameters(), strict=True):
            new.copy_(old[[self.row[task]]]).requires_grad_(old.requires_grad)
        return head.train(self.training)


class HeadPerTask(nn.ModuleDict):
    """One head of each task, with parameters of its own, for batches of one task: a step changes no other head.

    With stacked parameters, momentum and weight decay would also change the rows of tasks that get no gradient.
    ``heads``: the ``Heads`` of one task, by the names of all tasks.
    """

    def __init__(self, heads: Mapping[str, Heads]) -> None:
        super().__init__({task_key(name): head for name, head in heads.items()})

    def forward(self, x: Tensor, task_ids: Sequence[int]) -> dict[str, Tensor]:
        """See ``Heads``."""
        predictions: dict[str, Tensor] = {}
        heads = list(self.values())
        for column, task in enumerate(task_ids):
            predictions |= heads[task](x[:, [column]] if x.shape[1] > 1 else x, [0])
        return predictions

    def task_parameters(self) -> dict[nn.Parameter, Sequence[int]]:
        """See ``Heads``."""
        return {parameter: [task] for task, head in enumerate(self.values()) for parameter in head.parameters()}

    def only(self, task: int) -> Heads:
        """Return a copy of the head of one task."""
        head = copy.deepcopy(list(self.values())[task])
        assert isinstance(head, Heads)
        return head


@validated
def heads_per_task(
    tasks: Sequence[TaskSpec], input_dim: Count, units: Sequence[Count] = (), dropout: Dropout = 0.0
) -> HeadPerTask:
    """Return the heads of ``Heads`` as one for each task."""
    return HeadPerTask({task.name: Heads([task], input_dim, units, dropout) for task in tasks})


class NoHeads(nn.Module):
    """No heads: the prediction of a task is its mixture, or the sum of the mixture's numbers if there are several."""

    @validated
    def __init__(self, tasks: Sequence[TaskSpec], input_dim: Count) -> None:
        super().__init__()
        many = [f"{task.name} ({task.loss or task.kind})" for task in tasks if task.outputs > 1 or task.kind == "span"]
        require(not many, f"heads: SumHeads gives one number a task, too little for {', '.join(many)}")
        self.tasks, self.input_dim = list(tasks), input_dim

    def forward(self, x: Tensor, task_ids: Sequence[int]) -> Mapping[str, Tensor]:
        """Map ``x [B, len(task_ids), H]``, or ``[B, 1, H]`` for all, to predictions by name, ``[B]``."""
        totals = (x.squeeze(-1) if self.input_dim == 1 else x.sum(-1)).expand(-1, len(task_ids))
        names = [self.tasks[task].name for task in task_ids]
        return TaskTensors(find_places([names], names), [totals])

    def task_parameters(self) -> dict[nn.Parameter, Sequence[int]]:
        """Return no parameters, since there are none."""
        return {}

    def only(self, task: int) -> NoHeads:
        """Return the same for one task."""
        return NoHeads([self.tasks[task]], self.input_dim)

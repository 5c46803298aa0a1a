"""The methods of every model of a table's inputs, and the simplest model: a constant."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import ClassVar, Self

import torch
from torch import Tensor

from mtl.nn.functional import KeepsBufferPrecision
from mtl.types import Bag, Batch, Categorical, InputSpec, Numeric, TaskSpec

HELD_OUT = 5  # without validation rows, every fifth training row


class TableModel(KeepsBufferPrecision, ABC):
    """Predict what a network would output, from the inputs of a table.

    So the same code computes losses and metrics of all. ``tasks``: those to predict, with their ``TaskSpec.constant``.
    ``columns``: the inputs by name, as in ``DataSpec.inputs``; those that the model does not read are left out. All
    that was learnt is in ``state_dict()``, and to predict needs torch alone.
    """

    reads: ClassVar[tuple[type[InputSpec], ...]] = (Categorical, Bag, Numeric)
    deadline = math.inf  # by time.monotonic(): when a fit ends with what it has
    left_out: Set[str] = frozenset()  # the names of the tasks for which there was no time

    def __init__(self, tasks: Iterable[TaskSpec], columns: Mapping[str, InputSpec]) -> None:
        super().__init__()
        self.tasks = list(tasks)
        self.columns = {name: column for name, column in columns.items() if self.can_read(column)}

    @classmethod
    def can_read(cls, column: InputSpec) -> bool:
        return isinstance(column, cls.reads)

    @abstractmethod
    def fit(self, train: Batch, valid: Batch | None = None) -> Self:
        """Learn from the rows of ``train`` and return the model; a second call learns anew.

        ``valid``: rows that choose a penalty or stop the growth of trees; without them every fifth row of ``train``.
        """

    @abstractmethod
    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs of each task, ``[B]`` or ``[B, outputs]``: logits, or values in standard units."""

    def load_learned(self, state: Mapping[str, Tensor]) -> None:
        """Predict as the model of the same tasks and columns whose ``state_dict()`` is ``state``."""
        for name, value in state.items():
            self.register_buffer(name, value)


class Constant(TableModel):
    """Predict ``TaskSpec.constant`` for each row; there is nothing to learn."""

    def fit(self, train: Batch, valid: Batch | None = None) -> Self:
        return self

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        first = next(iter(inputs.values()))
        return split_outputs(self.tasks, join_constants(self.tasks).to(first.device).expand(len(first), -1))


def hold_out(train: Batch, valid: Batch | None) -> tuple[Batch, Batch]:
    """Return ``train`` and ``valid``, for which every fifth row of ``train`` stands in if there is none."""
    if valid is not None:
        return train, valid
    index = torch.arange(len(train))
    return train.select(index[index % HELD_OUT != 0]), train.select(index[::HELD_OUT])


def join_constants(tasks: Iterable[TaskSpec]) -> Tensor:
    """Return the constants of all tasks in a row, ``[outputs]``."""
    return torch.tensor([number for task in tasks for number in task.constant])


def split_outputs(tasks: Sequence[TaskSpec], values: Tensor) -> dict[str, Tensor]:
    """Return the outputs of the tasks, ``[B]`` or ``[B, outputs]``, from those of all in a row ``[B, sum]``."""
    parts = values.split([task.outputs for task in tasks], -1)
    return {task.name: part[:, 0] if task.outputs == 1 else part for task, part in zip(tasks, parts, strict=True)}


def join_columns(columns: Mapping[str, InputSpec], inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the ids of all ``columns``, ``[B, ids]``, and the numbers ``[B, width]``.

    A list has a column for each of its elements.
    """
    first = next(iter(inputs.values()))
    ids, numbers = [first.new_zeros(len(first), 0, dtype=torch.long)], [first.new_zeros(len(first), 0).float()]
    for name, column in columns.items():
        if isinstance(column, Numeric):
            numbers.append(inputs[name].float())
        else:
            ids.append(inputs[name].long().unsqueeze(-1).flatten(1))
    return torch.cat(ids, 1), torch.cat(numbers, 1)

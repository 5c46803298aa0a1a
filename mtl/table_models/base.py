"""The methods of every model of a table's inputs, and the simplest model: a constant."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from mtl.types import Bag, Categorical, InputSpec, Numeric, TaskSpec

Tensors = Mapping[str, Tensor]  # by the name of an input or a task


class TableModel(ABC):
    """Predict what a network would output, from the inputs of a table.

    So the same code computes losses and metrics of all. ``tasks``: those to predict, with their ``TaskSpec.constant``.
    ``columns``: the inputs by name, as in ``DataSpec.inputs``; those that the model does not read are left out.
    """

    reads: ClassVar[tuple[type[InputSpec], ...]] = (Categorical, Bag, Numeric)

    def __init__(self, tasks: Iterable[TaskSpec], columns: Mapping[str, InputSpec]) -> None:
        self.tasks = list(tasks)
        self.columns = {name: column for name, column in columns.items() if isinstance(column, self.reads)}

    @abstractmethod
    def fit(self, inputs: Tensors, targets: Tensors, weights: Tensors | None = None) -> Self:
        """Learn from training rows and return the model; a second call learns anew. Arguments are as in ``Batch``."""

    @abstractmethod
    def predict(self, inputs: Tensors) -> dict[str, Tensor]:
        """Return the outputs of each task, ``[B]`` or ``[B, outputs]``: logits, or values in standard units."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what was learnt, as tensors, texts, lists and dicts, which ``torch.load(weights_only=True)`` reads."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Predict as the model of the same tasks and columns that returned ``state``."""


class Constant(TableModel):
    """Predict ``TaskSpec.constant`` for each row; there is nothing to learn."""

    def fit(self, inputs: Tensors, targets: Tensors, weights: Tensors | None = None) -> Self:
        return self

    def predict(self, inputs: Tensors) -> dict[str, Tensor]:
        constants = torch.tensor([number for task in self.tasks for number in task.constant])
        return split_outputs(self.tasks, constants.expand(len(next(iter(inputs.values()))), -1))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def split_outputs(tasks: Sequence[TaskSpec], values: Tensor) -> dict[str, Tensor]:
    """Return the outputs of the tasks, ``[B]`` or ``[B, outputs]``, from those of all in a row ``[B, sum]``."""
    parts = values.split([task.outputs for task in tasks], -1)
    return {task.name: part[:, 0] if task.outputs == 1 else part for task, part in zip(tasks, parts, strict=True)}


def join_columns(columns: Mapping[str, InputSpec], inputs: Tensors) -> tuple[Tensor, Tensor]:
    """Return the ids of all ``columns``, ``[B, ids]``, and the numbers ``[B, width]``.

    Columns share no id. A list has a column for each of its elements, with -1 for padding.
    """
    num_rows, first = len(next(iter(inputs.values()))), 0
    ids, numbers = [torch.zeros(num_rows, 0, dtype=torch.long)], [torch.zeros(num_rows, 0)]
    for name, column in columns.items():
        values = inputs[name].cpu()
        if isinstance(column, Numeric):
            numbers.append(values.float())
        elif isinstance(column, Categorical | Bag):
            padding = values.eq(0) if isinstance(column, Bag) else torch.zeros_like(values, dtype=torch.bool)
            ids.append((values.long() + first).masked_fill(padding, -1).reshape(num_rows, -1))
            first += column.size
    return torch.cat(ids, 1), torch.cat(numbers, 1)

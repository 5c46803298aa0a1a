"""A linear model of ids, lists of ids and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from mtl.table_models.base import TableModel, Tensors, join_columns, split_outputs
from mtl.training.losses import task_loss_sums

STEPS = 50  # iterations of L-BFGS


class Linear(TableModel):
    """A weight for each id and each number, and a bias, for each of the O outputs of all tasks.

    The fit minimises the sum of the tasks' mean losses plus |w|^2 / (2 N) of the weights w with N rows, as a ridge or a
    logistic regression does. The weight of ids that the rows do not have is 0.
    """

    ids: Tensor  # [V] of the rows, ascending
    table: Tensor  # [V + 1, O] their weights; the first row is for unknown ids and padding
    weight: Tensor  # [width, O] of the numbers
    bias: Tensor  # [O]

    def fit(self, inputs: Tensors, targets: Tensors, weights: Tensors | None = None) -> Self:
        ids, numbers = join_columns(self.columns, inputs)
        self.ids = ids[ids >= 0].unique()
        self.bias = torch.tensor([number for task in self.tasks for number in task.constant], dtype=torch.double)
        self.table = self.bias.new_zeros(len(self.ids) + 1, len(self.bias))
        self.weight = self.bias.new_zeros(numbers.shape[1], len(self.bias))
        places, tasks_by_name = self._places(ids), {task.name: task for task in self.tasks}
        parameters = [parameter.requires_grad_() for parameter in (self.bias, self.table, self.weight)]
        optimizer = torch.optim.LBFGS(parameters, max_iter=STEPS, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            _, totals, counts = task_loss_sums(tasks_by_name, self._outputs(places, numbers), targets, weights)
            size = (self.table.square().sum() + self.weight.square().sum()) / (2 * len(ids))
            value: Tensor = (totals / counts.clamp(min=1)).sum() + size
            value.backward()
            return value

        optimizer.step(loss)
        for parameter in parameters:
            parameter.requires_grad_(False)
        return self

    def predict(self, inputs: Tensors) -> dict[str, Tensor]:
        ids, numbers = join_columns(self.columns, inputs)
        return {name: value.float() for name, value in self._outputs(self._places(ids), numbers).items()}

    def state_dict(self) -> dict[str, Any]:
        return {"ids": self.ids, "table": self.table, "weight": self.weight, "bias": self.bias}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.ids, self.table, self.weight, self.bias = (state[name] for name in ("ids", "table", "weight", "bias"))

    def _places(self, ids: Tensor) -> Tensor:
        """Return the row of ``table`` of each id, in the shape of ``ids``."""
        if not len(self.ids):
            return torch.zeros_like(ids)
        place = torch.searchsorted(self.ids, ids).clamp(max=len(self.ids) - 1)
        return torch.where(self.ids[place] == ids, place + 1, 0)

    def _outputs(self, places: Tensor, numbers: Tensor) -> dict[str, Tensor]:
        values = self.bias + numbers.double() @ self.weight
        if places.shape[1]:
            values = values + F.embedding_bag(places, self.table, mode="sum", padding_idx=0)
        return split_outputs(self.tasks, values)

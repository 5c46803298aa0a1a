"""A linear model of ids, lists of ids and numbers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Self

import numpy as np
import scipy  # imports its parts at their first use
import torch
import torch.nn.functional as F
from torch import Tensor

from mtl.table_models.base import TableModel, hold_out, join_columns, join_constants, split_outputs
from mtl.training.losses import task_loss_sums
from mtl.types import Bag, Batch, Categorical, InputSpec, TaskSpec

STEPS = 50  # iterations of L-BFGS for each penalty; half as many, in float32, for more than MANY weights
MANY = 200_000
PENALTIES = (1000.0, 100.0, 10.0, 1.0)


class Product(torch.autograd.Function):
    """The product ``[N, O]`` of scipy's sparse ``x [N, V]``, given with its transpose, and ``w [V, O]``.

    With 10,000 rows of 8 ids and 2 outputs, it took .33 ms where torch's sparse product took 7.3.
    """

    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Any, transposed: Any) -> Tensor:
        ctx.transposed = transposed
        return torch.from_numpy(x @ w.numpy())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return torch.from_numpy(ctx.transposed @ gradient.contiguous().numpy()), None, None


class Linear(TableModel):
    """A weight for each id and each number, and a bias, for each of the O outputs of all tasks.

    The fit minimises the sum of the tasks' mean losses plus c |w|^2 / (2 N) of the weights w with N rows, as a ridge or
    a logistic regression does; of ``PENALTIES`` c, each task has the one with the lowest loss in the validation rows.
    The weight of ids that the rows do not have is 0.
    """

    row: Tensor  # [ids of all columns] of ``table``, for each id
    table: Tensor  # [V + 1, O] weights of the ids of the rows; the first row is for all other ids and padding
    weight: Tensor  # [width, O] of the numbers
    bias: Tensor  # [O]
    start: Tensor  # [ids of a row] the ids of a column begin with in ``row``

    def __init__(self, tasks: Iterable[TaskSpec], columns: Mapping[str, InputSpec]) -> None:
        super().__init__(tasks, columns)
        self.size, start, self.padding = 0, list[int](), list[int]()
        for column in self.columns.values():
            if isinstance(column, Categorical | Bag):
                start += [self.size] * (column.length if isinstance(column, Bag) else 1)
                self.padding += [self.size] * isinstance(column, Bag)
                self.size += column.size
        self.register_buffer("start", torch.tensor(start, dtype=torch.long), persistent=False)

    def fit(self, train: Batch, valid: Batch | None = None) -> Self:
        train, valid = hold_out(train, valid)
        ids, numbers = join_columns(self.columns, train.inputs)
        bias = join_constants(self.tasks).double()
        occurs = torch.zeros(self.size, dtype=torch.bool)
        occurs[(ids + self.start).flatten()] = True
        occurs[self.padding] = False
        height, steps = int(occurs.sum()) + 1, STEPS
        if height * len(bias) > MANY:
            bias, steps = bias.float(), STEPS // 2
        table, weight = bias.new_zeros(height, len(bias)), bias.new_zeros(numbers.shape[1], len(bias))
        super().load_learned({"row": occurs.cumsum(0) * occurs, "table": table, "weight": weight, "bias": bias})
        x, numbers = self._sparse(ids, table), numbers.to(bias.dtype)
        parameters = {"bias": bias, "table": table, "weight": weight}
        best, lowest = dict[str, Tensor](), torch.tensor(torch.inf)
        for penalty in PENALTIES:  # each begins at the solution of the one before
            if best and time.monotonic() > self.deadline:
                break
            optimizer = torch.optim.LBFGS(parameters.values(), max_iter=steps, line_search_fn="strong_wolfe")

            def loss(optimizer: Any = optimizer, penalty: float = penalty) -> Tensor:
                optimizer.zero_grad()
                size = (table.square().sum() + weight.square().sum()) / (2 * len(ids))
                sums: Any = Product.apply(table, *x)  # type: ignore[no-untyped-call]  # torch gives no types for it
                values = self.bias + numbers @ self.weight + sums
                value = self._losses(values, train).nansum() + penalty * size
                value.backward()
                return value

            for parameter in parameters.values():
                parameter.requires_grad_()
            optimizer.step(loss)
            for parameter in parameters.values():
                parameter.requires_grad_(False)
            losses = self._losses(self._outputs(*join_columns(self.columns, valid.inputs)), valid)
            losses = losses.nan_to_num(penalty)  # without labels the last penalty, the smallest, is the best
            losses = losses.repeat_interleave(torch.tensor([task.outputs for task in self.tasks]))
            best = {n: torch.where(losses < lowest, value, best.get(n, value)) for n, value in parameters.items()}
            lowest = losses.minimum(lowest)
        self.load_learned({name: value.float() for name, value in best.items()})
        self.left_out = {task.name for task in self.tasks if time.monotonic() > self.deadline}
        return self

    def _sparse(self, ids: Tensor, table: Tensor) -> tuple[Any, Any]:
        """Return how often each row has each id of ``table`` but the first, ``[N, V + 1]``, and the transpose."""
        columns = self.row[ids + self.start]
        row, index = columns.nonzero(as_tuple=True)
        ones = np.ones(len(row), table.numpy().dtype)
        x = scipy.sparse.csr_array((ones, (row, columns[row, index])), shape=(len(ids), len(table)))
        return x, x.T.tocsr()

    def _losses(self, values: Tensor, rows: Batch) -> Tensor:
        """Return the mean loss of each task, ``[T]``, of the outputs ``values [B, O]``."""
        tasks_by_name = {task.name: task for task in self.tasks}
        outputs = split_outputs(self.tasks, values)
        names, totals, counts = task_loss_sums(tasks_by_name, outputs, rows.targets, rows.weights)
        means = dict(zip(names, totals / counts, strict=True))  # NaN without labels
        return torch.stack([means[name] for name in tasks_by_name])

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return split_outputs(self.tasks, self._outputs(*join_columns(self.columns, inputs)))

    def _outputs(self, ids: Tensor, numbers: Tensor) -> Tensor:
        """Return the outputs of all tasks in a row, ``[B, O]``."""
        values = self.bias + numbers.to(self.bias.dtype) @ self.weight
        if ids.shape[1]:
            values = values + F.embedding_bag(self.row[ids + self.start], self.table, mode="sum", padding_idx=0)
        return values

"""Gradient-boosted trees of ids and numbers."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from mtl.chains import chain
from mtl.table_models.base import HELD_OUT, TableModel, hold_out, join_columns, split_outputs
from mtl.table_models.forest import Forest, Tree, forest_state
from mtl.types import Bag, Batch, Categorical, InputSpec, Numeric, TaskSpec, has_label

TREES = 2000  # for each output, at most
MIN_LABELS = 25  # LightGBM divides fewer only with more than a fifth of them
FEW = 0.1  # part of the rows with a label below which the trees of a task also read what is predicted for others
FOLDS = 5
MAX_TASKS = 32  # of which the trees of some read what is predicted for others
MAX_LIST_IDS = 4096  # of all lists that trees read: each is a column


class Rows(NamedTuple):
    """Labelled rows of a task, as arrays. Those that are ``held`` stop the growth of trees."""

    ids: Any  # [N, D]
    numbers: Any  # [N, width]
    y: Any  # [N], classes or values in standard units
    weight: Any  # [N]
    held: Any  # [N]


class Trees(TableModel):
    """Trees for each task by itself, those with the most labels first; at the deadline, the others are left out.

    Of a column that is both ids and a number, they read the number; of a list, whether it has each of its ids, if
    those of the lists up to it are at most ``MAX_LIST_IDS``.
    A task with fewer than ``MIN_LABELS`` labels, or with equal ones, is predicted as constant. The trees of a task with
    a label in fewer than a tenth of the rows also read the outputs of the trees of the other tasks (in training rows,
    those of trees grown without the row), if some have more and the tasks are few.
    """

    reads = (Categorical, Bag, Numeric)

    @classmethod
    def can_read(cls, column: InputSpec) -> bool:
        return super().can_read(column) and not (isinstance(column, Bag) and column.size > MAX_LIST_IDS)

    def __init__(self, tasks: Iterable[TaskSpec], columns: Mapping[str, InputSpec]) -> None:
        numbers = {name for column in columns.values() if isinstance(column, Numeric) for name in column.columns}
        super().__init__(tasks, {name: column for name, column in columns.items() if name not in numbers})
        sums = accumulate(column.size if isinstance(column, Bag) else 0 for column in self.columns.values())
        pairs = zip(self.columns.items(), sums, strict=True)
        self.columns = {n: c for (n, c), ids in pairs if ids <= MAX_LIST_IDS or not isinstance(c, Bag)}

    @abstractmethod
    def grow(self, task: TaskSpec, rows: Rows) -> tuple[list[tuple[int, Tree]], Sequence[float]]:
        """Return trees, each with the index of its output among those of the task, and a bias for each output."""

    def fit(self, train: Batch, valid: Batch | None = None) -> Self:
        train, valid = parts = hold_out(train, valid)
        ids, numbers = map(torch.cat, zip(*(self._join(part.inputs) for part in parts), strict=True))
        targets = {task.name: torch.cat([part.targets[task.name] for part in parts]) for task in self.tasks}
        weights = {name: torch.cat([part.weights[name] for part in parts]) for name in train.weights}
        index = torch.arange(len(ids))
        held = index >= len(train)
        rows = Batch({"ids": ids, "numbers": numbers, "held": held}, targets, weights)
        counts = {task.name: int(has_label(task, train.targets[task.name]).sum()) for task in self.tasks}
        limit = FEW * len(train)
        names = {name for name, count in counts.items() if MIN_LABELS <= count < limit <= max(counts.values())}
        names = names if len(self.tasks) <= MAX_TASKS else set()
        self.order, self.left_out = sorted(self.tasks, key=lambda task: -counts[task.name]), {*counts}
        self.forests = nn.ModuleList([self._grow_all({*counts} - names, rows)])
        if names:
            outputs, growing = self.forests[0](ids, numbers).float(), index[~held]
            for fold in (growing[start::FOLDS] for start in range(FOLDS)):
                others = rows.select(index[~torch.isin(index, fold)])
                outputs[fold] = self._grow_all({*counts} - names, others)(ids[fold], numbers[fold]).float()
            rows.inputs["numbers"] = torch.cat([numbers, outputs], 1)
            self.forests.append(self._grow_all(names, rows))
        by_name = {task.name: task for task in self.tasks}
        self.left_out = {t.name for t in self.tasks if self.left_out & {earlier.name for earlier in chain(t, by_name)}}
        left_out = torch.tensor([task.name in self.left_out for task in self.tasks])
        self.forests[0].register_buffer("left_out", left_out)
        return self

    def _join(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the ids ``[B, D]`` and the numbers ``[B, width]``, with a 1 for each id that a list has."""
        lists = {name: column for name, column in self.columns.items() if isinstance(column, Bag)}
        ids, numbers = join_columns({n: column for n, column in self.columns.items() if n not in lists}, inputs)
        multi_hot = [numbers.new_zeros(len(ids), c.size).scatter(1, inputs[n].long(), 1.0) for n, c in lists.items()]
        return ids, torch.cat([numbers, *(of_list[:, 1:] for of_list in multi_hot)], 1)  # id 0 fills up lists

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        ids, numbers = self._join(inputs)
        outputs: Tensor = self.forests[0](ids, numbers)
        if len(self.forests) > 1:
            outputs = outputs + self.forests[1](ids, torch.cat([numbers, outputs.float()], 1))
        return split_outputs(self.tasks, outputs.float())

    def load_learned(self, state: Mapping[str, Tensor]) -> None:
        forests: dict[str, dict[str, Tensor]] = {}
        for name, value in state.items():
            forest, key = name.rsplit(".", 1)
            forests.setdefault(forest, {})[key] = value
        self.forests = nn.ModuleList(map(Forest, forests.values()))
        if (left_out := state.get("forests.0.left_out")) is None:  # of an earlier version: its trees read no lists
            self.columns = {name: column for name, column in self.columns.items() if not isinstance(column, Bag)}
        else:
            self.left_out = {task.name for task, late in zip(self.tasks, left_out.tolist(), strict=True) if late}

    def _grow_all(self, names: set[str], rows: Batch) -> Forest:
        """Return the trees of the tasks of these ``names``; for others they give 0."""
        trees, biases = list[tuple[str, int, Tree]](), {task.name: [0.0] * task.outputs for task in self.tasks}
        for task in (task for task in self.order if task.name in names):
            biases[task.name] = [*task.constant]
            if time.monotonic() > self.deadline:
                continue
            labelled = _labelled(task, rows)
            has_variation = len(np.unique(labelled.y[~labelled.held])) > 1
            has_weight = all(labelled.weight[part].sum() > 0 for part in (labelled.held, ~labelled.held))
            if len(labelled.y) >= MIN_LABELS and has_variation and has_weight:
                new, bias = self.grow(task, labelled)
                trees += [(task.name, *tree) for tree in new]
                biases[task.name] = [*bias]
            if time.monotonic() <= self.deadline:
                self.left_out -= {task.name}
        starts = dict(zip(biases, np.cumsum([0, *map(len, biases.values())]).tolist(), strict=False))
        placed = [(starts[name] + output, tree) for name, output, tree in trees]
        return Forest(forest_state(placed, [number for bias in biases.values() for number in bias]))


def _labelled(task: TaskSpec, rows: Batch) -> Rows:
    """Return the labelled rows of ``task``; those that stop trees have no class that the others lack."""
    rows = rows.select(has_label(task, rows.targets[task.name]).nonzero()[:, 0])
    y, held = rows.targets[task.name], rows.inputs["held"]
    if not held.any():
        held = torch.arange(len(y)) % HELD_OUT == 0
    if task.kind == "regression":  # of a Poisson loss, the rate in units of the mean
        y = y / torch.tensor(task.mean).exp() if task.loss == "poisson" else task.standardize(y)
    kept = ~held | torch.isin(y, y[~held]) if task.kind != "regression" else torch.ones_like(held)
    weight = rows.weights.get(task.name, torch.ones(len(y)))
    if task.kind == "binary":
        weight = weight * torch.where(y == 1, task.pos_weight, 1.0)
    elif task.class_weights:
        weight = weight * torch.tensor(task.class_weights)[y]
    arrays = (rows.inputs["ids"], rows.inputs["numbers"], y, weight, held)
    return Rows(*(array[kept].numpy() for array in arrays))

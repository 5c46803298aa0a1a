"""The rows of a training step or of a part of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mtl.checks import join_names, require
from mtl.nn.functional import has_float64
from mtl.types.task_tensors import TaskTensors, map_tasks
from mtl.types.tasks import MISSING_CLASS, TaskSpec


class Batch:
    """A batch: ``inputs[name]: [B, ...]`` and ``targets[task]: [B]``, with only the tasks that this batch is for.

    The target of a span task is ``[B, 2]``: the answer's first and last token, counted from 0 in the row; both are 0,
    the first token of the row, where there is no answer. A missing label is NaN in float targets and ``MISSING_CLASS``
    in class targets and (twice) in spans.

    ``weights[task] [B]`` multiply the losses of the rows, if given; their mean over the labelled rows of a split should
    be 1, so that the mean loss of the split is the weighted mean. ``groups [B]``, int64: the group, such as the user,
    whose rows the metrics of ``RANKING`` compare; negative if a row has none. ``row_ids [B]``, int64: the number of
    each row in its split, or in the rows of its task if tasks have rows of their own; in evaluation.

    With hundreds of tasks, ``targets`` and ``weights`` should be ``TaskTensors``, see ``in_blocks``.

    This is not a dataclass, since Lightning converts all numbers in dataclasses to the trainer's precision, which would
    round labels and weights (257 becomes 256 in bfloat16). ``with_inputs_as`` converts only the inputs.
    """

    def __init__(
        self,
        inputs: dict[str, Tensor],
        targets: Mapping[str, Tensor],
        weights: Mapping[str, Tensor] | None = None,
        groups: Tensor | None = None,
        row_ids: Tensor | None = None,
    ) -> None:
        self.inputs, self.targets, self.weights, self.groups = inputs, targets, weights or {}, groups
        self.row_ids = row_ids

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def select(self, index: Tensor) -> Batch:
        """Return the rows of ``index [N]`` as a new batch."""
        return self._map(lambda value: value.index_select(0, index))

    def in_blocks(self) -> Batch:
        """Return the batch with ``TaskTensors`` as targets and weights."""
        targets, weights = map(TaskTensors.stack, (self.targets, self.weights))
        return Batch(self.inputs, targets, weights, self.groups, self.row_ids)

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors, of ``TaskTensors`` the blocks."""
        yield from self.inputs.values()
        for part in (self.targets, self.weights):
            yield from part.blocks if isinstance(part, TaskTensors) else part.values()
        yield from (value for value in (self.groups, self.row_ids) if value is not None)

    def is_on(self, device: torch.device) -> bool:
        """Return whether all tensors are on ``device``."""
        return all(value.device == device for value in self.tensors())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return the batch on ``device``; Lightning calls this before each step."""
        narrow = not has_float64(torch.device(device))

        def moved(value: Tensor) -> Tensor:
            value = value.float() if narrow and value.dtype == torch.float64 else value
            return value.to(device, non_blocking=non_blocking)

        return self._map(moved)

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory; the DataLoader calls this when asked to pin."""
        return self._map(Tensor.pin_memory)

    def with_inputs_as(self, dtype: torch.dtype) -> Batch:
        """Return the batch with floating-point inputs of type ``dtype``, and all else as it is."""
        inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in self.inputs.items()}
        return Batch(inputs, self.targets, self.weights, self.groups, self.row_ids)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with each of its tensors changed."""
        inputs = {name: change(value) for name, value in self.inputs.items()}
        groups, row_ids = (None if value is None else change(value) for value in (self.groups, self.row_ids))
        return Batch(inputs, map_tasks(self.targets, change), map_tasks(self.weights, change), groups, row_ids)


def to_batch(rows: Any, tasks: Mapping[str, TaskSpec]) -> Batch:
    """Return ``rows``, a batch or the pair ``({input: tensor}, {task: labels})``, as a batch. Raises InputError."""
    if isinstance(rows, Batch):
        return rows
    is_pair = isinstance(rows, list | tuple) and len(rows) == 2 and all(isinstance(part, Mapping) for part in rows)
    wanted = "a loader must give mtl.types.Batch or pairs of dicts, ({input: tensor}, {task: labels})"
    require(is_pair, f"{wanted}, not a {type(rows).__name__}")
    inputs, labels = rows
    unknown = [name for name in labels if name not in tasks]
    require(not unknown, f"labels of {join_names(unknown)}: {wanted}; the tasks are {join_names(tasks)}")
    targets = {name: _as_labels(value, tasks[name]) for name, value in labels.items()}
    return Batch(dict(inputs), targets)


def _as_labels(values: Tensor, task: TaskSpec) -> Tensor:
    if task.kind == "binary":
        wrong = values[(values != 0) & (values != 1) & ~values.isnan()]
        require(not len(wrong), f"task {task.name!r}: binary labels are 0, 1 or NaN, not {wrong[:1].tolist()}")
    if task.kind not in ("multiclass", "span"):
        return values + 0.0
    return values.nan_to_num(nan=MISSING_CLASS).long() if values.is_floating_point() else values.long()

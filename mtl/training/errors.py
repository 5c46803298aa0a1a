"""Mean errors of all regressions at once: one metric object a task would take longer than the network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mtl.distributed import all_reduce_sum
from mtl.functional import KeepsDigits
from mtl.types import TaskSpec, side_by_side

# From the sums of squares and of absolute values of the errors and the number of labels, [T] each
ERRORS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mse": lambda squares, absolutes, labels: squares / labels,
    "mae": lambda squares, absolutes, labels: absolutes / labels,
    "rmse": lambda squares, absolutes, labels: (squares / labels).sqrt(),
}


class TaskSums(KeepsDigits):
    """Base of sums over this process's rows for each task: ``sums [count, T]``, in float64 where the device has it."""

    sums: Tensor

    def __init__(self, tasks: Sequence[TaskSpec], count: int) -> None:
        super().__init__()
        self.tasks = list(tasks)
        self.index_of = {task.name: index for index, task in enumerate(self.tasks)}
        self.register_buffer("sums", torch.zeros(count, len(self.tasks), dtype=torch.float64), persistent=False)

    def reset(self) -> None:
        self.sums.zero_()


class MeanErrors(TaskSums):
    """The metrics in ``ERRORS`` of regressions, in the units of their targets."""

    def __init__(self, tasks: Sequence[TaskSpec]) -> None:
        super().__init__(tasks, 3)

    def update(self, predictions: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
        """Add a batch: ``predictions[task] [B]``, in standard units, and ``targets[task] [B]``, of any tasks."""
        names = [name for name in predictions if name in self.index_of]
        if not names:
            return
        prediction, target = side_by_side(predictions, names).double(), side_by_side(targets, names).double()  # [n, B]
        index = torch.tensor([self.index_of[name] for name in names], device=prediction.device)
        units = prediction.new_tensor([(self.tasks[task].std, self.tasks[task].mean) for task in index.tolist()])
        mask = ~target.isnan()
        error = torch.where(mask, prediction * units[:, :1] + units[:, 1:] - target, 0.0)
        added = torch.stack([error.square().sum(-1), error.abs().sum(-1), mask.sum(-1).double()])
        self.sums.index_add_(1, index, added)

    def compute(self) -> dict[str, dict[str, float]]:
        """Return the values by metric and task, NaN for a task without a label; every process has to call this."""
        sums = all_reduce_sum(self.sums).unbind()
        return {name: dict(zip(self.index_of, f(*sums).tolist(), strict=True)) for name, f in ERRORS.items()}

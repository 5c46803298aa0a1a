"""Sum the losses of an epoch or of an evaluation, so that means do not depend on the batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtl.distributed import all_reduce_sum, world_size
from mtl.nn.functional import KeepsBufferPrecision, float64_if_supported
from mtl.types import TaskSpec


@dataclass(frozen=True)
class Selected:
    """A selection of N tasks: their indices, as a list and as a tensor ``[N]``, and their ``weights [N]``."""

    task_ids: list[int]
    index: Tensor
    weights: Tensor


class LossMeter(KeepsBufferPrecision):
    """Sum each task's losses over labelled rows, so that the mean does not depend on the batches.

    ``sums [2, T]``: this process's summed losses and numbers of labels, in float64 if the device has it.
    """

    sums: Tensor

    def __init__(self, tasks: Sequence[TaskSpec]) -> None:
        super().__init__()
        self.tasks = list(tasks)
        self.index_of = {task.name: index for index, task in enumerate(self.tasks)}
        self.register_buffer("sums", torch.zeros(2, len(self.tasks), dtype=torch.float64), persistent=False)
        self._selected: dict[tuple[Any, ...], Selected] = {}

    def update(self, names: Sequence[str], totals: Tensor, counts: Tensor) -> None:
        """Add the summed losses and numbers of labels ``[len(names)]`` of a batch of the tasks ``names``."""
        index = self.select(tuple(names), totals).index
        added = torch.stack([float64_if_supported(totals.detach()), float64_if_supported(counts)])
        self.sums.index_add_(1, index, added)

    def select(self, names: tuple[str, ...], like: Tensor) -> Selected:
        """Return the named tasks, on the device and in the precision of ``like``.

        They are cached, since a copy to the device in each step would make the CPU wait.
        """
        key = (names, like.device, like.dtype)
        if key not in self._selected:
            task_ids = [self.index_of[name] for name in names]
            index = torch.tensor(task_ids, device=like.device)
            weights = like.new_tensor([self.tasks[task].weight for task in task_ids])
            self._selected[key] = Selected(task_ids, index, weights)
        return self._selected[key]

    def compute(self) -> dict[str, float]:
        """Return the mean loss by task, and ``loss``, their weighted sum; tasks without a label are left out.

        ``loss`` is NaN if no task with a weight above 0 has a label. The means are over the rows of all processes, so
        every process has to call this.
        """
        sums = zip(self.tasks, all_reduce_sum(self.sums).t().tolist(), strict=True)
        means = {task: loss / count for task, (loss, count) in sums if count}
        weighted = [task.weight * mean for task, mean in means.items() if task.weight]
        return {"loss": sum(weighted) if weighted else math.nan} | {f"{t.name}/loss": mean for t, mean in means.items()}

    def reset(self) -> None:
        self.sums.zero_()


class EpochMeter(LossMeter):
    """Sum also the auxiliary losses of this process, and go on in the middle of an epoch when a run is resumed."""

    def __init__(self, tasks: Sequence[TaskSpec]) -> None:
        super().__init__(tasks)
        self.aux: dict[str, Tensor] = {}  # summed over the batches
        self.batches = 0

    def add_auxiliary(self, losses: Mapping[str, Tensor], parts: int = 1) -> None:
        """Add auxiliary losses by name, those of one of the ``parts`` of a batch."""
        for name, loss in losses.items():
            self.aux[name] = self.aux.get(name, 0.0) + loss.detach() / parts

    def means(self) -> dict[str, Tensor]:
        """Return all means by the names under which they are logged; every process has to call this."""
        aux = {f"train/aux/{name}": all_reduce_sum(x) / world_size() / self.batches for name, x in self.aux.items()}
        return {f"train/{name}": torch.tensor(value) for name, value in self.compute().items()} | aux

    def reset(self) -> None:
        super().reset()
        self.aux, self.batches = {}, 0

    def state(self) -> dict[str, Any]:
        """Return the sums of this process."""
        return {"meter": self.sums, "aux": self.aux, "batches": self.batches}

    def load_states(self, states: Sequence[Mapping[str, Any]], rank: int, num_processes: int) -> None:
        """Take over the sums that process ``rank`` had, or an equal share if the number of processes has changed."""
        if len(states) == num_processes:
            states, num_processes = [states[rank]], 1
        self.sums.copy_(sum(state["meter"] for state in states) / num_processes)
        totals = {name: sum(state["aux"][name] for state in states) / len(states) for name in states[0]["aux"]}
        self.aux = {name: total.to(self.sums.device) for name, total in totals.items()}
        self.batches = states[0]["batches"]

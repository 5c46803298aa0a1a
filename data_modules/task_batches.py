"""Feed tasks that each have their own rows: a step takes a batch of one task, or of several (a super-batch)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from mtl.checks import require
from mtl.nn.seeds import make_generator
from mtl.options import validated
from mtl.types import Batch, DataSpec

from .base import TensorDataModule, check_labels
from .constant_predictions import with_constants
from .samplers import RowsLoader
from .texts.rows import RaggedRows

TaskOrder = Literal["round_robin", "proportional", "temperature", "uniform", "shuffled"]
POOL_BATCHES = 50  # batches whose rows are sorted by length together
Index = tuple[str, Tensor]  # a task and the indices [N] of some of its rows
Rows = Batch | RaggedRows


class TasksDataset(Dataset["Batch | list[Batch]"]):
    """Serve ``rows[task]``: a ``Batch`` for an ``Index``, a list of batches for a list of them.

    ``numbered``: batches have row_ids; rows with numbers of their own keep these.
    """

    def __init__(self, rows: Mapping[str, Rows], numbered: bool = False) -> None:
        self.rows, self.numbered = rows, numbered

    def __len__(self) -> int:
        return sum(len(rows) for rows in self.rows.values())

    def __getitem__(self, index: Index | list[Index]) -> Batch | list[Batch]:
        if isinstance(index, list):
            return [self._batch(item) for item in index]
        return self._batch(index)

    def _batch(self, index: Index) -> Batch:
        task, rows = index
        batch = self.rows[task].select(rows)
        if self.numbered and batch.row_ids is None:
            batch.row_ids = rows
        return batch


class TaskSampler(Sampler["Index | list[Index]"]):
    """Yield the task of each step of an epoch, and this process's row indices of one of the task's batches.

    ``task_order="round_robin"`` goes through all tasks in random order, round after round; an epoch has as many rounds
    as the largest task has batches. The other orders draw the task of each step with probability proportional to n^p,
    where n is the task's number of rows and p is 1 (``proportional``), 1/``temperature`` (``temperature``) or 0
    (``uniform``); an epoch then takes as many batches as all tasks have. A task whose rows are used up is shuffled and
    starts again. ``shuffled`` takes each batch of each task once, in random order.

    If ``tasks_per_step`` > 1, a step is a list of that many items, of different tasks if possible. ``proportional`` and
    ``shuffled`` draw each item independently instead: requiring different tasks would give small tasks a larger share
    than their share of the rows.

    ``lengths[task] [N]`` gives the lengths of a task's rows: its batches then hold rows of similar lengths, see
    ``bucket_rows``.

    The order depends on ``seed`` and the epoch only, and is the same in all processes. ``position()`` returns the epoch
    and the number of its steps that are done. Raises InputError if a task has fewer rows than there are processes.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        batch_size: int,
        seed: int,
        position: Callable[[], tuple[int, int]],
        task_order: str = "round_robin",
        temperature: float = 2.0,
        tasks_per_step: int = 1,
        rank: int = 0,
        world_size: int = 1,
        lengths: Mapping[str, Tensor] | None = None,
    ) -> None:
        for task, size in sizes.items():
            require(size >= world_size, f"task {task}: {size} training rows are fewer than the {world_size} processes")
        self.names, self.sizes = list(sizes), torch.tensor(list(sizes.values()))
        self.size, self.seed, self.position = batch_size * world_size, seed, position
        self.task_order, self.temperature, self.tasks_per_step = task_order, temperature, tasks_per_step
        self.rank, self.world_size, self.epoch = rank, world_size, 0
        self.lengths = dict(lengths or {})
        whole, rest = self.sizes // self.size, self.sizes % self.size
        self.batches = whole + (rest >= world_size).long()  # [T], per pass through a task

    def __len__(self) -> int:
        is_in_turn = self.task_order == "round_robin"
        turns = int(self.batches.max()) * len(self.names) if is_in_turn else int(self.batches.sum())
        return -(-turns // self.tasks_per_step)

    def __iter__(self) -> Iterator[Index | list[Index]]:
        self.epoch, done = self.position()
        turns = self._turns()
        taken = [0] * len(self.names)  # number of batches taken from each task
        passes: dict[int, list[Tensor]] = {}
        for step in range(len(self)):
            items = []
            for task in turns[step * self.tasks_per_step : (step + 1) * self.tasks_per_step].tolist():
                number = taken[task] % int(self.batches[task])
                if number == 0:
                    passes[task] = self._shuffled(task, taken[task] // int(self.batches[task]))
                taken[task] += 1
                if step >= done:
                    items.append((self.names[task], passes[task][number].tensor_split(self.world_size)[self.rank]))
            if step >= done:
                yield items if self.tasks_per_step > 1 else items[0]

    def _turns(self) -> Tensor:
        """Return the index of the task of each item of the epoch, ``[steps * tasks_per_step]``."""
        generator, count = self._generator(0), len(self) * self.tasks_per_step
        tasks = len(self.names)
        if self.task_order == "shuffled":
            batches = torch.arange(tasks).repeat_interleave(self.batches)
            return batches[torch.randperm(len(batches), generator=generator)]
        if self.task_order == "round_robin":
            turns: list[int] = []
            while len(turns) < count:
                # A step may span two rounds: tasks that it already has go to the end of the new round
                begun = turns[len(turns) - len(turns) % self.tasks_per_step :]
                turns += sorted(torch.randperm(tasks, generator=generator).tolist(), key=begun.__contains__)
            return torch.tensor(turns[:count])
        power = {"temperature": 1.0 / self.temperature, "uniform": 0.0}.get(self.task_order, 1.0)
        chances = self.sizes.double().pow(power)
        if self.task_order != "proportional" and self.tasks_per_step <= tasks:  # without replacement inside a step
            steps = chances.expand(len(self), tasks)
            return torch.multinomial(steps, self.tasks_per_step, generator=generator).flatten()
        return torch.multinomial(chances, count, replacement=True, generator=generator)

    def _shuffled(self, task: int, number: int) -> list[Tensor]:
        """Return the row indices of each batch of pass ``number`` through a task."""
        generator = self._generator(1 + task, number)
        order = torch.randperm(int(self.sizes[task]), generator=generator)
        lengths = self.lengths.get(self.names[task])
        if lengths is None:
            return list(order.split(self.size))
        rest = len(order) % self.size
        if rest < self.world_size:  # too few for a batch
            order = order[: len(order) - rest]
        return bucket_rows(order, lengths, self.size, generator)

    def _generator(self, stream: int, number: int = 0) -> torch.Generator:
        return make_generator(self.seed, self.epoch + 1, stream + 1, number + 1)


def bucket_rows(order: Tensor, lengths: Tensor, size: int, generator: torch.Generator) -> list[Tensor]:
    """Cut the rows ``order [N]`` into batches of ``size`` rows of similar lengths; return the batches in random order.

    The rows are cut into pools of ``POOL_BATCHES``. Those of a pool are sorted by ``lengths`` and cut into batches, so
    that little padding is needed and a batch still holds other rows in each pass.
    """
    pools = [pool[lengths[pool].argsort(stable=True)] for pool in order.split(size * POOL_BATCHES)]
    batches = [batch for pool in pools for batch in pool.split(size)]
    return [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]


class TaskEvaluationSampler(Sampler[Index]):
    """Yield every ``world_size``-th batch, starting with batch ``rank``; batches are listed task by task.

    Every row is seen exactly once; those of a task in ``lengths`` are sorted by length. A process with fewer batches
    than the others gets an empty one.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        lengths: Mapping[str, Tensor] | None = None,
    ) -> None:
        orders = {task: torch.arange(size) for task, size in sizes.items()}
        orders |= {task: length.argsort(stable=True) for task, length in (lengths or {}).items()}
        batches = [(task, rows) for task, order in orders.items() for rows in order.split(batch_size)]
        short = -len(batches) % world_size
        self.mine = [*batches, *[(next(iter(sizes)), torch.arange(0))] * short][rank::world_size]

    def __len__(self) -> int:
        return len(self.mine)

    def __iter__(self) -> Iterator[Index]:
        return iter(self.mine)


class TasksDataModule(TensorDataModule):
    """Base class of data sets whose tasks each have their own rows.

    A subclass implements ``load_tasks() -> (DataSpec, {"train", "val", "test"} -> {task -> Batch})``; a task's batch
    has labels of that task only. Rows of different lengths are ``RaggedRows`` in place of a ``Batch``; their batches
    hold rows of similar lengths. For ``task_order``, ``temperature`` and ``tasks_per_step`` see ``TaskSampler``.
    """

    @validated
    def __init__(
        self,
        task_order: TaskOrder = "round_robin",
        temperature: Annotated[float, Field(ge=0.1, le=1e6)] = 2.0,  # below 0.1, n^(1/temperature) may overflow
        tasks_per_step: Annotated[int, Field(ge=1, le=10_000)] = 1,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.task_order, self.temperature, self.tasks_per_step = task_order, temperature, tasks_per_step
        self.tasks: Mapping[str, Mapping[str, Rows]] = {}

    def load_tasks(self) -> tuple[DataSpec, Mapping[str, Mapping[str, Rows]]]:
        """Return the DataSpec and, for train, val and test, the rows of each task."""
        raise NotImplementedError

    def _load(self) -> DataSpec:
        spec, self.tasks = self.load_tasks()
        if "train" not in self.tasks:
            return spec
        targets = {task: rows.targets[task] for task, rows in self.tasks["train"].items()}
        check_labels(spec.tasks, targets)
        return with_constants(spec, targets)

    def row_counts(self) -> dict[str, Any]:
        return {split: {task: len(rows) for task, rows in tasks.items()} for split, tasks in self.tasks.items()}

    def train_dataloader(self) -> RowsLoader:
        rows, (rank, world_size) = self.tasks["train"], self._processes()
        sizes = {task: len(batch) for task, batch in rows.items()}
        options = (self.task_order, self.temperature, self.tasks_per_step, rank, world_size, lengths_by_task(rows))
        size = self._rows_of_step(sum(sizes.values()))
        sampler = TaskSampler(sizes, size, self.shuffle_seed, self._position, *options)
        return RowsLoader(TasksDataset(rows), sampler, self.pin_memory)

    def _evaluation(self, split: str) -> RowsLoader:
        rows = self.tasks[split]
        sizes = {task: len(batch) for task, batch in rows.items()}
        sampler = TaskEvaluationSampler(sizes, self.eval_batch_size, *self._processes(), lengths_by_task(rows))
        return RowsLoader(TasksDataset(rows, numbered=True), sampler, self.pin_memory)


def lengths_by_task(rows: Mapping[str, Rows]) -> dict[str, Tensor]:
    """Return the lengths ``[N]`` of the rows of each task that has rows of different lengths."""
    return {task: ragged.lengths for task, ragged in rows.items() if isinstance(ragged, RaggedRows)}

"""Feed rows to Lightning: choose the rows of each batch in each process. Rows are never collated one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, SequentialSampler

from mtl.checks import require
from mtl.nn.seeds import make_generator
from mtl.types import Batch

Position = Callable[[], tuple[int, int]]  # the epoch, and how many of its batches are done


class RowsDataset(Dataset[Batch]):
    """Serve ``rows`` by index tensors: ``dataset[index [N]]`` is a ``Batch`` of N rows; ``numbered``: with row_ids."""

    def __init__(self, rows: Batch, numbered: bool = False) -> None:
        self.rows, self.numbered = rows, numbered

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Tensor) -> Batch:
        batch = self.rows.select(index)
        batch.row_ids = index if self.numbered else None
        return batch


@dataclass(frozen=True)
class BatchPlan:
    """Cut an order of ``num_rows`` rows into batches, and give process ``rank`` its rows of each batch.

    A global batch is the next ``batch_size * world_size`` rows. In ``training``, the processes divide the last batch
    evenly; it is dropped if it has fewer rows than there are processes. In evaluation, each process takes the next
    ``batch_size`` rows, and the last processes take fewer or none, so that batches and metrics are the same for any
    number of processes. Raises InputError if there are fewer training rows than processes.
    """

    num_rows: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    training: bool = False

    def __post_init__(self) -> None:
        few = f"{self.num_rows} training rows are fewer than the {self.world_size} processes"
        require(not self.training or self.num_rows >= self.world_size, few)

    @property
    def size(self) -> int:
        """The number of rows of a global batch."""
        return self.batch_size * self.world_size

    def __len__(self) -> int:
        whole, rest = divmod(self.num_rows, self.size)
        return whole + (rest >= (self.world_size if self.training else 1))

    def bounds(self, batch: int) -> tuple[int, int]:
        """Return where the rows of this process begin and end in the order."""
        start = batch * self.size
        count = min(self.size, self.num_rows - start)
        if self.training:
            quotient, remainder = divmod(count, self.world_size)
            low = self.rank * quotient + min(self.rank, remainder)
            return start + low, start + low + quotient + (self.rank < remainder)
        low, high = (min(count, number * self.batch_size) for number in (self.rank, self.rank + 1))
        return start + low, start + high

    def within(self, first: int, start: int, stop: int) -> Tensor:
        """Return this process's positions in the range [start, stop) of the order, from batch ``first`` on."""
        batches = range(max(first, start // self.size), min(len(self), -(-stop // self.size)))
        bounds = ((max(low, start), min(high, stop)) for low, high in map(self.bounds, batches))
        parts = [torch.arange(low, high) for low, high in bounds if low < high]
        return torch.cat(parts) if parts else torch.arange(0)


class RowsSampler(Sampler[Tensor]):
    """Yield this process's row indices of each batch of an epoch: in order, or shuffled with ``seed``.

    The order depends on ``seed`` and the epoch only, so a resumed run draws it again. ``position()`` returns the epoch
    and how many of its batches are done; it is called when the first batch is requested.
    """

    def __init__(self, plan: BatchPlan, seed: int | None = None, position: Position = lambda: (0, 0)) -> None:
        self.plan, self.seed, self.position = plan, seed, position

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[Tensor]:
        epoch, done = self.position()
        rows = torch.arange(self.plan.num_rows)
        if self.seed is not None:
            generator = make_generator(self.seed, epoch)
            rows = torch.randperm(self.plan.num_rows, generator=generator)
        for low, high in map(self.plan.bounds, range(done, len(self))):
            yield rows[low:high]


class KeepSampler(SequentialSampler):
    """Yield what ``sampler`` yields.

    For ``trainer.overfit_batches``, Lightning replaces every sampler except a SequentialSampler by one that yields
    numbers. This class keeps ours, which yield batches and repeat them by themselves (see ``_position``).
    """

    def __init__(self, sampler: Sampler[Any]) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]  # our samplers have a length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.sampler)


class Resumable:
    """A loader that can resume within an epoch: the trainer counts the batches that are done."""

    def state_dict(self) -> dict[str, int]:
        """Return nothing; the existence of this method tells Lightning that the loader can resume within an epoch."""
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Do nothing."""


class RowsLoader(Resumable, DataLoader[Any]):
    """Load the batches that the sampler asks for, in the main process; the sampler keeps the position in the epoch."""

    def __init__(self, dataset: Dataset[Any], sampler: Sampler[Any], pin_memory: bool) -> None:
        # A loader draws a seed each epoch; without its own generator it would advance the global one, as for dropout
        generator, sampler = torch.Generator(), KeepSampler(sampler)
        super().__init__(dataset, sampler=sampler, batch_size=None, pin_memory=pin_memory, generator=generator)


class Batches:
    """Yield the batches of ``loader``, for prediction.

    For prediction, Lightning rebuilds each DataLoader with a sampler that records the rows of a batch. This class is
    not a DataLoader, so Lightning leaves it unchanged.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

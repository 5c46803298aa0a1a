"""Feed in-memory tensors to Lightning: whole batches are sliced by index, rows are never collated one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from mtl.types import Batch, DataSpec, require


class RowsDataset(Dataset[Batch]):
    """Serve ``rows`` by index tensors: ``dataset[index [N]]`` is a ``Batch`` of N rows."""

    def __init__(self, rows: Batch) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Tensor) -> Batch:
        return self.rows.select(index)


class TrainingSampler(Sampler[Tensor]):
    """Yield the row indices ``[<= batch_size]`` of this process's part of one batch after the other.

    The order is a function of ``seed`` and of the epoch alone, so that it can be drawn again. ``position()`` tells
    the epoch and how many of its batches are done; it is asked when the first batch is. A batch is the next
    ``batch_size * world_size`` rows of the order, cut into one part per process; an epoch's last rows are left out
    where they are fewer than the processes.
    """

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        seed: int,
        position: Callable[[], tuple[int, int]],
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        require(num_rows >= world_size, f"{num_rows} rows for training: fewer than the {world_size} processes")
        self.num_rows, self.size, self.seed, self.position = num_rows, batch_size * world_size, seed, position
        self.rank, self.world_size, self.epoch = rank, world_size, 0

    def __len__(self) -> int:
        whole, rest = divmod(self.num_rows, self.size)
        return whole + (rest >= self.world_size)

    def __iter__(self) -> Iterator[Tensor]:
        self.epoch, done = self.position()
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        batches = torch.randperm(self.num_rows, generator=generator).split(self.size)
        for batch in batches[done : len(self)]:
            yield batch if self.world_size == 1 else batch.tensor_split(self.world_size)[self.rank]


class EvaluationSampler(Sampler[Tensor]):
    """Yield every ``world_size``-th batch of row indices ``[<= batch_size]``, beginning with batch ``rank``.

    No row is seen twice and none is left out: a process that runs short gets an empty batch. Batches are the same
    for any number of processes, and so are the numbers computed from them.
    """

    def __init__(self, num_rows: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        self.num_rows, self.batch_size, self.rank, self.world_size = num_rows, batch_size, rank, world_size

    def __len__(self) -> int:
        return -(-self.num_rows // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[Tensor]:
        batches = torch.arange(self.num_rows).split(self.batch_size)[self.rank :: self.world_size]
        yield from batches
        yield from [torch.arange(0)] * (len(self) - len(batches))


class RowsLoader(DataLoader[Any]):
    """Load whole batches by what the sampler gives, in the process; its place in an epoch is the sampler's to know."""

    def __init__(self, dataset: Dataset[Any], sampler: Sampler[Any], pin_memory: bool) -> None:
        # a generator of its own: at each epoch a loader draws a number, by default from the stream that dropout uses
        super().__init__(dataset, sampler=sampler, batch_size=None, pin_memory=pin_memory, generator=torch.Generator())

    def state_dict(self) -> dict[str, int]:
        """Tell Lightning that the loader can go on in the middle of an epoch."""
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Do nothing: the batches done are counted by the trainer."""


class TensorDataModule(LightningDataModule):
    """Base of every data set that fits in memory.

    A subclass implements ``load() -> (DataSpec, {"train", "val", "test"} -> Batch)`` and, where files have to be
    fetched or parsed, ``prepare_data()``, which runs in one process and leaves a cache that ``load`` reads.
    ``spec`` is known after ``setup()``. ``seed`` is that of the rows and splits, ``shuffle_seed`` that of their order
    in training. ``batch_size`` is what one process takes. Arguments are checked in the constructor, before any work.
    """

    def __init__(
        self,
        batch_size: int,
        eval_batch_size: int = 4096,
        seed: int = 0,
        shuffle_seed: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__()
        require(batch_size >= 1, f"data.batch_size={batch_size}: a batch needs at least 1 row")
        require(eval_batch_size >= 1, f"data.eval_batch_size={eval_batch_size}: a batch needs at least 1 row")
        for name, value in {"seed": seed, "shuffle_seed": shuffle_seed}.items():
            require(isinstance(value, int), f"data.{name}={value!r}: must be an integer")
        self.batch_size, self.eval_batch_size, self.pin_memory = batch_size, eval_batch_size, pin_memory
        self.seed, self.shuffle_seed = seed, shuffle_seed
        self._spec: DataSpec | None = None
        self.splits: dict[str, Batch] = {}

    def load(self) -> tuple[DataSpec, dict[str, Batch]]:
        """Return the description and the three splits of the data set."""
        raise NotImplementedError

    @property
    def spec(self) -> DataSpec:
        """The description of the data; read after ``setup()``."""
        if self._spec is None:
            raise RuntimeError("the data's description is known after setup()")
        return self._spec

    def setup(self, stage: str | None = None) -> None:
        if self._spec is None:  # Lightning calls setup once per stage; the data is the same
            self._spec, self.splits = self.load()

    def train_dataloader(self) -> RowsLoader:
        rows, (rank, world_size) = self.splits["train"], self._processes()
        sampler = TrainingSampler(len(rows), self.batch_size, self.shuffle_seed, self._position, rank, world_size)
        return RowsLoader(self.training_rows(sampler), sampler, self.pin_memory)

    def training_rows(self, sampler: TrainingSampler) -> Dataset[Batch]:
        """Return what gives the rows of training by index; ``sampler.epoch`` tells the epoch."""
        return RowsDataset(self.splits["train"])

    def val_dataloader(self) -> RowsLoader:
        return self._evaluation("val")

    def test_dataloader(self) -> RowsLoader:
        return self._evaluation("test")

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return the batch on ``device``; one that is there already at once, without Lightning's search for tensors."""
        if isinstance(batch, Batch) and batch.is_on(device):
            return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def _evaluation(self, split: str) -> RowsLoader:
        rows = self.splits[split]
        sampler = EvaluationSampler(len(rows), self.eval_batch_size, *self._processes())
        return RowsLoader(RowsDataset(rows), sampler, self.pin_memory)

    def _processes(self) -> tuple[int, int]:
        """Return the rank of this process and the number of processes."""
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _position(self) -> tuple[int, int]:
        """Return the epoch and how many of its batches are done."""
        if self.trainer is None or not self.trainer.training:
            return 0, 0
        # Counted from the batches done: the epoch counter still lags by one when a run goes on from a checkpoint
        done = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        epoch, batches = divmod(done, int(self.trainer.num_training_batches))
        return epoch, batches

"""Feed in-memory tensors to Lightning: whole batches are sliced by index, rows are never collated one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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


class BatchIndexSampler(Sampler[Tensor]):
    """Yield the row indices ``[<= batch_size]`` of one batch after the other.

    The order is a function of ``seed`` and of ``epoch()`` alone, so that it can be drawn again; the epoch is
    asked for when the first batch is.
    """

    def __init__(self, num_rows: int, batch_size: int, shuffle: bool, seed: int, epoch: Callable[[], int]) -> None:
        self.num_rows, self.batch_size, self.shuffle, self.seed = num_rows, batch_size, shuffle, seed
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.num_rows // self.batch_size)

    def __iter__(self) -> Iterator[Tensor]:
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch())
            order = torch.randperm(self.num_rows, generator=generator)
        else:
            order = torch.arange(self.num_rows)
        yield from order.split(self.batch_size)


class TensorDataModule(LightningDataModule):
    """Base of every data set that fits in memory.

    A subclass implements ``load() -> (DataSpec, {"train", "val", "test"} -> Batch)`` and, where files have to be
    fetched or parsed, ``prepare_data()``, which runs in one process and leaves a cache that ``load`` reads.
    ``spec`` is known after ``setup()``. ``seed`` is that of the rows and splits, ``shuffle_seed`` that of their order
    in training. Arguments are checked in the constructor, before any work.
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

    def train_dataloader(self) -> DataLoader[Batch]:
        return self._loader("train", self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        return self._loader("val", self.eval_batch_size, shuffle=False)

    def test_dataloader(self) -> DataLoader[Batch]:
        return self._loader("test", self.eval_batch_size, shuffle=False)

    def _loader(self, split: str, batch_size: int, shuffle: bool) -> DataLoader[Batch]:
        dataset = RowsDataset(self.splits[split])
        sampler = BatchIndexSampler(len(dataset), batch_size, shuffle, self.shuffle_seed, self._epoch)
        return DataLoader(dataset, sampler=sampler, batch_size=None, pin_memory=self.pin_memory)

    def _epoch(self) -> int:
        if self.trainer is None or not self.trainer.training:
            return 0
        # Counted from the batches done: the epoch counter still lags by one when a run goes on from a checkpoint
        done = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        return int(done // self.trainer.num_training_batches)

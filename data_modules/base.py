"""Feed in-memory tensors to Lightning: a batch is one indexing operation, rows are never collated one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, SequentialSampler

from mtl.checks import require
from mtl.types import Batch, DataSpec, RowEncoder, TaskSpec, labelled

from .options import SEEDS, flag, whole
from .splits import SPLITS
from .state import changes, fingerprints, reading_state, spec_of, spec_state

MANY = 16  # targets from which on copying the rows of a matrix beats copying column after column


class RowsDataset(Dataset[Batch]):
    """Serve ``rows`` by index tensors: ``dataset[index [N]]`` is a ``Batch`` of N rows.

    Many targets of one type are kept side by side in one matrix, of which a batch is one copy of rows.
    """

    def __init__(self, rows: Batch) -> None:
        targets = list(rows.targets.values())
        alike = {(target.dtype, target.dim()) for target in targets}
        self.names, self.rows, self.table = list(rows.targets), rows, None
        if len(targets) >= MANY and alike == {(targets[0].dtype, 1)}:
            self.table = torch.stack(targets, 1)  # [rows, T]
            self.rows = Batch(rows.inputs, {}, rows.weights, rows.groups)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Tensor) -> Batch:
        batch = self.rows.select(index)
        if self.table is None:
            return batch
        batch.targets = dict(zip(self.names, self.table.index_select(0, index).unbind(1), strict=True))
        return batch


class TrainingSampler(Sampler[Tensor]):
    """Yield this process's row indices ``[<= batch_size]`` of each batch of an epoch.

    The order depends on ``seed`` and the epoch only, so a resumed run draws it again. ``position()`` returns the epoch
    and how many of its batches are done; it is called when the first batch is requested. A global batch is the next
    ``batch_size * world_size`` rows, divided among the processes. The last rows of an epoch are dropped if there are
    fewer of them than processes. Raises InputError if there are fewer rows than processes.
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
        require(num_rows >= world_size, f"{num_rows} training rows are fewer than the {world_size} processes")
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
    """Yield every ``world_size``-th batch of row indices ``[<= batch_size]``, starting with batch ``rank``.

    Every row is seen exactly once. A process with fewer batches than the others gets an empty one. The batches, and so
    the metrics, are the same for any number of processes.
    """

    def __init__(self, num_rows: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        self.num_rows, self.batch_size, self.rank, self.world_size = num_rows, batch_size, rank, world_size

    def __len__(self) -> int:
        return -(-self.num_rows // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[Tensor]:
        batches = torch.arange(self.num_rows).split(self.batch_size)[self.rank :: self.world_size]
        yield from batches
        yield from [torch.arange(0)] * (len(self) - len(batches))


class OwnOrder(SequentialSampler):
    """Yield what ``sampler`` yields.

    For ``trainer.overfit_batches``, Lightning replaces every sampler that is not a SequentialSampler by one that yields
    numbers. This one stays: our samplers yield batches, and repeat them by themselves (see ``_position``).
    """

    def __init__(self, sampler: Sampler[Any]) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]  # ours have a length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.sampler)


class RowsLoader(DataLoader[Any]):
    """Load the batches that the sampler asks for, in the main process; the sampler keeps the position in the epoch."""

    def __init__(self, dataset: Dataset[Any], sampler: Sampler[Any], pin_memory: bool) -> None:
        # A loader draws a seed each epoch; without its own generator it would advance the one that dropout uses
        own, sampler = torch.Generator(), OwnOrder(sampler)
        super().__init__(dataset, sampler=sampler, batch_size=None, pin_memory=pin_memory, generator=own)

    def state_dict(self) -> dict[str, int]:
        """Return nothing; that the method exists tells Lightning that the loader can resume within an epoch."""
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Do nothing: the trainer counts the batches that are done."""


class Batches:
    """Yield the batches of ``loader``, for prediction.

    There Lightning builds each DataLoader anew, with a sampler that notes the rows of a batch; ours know their rows.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def check_labels(tasks: Sequence[TaskSpec], targets: Mapping[str, Tensor]) -> None:
    """Raise InputError, which names them, if some ``tasks`` have no label among the ``targets`` of the training."""
    silent = [task.name for task in tasks if not bool(labelled(task, targets[task.name]).any())]
    require(not silent, f"no training row has a label of {', '.join(silent)}: give labels, or leave these tasks out")


class TensorDataModule(LightningDataModule):
    """Base class of every data set that fits in memory.

    A subclass implements ``load() -> (DataSpec, {"train", "val", "test"} -> Batch)``. If it has files to fetch or to
    parse, it also implements ``prepare_data()``, which runs in one process and writes a cache that ``load`` reads.
    ``spec`` is available after ``setup()``. ``seed`` sets rows and splits, ``shuffle_seed`` the order in training.
    ``batch_size`` is per process. The constructor checks all arguments, before any work is done.

    Every checkpoint contains ``state_dict()``. ``load_state_dict(state)`` before ``setup()`` gives it back: the data
    module then learns nothing from its rows, and ``spec`` and ``row_encoder`` are known without any file. A subclass
    whose rows are those of a file sets ``row_encoder`` in ``load``, and returns it from ``encoder_of(state)``; its
    ``source_files()`` are the files. ``load`` may leave out splits that are not in ``wanted``.
    """

    row_encoder: RowEncoder | None = None  # after ``setup()`` or ``load_state_dict()``, if rows have a raw form

    def __init__(
        self,
        batch_size: int,
        eval_batch_size: int = 4096,
        seed: int = 0,
        shuffle_seed: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__()
        self.batch_size = whole("batch_size", batch_size, 1)
        self.eval_batch_size = whole("eval_batch_size", eval_batch_size, 1)
        self.seed = whole("seed", seed, 0, SEEDS - 1)
        self.shuffle_seed = whole("shuffle_seed", shuffle_seed, 0, SEEDS - 1)
        self.pin_memory = flag("pin_memory", pin_memory)
        self._spec: DataSpec | None = None
        self.file_digests: dict[str, dict[str, Any]] | None = None  # fingerprints of the sources
        self._files_then: dict[str, dict[str, Any]] | None = None  # when the checkpoint was written
        self.wanted: Sequence[str] = SPLITS
        self.splits: dict[str, Batch] = {}

    def load(self) -> tuple[DataSpec, dict[str, Batch]]:
        """Return the DataSpec and the rows of train, val and test."""
        raise NotImplementedError

    def source_files(self) -> dict[str, Path]:
        """Return the files that the wanted rows come from, by the names that messages use; they exist by then."""
        return {}

    def fingerprints(self) -> dict[str, dict[str, Any]]:
        """Return name, size and digest of each source; another digest means that the source has changed."""
        return fingerprints(self.source_files())

    def encoder_of(self, state: Mapping[str, Any]) -> RowEncoder:
        """Return the encoder whose ``state()`` is given."""
        raise NotImplementedError

    @property
    def spec(self) -> DataSpec:
        """The inputs and tasks; available after ``setup()`` or ``load_state_dict()``."""
        if self._spec is None:
            raise RuntimeError("spec is available after setup()")
        return self._spec

    def setup(self, stage: str | None = None) -> None:
        """Load the rows, those of all stages; after ``load_state_dict(state, test_only=True)`` those of the test."""
        if self._is_loaded():  # Lightning calls setup once per stage, with the same data
            return
        if self.file_digests is None:
            self.file_digests = self.fingerprints()
        self._spec = self._load()

    def _is_loaded(self) -> bool:
        return bool(self.splits)

    def _load(self) -> DataSpec:
        spec, self.splits = self.load()
        if "train" in self.splits:
            check_labels(spec.tasks, self.splits["train"].targets)
        return spec

    def state_dict(self) -> dict[str, Any]:
        """Return what inputs and outputs of a network on these data mean, and which files they came from.

        It is plain data: text, numbers, lists and dicts. Lightning writes it into every checkpoint.
        """
        if self._spec is None:
            return {}
        encoder = None if self.row_encoder is None else self.row_encoder.state()
        files = self.file_digests or {}
        return {"spec": spec_state(self._spec), "encoder": encoder, "files": files, "rows": self.row_counts()}

    def row_counts(self) -> dict[str, Any]:
        """Return the number of rows of each split that is loaded."""
        return {split: len(rows) for split, rows in self.splits.items()}

    def load_state_dict(self, state: Mapping[str, Any], test_only: bool = False) -> None:
        """Take over the ``state_dict()`` of a checkpoint before ``setup()``; later, do nothing. Raises InputError.

        ``test_only``: only the rows of the test will be loaded, from the files that they need.
        """
        if self._spec is not None or not state:  # Lightning calls it after setup
            return
        with reading_state():
            self._spec = spec_of(state["spec"])
            self.row_encoder = None if state["encoder"] is None else self.encoder_of(state["encoder"])
            self._files_then = dict(state["files"])
        self.wanted = ("test",) if test_only else SPLITS

    def changed_files(self) -> dict[str, str]:
        """Return, by source, what is different about each file since the training; empty without a loaded state.

        If only the test is wanted, only files that it shares with the training are compared: new ones are fine.
        """
        if self._files_then is None:
            return {}
        sources = self.source_files()
        self.file_digests = self.fingerprints()
        keys = sources.keys() & self._files_then.keys() if self.wanted == ("test",) else None
        before, now = (
            {key: files[key] for key in files if keys is None or key in keys}
            for files in (self._files_then, self.file_digests)
        )
        with reading_state():
            return changes(before, now, sources)

    def train_dataloader(self) -> Any:
        rows, (rank, world_size) = self.splits["train"], self._processes()
        sampler = TrainingSampler(len(rows), self.batch_size, self.shuffle_seed, self._position, rank, world_size)
        return RowsLoader(self.training_rows(sampler), sampler, self.pin_memory)

    def training_rows(self, sampler: TrainingSampler) -> Dataset[Batch]:
        """Return the training rows as a dataset indexed by tensors ``[N]``; ``sampler.epoch`` is the current epoch."""
        return RowsDataset(self.splits["train"])

    def val_dataloader(self) -> Any:
        return self._evaluation("val")

    def test_dataloader(self) -> Any:
        return self._evaluation("test")

    def predict_dataloader(self) -> Batches:
        """Return the rows of the test; for other rows see ``mtl.load``."""
        return Batches(self._evaluation("test"))

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move the batch to ``device``; skip Lightning's slow search for tensors if the batch is there already."""
        if isinstance(batch, Batch) and batch.is_on(device):
            return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def _evaluation(self, split: str) -> Any:
        rows = self.splits[split]
        sampler = EvaluationSampler(len(rows), self.eval_batch_size, *self._processes())
        return RowsLoader(RowsDataset(rows), sampler, self.pin_memory)

    def _processes(self) -> tuple[int, int]:
        """Return the rank of this process and the number of processes."""
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _position(self) -> tuple[int, int]:
        """Return the epoch, which sets the order of rows, and the number of its batches that are done.

        Batches, not optimiser steps: a step takes several with ``trainer.accumulate_grad_batches``.
        """
        if self.trainer is None or not self.trainer.training:
            return 0, 0
        # Lightning's counts, which checkpoints hold. Unlike a division of all batches by the length of an epoch, they
        # stay right if the run resumes with another length, as with trainer.limit_train_batches
        loop = self.trainer.fit_loop
        epoch, batches = loop.epoch_progress.current.processed, loop.epoch_loop.batch_progress.current.ready
        return (0 if self.trainer.overfit_batches else epoch), batches  # overfitting repeats the same batches

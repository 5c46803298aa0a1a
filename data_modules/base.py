"""The base class of all data sets: splits, description, and state in checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor

from mtl.checks import require
from mtl.nn.seeds import make_generator
from mtl.options import LargeCount, RunSeed, validated
from mtl.types import Batch, DataSpec, RowEncoder, TaskSpec, has_label

from .constant_predictions import with_constants
from .files.identity import digest, fingerprint
from .samplers import Batches, BatchPlan, Position, RowsDataset, RowsLoader, RowsSampler
from .splits import SPLITS
from .state import describe_changes, reading_state, spec_of, spec_state
from .stream import StreamedRows, StreamLoader

SAMPLE_ROWS = 20_000  # training rows whose labels give the constants, of rows that are not in memory


def check_labels(tasks: Sequence[TaskSpec], targets: Mapping[str, Tensor]) -> None:
    """Raise InputError, which names the tasks, if some ``tasks`` have no label among the training ``targets``."""
    silent = [task.name for task in tasks if not bool(has_label(task, targets[task.name]).any())]
    require(not silent, f"no training row has a label of {', '.join(silent)}: give labels, or leave these tasks out")


class TensorDataModule(LightningDataModule):
    """Base class of every data set.

    A subclass implements ``load() -> (DataSpec, {"train", "val", "test"} -> Batch)``; rows that do not fit into memory
    are ``StreamedRows``. If it has files to fetch or to parse, it also implements ``prepare_data()``, which runs in one
    process and writes a cache that ``load`` reads; it may be killed, and run by several programs at once. ``spec`` is
    available after ``setup()``. ``seed`` determines rows and splits, ``shuffle_seed`` the order in training.
    ``batch_size`` is per process; "auto" chooses that of all processes by the number of training rows.

    Every checkpoint contains ``state_dict()``. ``load_state_dict(state)`` before ``setup()`` restores it: the data
    module then learns nothing from its rows, and ``spec`` and ``row_encoder`` are known without any file. A subclass
    that reads rows from files sets ``row_encoder``, an ``encoder_kind``, in ``load``, and returns the files from
    ``source_files()``. ``load`` may leave out splits that are not in ``wanted``.
    """

    encoder_kind: ClassVar[type[RowEncoder]]
    random_split: bool = False  # whether ``seed`` draws the test rows among the rows that there are
    row_encoder: RowEncoder | None = None  # after ``setup()`` or ``load_state_dict()``, if rows have a raw form
    # What tables have; other data answer that they have none
    frames: Mapping[str, Any] = MappingProxyType({})  # DataFrames of splits, read instead of files
    earlier: Any = None  # encoder and tasks of the run that this one starts from, if they stay
    labelled: Callable[[Any, str], Batch] | None = None  # turns a DataFrame, named for messages, into a batch

    @validated
    def __init__(
        self,
        batch_size: LargeCount | Literal["auto"],
        eval_batch_size: LargeCount = 4096,
        seed: RunSeed = 0,
        shuffle_seed: RunSeed = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__()
        self.batch_size, self.eval_batch_size, self.pin_memory = batch_size, eval_batch_size, pin_memory
        self.seed, self.shuffle_seed = seed, shuffle_seed
        self._spec: DataSpec | None = None
        self.file_digests: dict[str, dict[str, Any]] | None = None  # fingerprints of the sources
        self._files_then: dict[str, dict[str, Any]] | None = None  # when the checkpoint was written
        self.wanted: Sequence[str] = SPLITS
        self.splits: dict[str, Any] = {}  # a Batch of each split, or its StreamedRows

    def load(self) -> tuple[DataSpec, Mapping[str, Batch | StreamedRows]]:
        """Return the DataSpec and the rows of train, val and test."""
        raise NotImplementedError

    def source_files(self) -> dict[str, Path]:
        """Return the files of the wanted rows by their names in messages; called when the files exist."""
        return {}

    def _fingerprints(self) -> dict[str, dict[str, Any]]:
        return {key: fingerprint(path) for key, path in self.source_files().items()}

    @property
    def spec(self) -> DataSpec:
        """The inputs and tasks; available after ``setup()`` or ``load_state_dict()``."""
        if self._spec is None:
            raise RuntimeError("spec is available after setup()")
        return self._spec

    def setup(self, stage: str | None = None) -> None:
        """Load the rows of all stages; after ``load_state_dict(state, test_only=True)``, only the test rows."""
        if self.row_counts():  # Lightning calls setup once per stage, with the same data
            return
        if self.file_digests is None:
            self.file_digests = self._fingerprints()
        self._spec = self._load()

    def generator(self, *purpose: int | str) -> torch.Generator:
        """Return a generator for a purpose, such as the rows of a task; it depends on ``seed`` and the purpose only."""
        return make_generator(self.seed, *purpose)

    def _load(self) -> DataSpec:
        spec, splits = self.load()
        self.splits = {name: part.in_blocks() if isinstance(part, Batch) else part for name, part in splits.items()}
        rows = self.splits.get("train")
        if isinstance(rows, StreamedRows):
            has_constants = all(task.constant for task in spec.tasks)
            if has_constants:
                return spec
            rows = rows.sample(SAMPLE_ROWS, self.generator("sample"))
            return with_constants(spec, rows.targets)
        if rows is None:
            return spec
        check_labels(spec.tasks, rows.targets)
        return with_constants(spec, rows.targets)

    def state_dict(self) -> dict[str, Any]:
        """Return the meaning of a network's inputs and outputs on these data, and the fingerprints of the files.

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
        """Restore the ``state_dict()`` of a checkpoint before ``setup()``; after it, do nothing. Raises InputError.

        ``test_only``: only the test rows will be loaded, from the files that they need.
        """
        if self._spec is not None or not state:  # Lightning calls it after setup
            return
        with reading_state():
            self._spec = spec_of(state["spec"])
            self.row_encoder = None if state["encoder"] is None else self.encoder_kind.from_state(state["encoder"])
            self._files_then = dict(state["files"])
            inputs = getattr(self.row_encoder, "inputs", self._spec.inputs)
            if inputs != self._spec.inputs:
                raise ValueError("its encoder makes other inputs")
        self.wanted = ("test",) if test_only else SPLITS

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Prepare to go on with the encoding of a run, whose ``state_dict()`` is ``state``; by default, do nothing."""

    def sample(self, split: str, max_rows: int) -> Batch | None:
        """Return at most ``max_rows`` rows of a table; None: ``split`` is not loaded, or the data are no table."""
        return None

    def row_info(self, split: str) -> Any:
        """Return a DataFrame of where each validation or test row of a table comes from; None: the data are no table.

        The columns are row_id, file_row (from 1, in its file), file if there are several, and slice_NAME for each
        column by whose values the test is compared.
        """
        return None

    def rows_digest(self, split: str) -> str:
        """Return a digest of what determines the rows of ``split``: files, options that split them, ``seed``, number.

        Rows of the same number are the same in two runs whose digests are equal.
        """
        return digest([type(self).__qualname__, self.seed, self._row_sources(split), self.row_counts()[split]])

    def _row_sources(self, split: str) -> Any:
        """Return the digests of the files that have the rows of ``split``, and options that split them."""
        return {key: file["sha256"] for key, file in (self.file_digests or {}).items()}

    def split_rows(self) -> Mapping[str, Any]:
        """Return the raw rows of each split of a table, ``SplitRows``."""
        return {}

    def changed_files(self) -> dict[str, str]:
        """Describe by source how each file has changed since the training; empty without a loaded state.

        If only the test rows are wanted, only files shared with the training are compared; new files are allowed.
        """
        if self._files_then is None:
            return {}
        sources = self.source_files()
        self.file_digests = self._fingerprints()
        before, now = self._files_then, self.file_digests
        if self.wanted == ("test",):
            shared = sources.keys() & before.keys()
            before, now = ({key: files[key] for key in files if key in shared} for files in (before, now))
        with reading_state():
            return describe_changes(before, now, sources)

    def train_dataloader(self) -> Any:
        return self._loader("train", self.training_plan(), self.shuffle_seed, self._position)

    def training_plan(self) -> BatchPlan:
        """Return how an epoch's order of the training rows is cut into batches."""
        rows = len(self.splits["train"])
        return BatchPlan(rows, self._rows_of_step(rows), *self._processes(), training=True)

    def _rows_of_step(self, rows: int) -> int:
        """Return the batch size of this process for so many training rows."""
        if self.batch_size != "auto":
            return self.batch_size
        return max(1, choose_batch_size(rows) // self._processes()[1])

    def val_dataloader(self) -> Any:
        return self._evaluation("val")

    def test_dataloader(self) -> Any:
        return self._evaluation("test")

    def predict_dataloader(self) -> Batches:
        """Return the test rows; for other rows see ``mtl.load``."""
        return Batches(self._evaluation("test"))

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move the batch to ``device``; skip Lightning's slow search for tensors if the batch is there already."""
        if isinstance(batch, Batch) and batch.is_on(device):
            return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def _evaluation(self, split: str) -> Any:
        return self._loader(split, BatchPlan(len(self.splits[split]), self.eval_batch_size, *self._processes()))

    def _loader(
        self, split: str, plan: BatchPlan, seed: int | None = None, position: Position = lambda: (0, 0)
    ) -> RowsLoader | StreamLoader:
        rows = self.splits[split]
        if isinstance(rows, StreamedRows):
            return rows.loader(plan, seed, position, self.pin_memory)
        dataset = RowsDataset(rows, numbered=not plan.training)
        return RowsLoader(dataset, RowsSampler(plan, seed, position), self.pin_memory)

    def _processes(self) -> tuple[int, int]:
        """Return the rank of this process and the number of processes."""
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _position(self) -> tuple[int, int]:
        """Return the epoch, which determines the order of rows, and the number of its batches that are done.

        Batches are not optimiser steps: with ``trainer.accumulate_grad_batches``, a step takes several batches.
        """
        trainer: Any = self.trainer  # whose loops Lightning's types leave out
        if trainer is None or not trainer.training:
            return 0, 0
        # Lightning's counts, which checkpoints hold. Dividing all batches by the length of an epoch would be wrong if
        # the run resumes with another length, as with trainer.limit_train_batches
        loop = trainer.fit_loop
        epoch, batches = loop.epoch_progress.current.processed, loop.epoch_loop.batch_progress.current.ready
        return (0 if trainer.overfit_batches else epoch), batches  # overfitting repeats the same batches


def choose_batch_size(rows: int) -> int:
    """Return the rows of a step: a power of two near a twelfth of the training ``rows``, from 32 to 512.

    Small tables need more steps in an epoch than large ones; chosen on ten tables, see
    benchmarks/accuracy/blend_candidates.md.
    """
    return int(2 ** min(max(round(math.log2(max(rows, 1) / 12)), 5), 9))

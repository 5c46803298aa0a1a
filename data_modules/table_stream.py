"""A user's own table that does not fit into memory: Parquet files, read in blocks during training.

``stream`` determines the order of the blocks, and ``TableDataModule`` learns from the training rows and turns the rows
of a block into tensors, as for any table.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtl.checks import require
from mtl.options import FilePath, Long, validated
from mtl.types import Batch, DataSpec

from .constants import with_constants
from .feeding import BatchPlan
from .files.reading import files_of
from .split_rows import SplitRows
from .stream import StreamLoader, concat_batches, in_order, shuffled
from .table import OPTION, TableDataModule
from .tables.row_source import PARQUET, RowSource

logger = logging.getLogger(__name__)

BLOCKS = 16  # blocks in a window: its mixed rows come from this many places
SAMPLE = 20_000  # training rows whose labels give the constants


class TableStreamDataModule(TableDataModule):
    """Serve the rows of Parquet files as ``TableDataModule`` does, in memory that grows by a byte for each row.

    ``path``, ``val_path`` and ``test_path`` are a file, a folder (all ``.parquet`` files in it) or a pattern such as
    ``rows/*.parquet``. An epoch takes blocks of ``window_rows`` / 16 consecutive rows in random order, and mixes the
    rows of about 16 of them, a window. Neighbours in a file are thus spread over a window, not over the epoch: if files
    are sorted, write their rows in random order first. One window is in memory as tensors while the next one is read.
    Validation and test read the files in order, block by block.

    Rows are split as in memory; while they are split, memory holds a number for each row and the column that splits
    them. Without a checkpoint, the training rows are read before training to learn from them; memory then holds the
    distinct values of the columns that may be categorical. Rows have no weights.
    """

    @validated
    def __init__(
        self, path: FilePath | None = None, tasks: Any = None, window_rows: Long = 1 << 20, **common: Any
    ) -> None:
        require(path is not None, "data.path is not given: set it to your table, as in data.path=rows.parquet")
        super().__init__(path, tasks, **common)
        require(not self.weight_columns, "weight_column: rows of data=table_stream have no weights; use data=table")
        self.window_rows, self.block_rows = window_rows, -(-window_rows // BLOCKS)
        self.parts: dict[str, SplitRows] = {}

    def prepare_data(self) -> None:
        for option, path in self.source_files().items():
            parquet_files(path, option)

    def open(self, split: str) -> RowSource:
        option = f"data.{OPTION[split]}"
        parquet_files(self.paths[split], option)
        return RowSource.open(self.paths[split], option)

    def _load(self) -> DataSpec:
        """Return the DataSpec, after a pass over the training rows unless the state of a checkpoint is given."""
        rows = self.split_rows()
        spec = self._learn(rows["train"]) if self.row_encoder is None else self.spec
        assert self.row_encoder is not None
        self.row_encoder.bad.report()
        self.parts = {name: rows[name] for name in self.wanted}
        for name, part in self.parts.items():
            logger.info("%s: %d %s rows in %d files", part.source.here, len(part), name, len(part.source.tables))
        self.warn_of_trained_file()
        if all(task.constant for task in spec.tasks):
            return spec
        self._spec = spec  # which reading needs
        sample = self.training_sample(SAMPLE)
        return spec if sample is None else with_constants(spec, sample.targets)

    def row_counts(self) -> dict[str, Any]:
        return {split: len(part) for split, part in self.parts.items()}

    def training_sample(self, most: int) -> Batch | None:
        """Return at most ``most`` training rows, or all, from random places in ``BLOCKS`` or more random blocks."""
        if "train" not in self.parts:
            return None
        generator, counts = self.generator("sample"), self.parts["train"].counts
        blocks = counts.nonzero()[:, 0]
        blocks = blocks[torch.randperm(len(blocks), generator=generator)]
        blocks = blocks[: max(BLOCKS, 1 + int((counts[blocks].cumsum(0) < most).sum()))]
        drawn = [torch.randperm(int(counts[block]), generator=generator) for block in blocks]
        parts = zip(blocks.tolist(), drawn, strict=True)
        return concat_batches([self.read("train", block, rows[: -(-most // len(blocks))]) for block, rows in parts])

    def training_cut(self) -> BatchPlan:
        return BatchPlan(len(self.parts["train"]), self.batch_size, *self._processes(), training=True)

    def train_dataloader(self) -> StreamLoader:
        cut = self.training_cut()
        windows = partial(shuffled, self.parts["train"].counts, self.window_rows, cut.size, self.shuffle_seed)
        return self._streamed("train", cut, windows)

    def _evaluation(self, split: str) -> StreamLoader:
        part = self.parts[split]
        cut = BatchPlan(len(part), self.eval_batch_size, *self._processes())
        return self._streamed(split, cut, lambda _: in_order(part.counts))

    def _streamed(self, split: str, cut: BatchPlan, windows: Any) -> StreamLoader:
        position = self._position if split == "train" else lambda: (0, 0)
        read = partial(self.read, split)
        return StreamLoader(self.parts[split].counts, read, cut, windows, position, self.pin_memory)

    def read(self, split: str, block: int, rows: Tensor) -> Batch:
        """Return rows ``[N]`` of a block of ``split`` as tensors."""
        part, grouped = self.parts[split], split != "train"
        frame = part.read(block, self._columns(grouped), rows)
        return self._batch(frame, self.spec.tasks, part.blocks[block].file, grouped)


def parquet_files(path: Path, option: str) -> None:
    """Raise InputError if ``path`` stands for files of another format, see ``files_of``."""
    for file in files_of(path, option):
        text = file.name.endswith((".csv", ".csv.gz", ".tsv"))
        name = file.name.split(".")[0] + PARQUET
        hint = f"; convert it with polars.scan_csv({file.name!r}).sink_parquet({name!r})" if text else ""
        require(file.suffix == PARQUET, f"{file}: data=table_stream reads {PARQUET} files{hint}")

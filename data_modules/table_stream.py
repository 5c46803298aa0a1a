"""A user's own table that does not fit into memory: Parquet files, read in blocks during training.

``stream`` determines the order of the blocks, ``tables.parquet`` reads them, and ``tables.learning`` learns
vocabularies, scales and classes in two passes. ``TableEncoder.encode`` and ``Labels.targets`` turn the rows of a block
into tensors, as for any table.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from mtl.checks import require
from mtl.options import Long, validated
from mtl.types import Batch, DataSpec

from .feeding import Cut
from .splits import SPLITS
from .stream import StreamLoader, in_order, shuffled
from .table_base import OPTION, TableBase, split_names
from .tables.parquet import Block, ParquetRows, parquet_files

logger = logging.getLogger(__name__)

SALT = 0x5EED  # a made-up table is often drawn from ``default_rng(0)``, and its split must not repeat its numbers
BLOCKS = 16  # blocks in a window: its mixed rows come from this many places


@dataclass(frozen=True)
class Part:
    """The rows of one split: the rows of each block whose entry in ``marks`` is ``number``."""

    rows: ParquetRows
    blocks: Sequence[Block]
    marks: Any  # (block) -> the number of the split of each row [count]; None: all rows
    number: int
    counts: Tensor  # [blocks]

    def __len__(self) -> int:
        return int(self.counts.sum())

    def read(self, block: int, columns: Sequence[str], rows: Tensor | None = None) -> pl.DataFrame:
        """Return ``columns`` of the block's rows that belong to the split; ``rows [N]`` selects and orders them."""
        here = self.blocks[block]
        frame = self.rows.read(here, columns)
        if self.marks is not None:
            frame = frame.filter(pl.Series(self.marks(here) == self.number))
        return frame if rows is None else frame[rows.numpy()]


class TableStreamDataModule(TableBase):
    """Serve the rows of Parquet files as ``TableDataModule`` does, in memory that does not grow with the files.

    For most options see ``TableBase``. ``path``, ``val_path`` and ``test_path`` are a file, a folder (all ``.parquet``
    files in it) or a pattern such as ``rows/*.parquet``. An epoch takes blocks of ``window_rows`` / 16 consecutive rows
    in random order, and mixes the rows of about 16 of them, a window. Neighbours in a file are thus spread over a
    window, not over the epoch: if files are sorted, write their rows in random order first. One window is in memory as
    tensors while the next one is read. Validation and test read the files in order, block by block.

    Rows are split by ``split`` with a random number for each row, so the shares hold approximately; by
    ``split_column``; or by files. Without a checkpoint, the training rows are read before training to learn from them;
    memory then holds the distinct values of the columns that may be categorical.
    """

    @validated
    def __init__(self, *args: Any, window_rows: Long = 1 << 20, **common: Any) -> None:
        super().__init__(*args, **common)
        require(not self.weight_columns, "weight_column: rows of data=table_stream have no weights; use data=table")
        self.window_rows = window_rows
        self.parts: dict[str, Part] = {}

    def prepare_data(self) -> None:
        for name, path in self._files().items():
            parquet_files(path, f"data.{OPTION[name]}")

    def row_counts(self) -> dict[str, Any]:
        return {split: len(part) for split, part in self.parts.items()}

    def train_dataloader(self) -> StreamLoader:
        part, cut = self.parts["train"], self.training_cut()
        windows = partial(shuffled, part.counts, self.window_rows, cut.size, self.shuffle_seed)
        return self._streamed("train", cut, windows)

    def training_cut(self) -> Cut:
        return Cut(len(self.parts["train"]), self.batch_size, *self._processes(), training=True)

    def _evaluation(self, split: str) -> StreamLoader:
        part = self.parts[split]
        cut = Cut(len(part), self.eval_batch_size, *self._processes())
        return self._streamed(split, cut, lambda _: in_order(part.counts))

    def _streamed(self, split: str, cut: Cut, windows: Any) -> StreamLoader:
        position = self._position if split == "train" else lambda: (0, 0)
        read = partial(self._batch, split)
        return StreamLoader(self.parts[split].counts, read, cut, windows, position, self.pin_memory)

    def _batch(self, split: str, block: int, rows: Tensor) -> Batch:
        """Return rows ``[N]`` of a block of ``split`` as tensors."""
        part, grouped = self.parts[split], split != "train"
        assert self.row_encoder is not None
        used = [*self.row_encoder.columns, *(task.column for task in self.labels)]
        used += [self.group_column] if grouped and self.group_column is not None else []
        frame = part.read(block, used, rows)
        where = str(part.blocks[block].path)
        targets = self.targets(frame, self.spec.tasks, where)
        groups = self.groups(frame) if grouped else None
        return Batch(self.row_encoder.encode(frame, where), targets, {}, groups)

    def _load(self) -> DataSpec:
        """Return the DataSpec, after a pass over the training rows unless the state of a checkpoint is given."""
        files = {name: ParquetRows.of(path, f"data.{OPTION[name]}") for name, path in self._files().items()}
        for name, rows in files.items():
            self._check_named(list(rows.schema), self.paths[name])
        parts = {name: self._all(files[name], name) for name in files if name != "train"}
        if "train" in files:
            parts |= self._divided(files["train"])
        spec = self.spec if self.row_encoder is not None else self._learn(parts["train"])
        self.parts = {name: parts[name] for name in self.wanted}
        for name, part in self.parts.items():
            logger.info("%s: %d %s rows in %d files", self._path(name), len(part), name, len(part.rows.paths))
        return spec

    def _path(self, split: str) -> Path:
        return self.paths.get(split, self.paths["train"])

    def _blocks(self, rows: ParquetRows) -> list[Block]:
        return rows.blocks(-(-self.window_rows // BLOCKS))

    def _all(self, rows: ParquetRows, split: str) -> Part:
        blocks = self._blocks(rows)
        require(bool(blocks), f"{self.paths[split]} has no rows")
        return Part(rows, blocks, None, 0, torch.tensor([block.count for block in blocks]))

    def _divided(self, rows: ParquetRows) -> dict[str, Part]:
        """Return the splits that share the files of ``data.path``."""
        path = self.paths["train"]
        if self.split_column is not None:
            names, blocks = list(SPLITS), self._blocks(rows)
            marks = partial(self._marks_by_column, rows, self.split_column)
            reason = f"column {self.split_column!r}: no row is marked"
        else:
            names = [name for name in SPLITS if name == "train" or name not in self.paths]
            if names == ["train"]:
                return {"train": self._all(rows, "train")}
            blocks, marks = self._blocks(rows), partial(drawn, self.seed, [self.shares[name] for name in names])
            reason = f"of its {sum(rows.counts)} rows, data.split leaves none for"
        empty = np.zeros((0, len(names)), dtype=np.int64)
        counts = np.concatenate([empty, *(np.bincount(marks(b), minlength=len(names))[None] for b in blocks)])
        for name, total in zip(names, counts.sum(0).tolist(), strict=True):
            require(total > 0, f"{path}, {reason} {name}")
        return {
            name: Part(rows, blocks, marks, number, torch.from_numpy(counts[:, number].copy()))
            for number, name in enumerate(names)
        }

    def _marks_by_column(self, rows: ParquetRows, column: str, block: Block) -> np.ndarray[Any, Any]:
        """Return the index in ``SPLITS`` that each row of a block names ``[count]``."""
        names = split_names(rows.read(block, [column]), column, str(block.path))
        return names.replace_strict(list(SPLITS), range(len(SPLITS)), return_dtype=pl.Int64).to_numpy()

    def _learn(self, train: Part) -> DataSpec:
        def blocks(columns: Sequence[str]) -> Iterator[tuple[pl.DataFrame, str]]:
            for number, block in enumerate(train.blocks):
                if train.counts[number]:
                    yield train.read(number, columns), str(block.path)

        spec = self.learn(blocks, len(train), list(train.rows.schema), from_text=False)
        assert self.row_encoder is not None
        self.row_encoder.bad.report()
        return spec


def drawn(seed: int, shares: Sequence[float], block: Block) -> np.ndarray[Any, Any]:
    """Draw for each row of a block an index into ``shares``: ``[count]``, int64.

    Row i of all files uses the i-th number of a generator, so the result does not depend on the blocks.
    """
    bounds = np.cumsum(shares)[:-1] / sum(shares)
    numbers = np.random.PCG64([seed, SALT]).advance(block.first).random_raw(block.count)
    return np.searchsorted(bounds, numbers / 2.0**64, side="right")

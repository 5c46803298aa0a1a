"""A user's own CSV or Parquet table: its columns become inputs and tasks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor

from mtl.checks import InputError, listed, require, shown
from mtl.options import FilePath, Name, validated
from mtl.types import Batch, DataSpec, TaskSpec, labelled

from .files.reading import files_of
from .splits import SPLITS, divided
from .table_base import OPTION, TableBase, split_names
from .tables.columns import cell, named, numbers
from .tables.encoder import check_columns
from .tables.example import NAME, TASKS, write_example
from .tables.labels import HEAVIEST
from .tables.reading import checked_rows, read_tables

logger = logging.getLogger(__name__)


class TableDataModule(TableBase):
    """Serve the rows of ``path``: a ``.csv``, ``.csv.gz``, ``.tsv`` or ``.parquet`` file, or a folder or a pattern.

    For most options see ``TableBase``.

    ``weight_column`` holds a weight of at least 0 for each row, which multiplies its losses; the loss of a split is the
    weighted mean. Metrics ignore the weights. The column is not an input. A task may name one of its own.

    With neither ``path`` nor ``tasks``, an example table is written to ``data_dir`` and served.
    """

    @validated
    def __init__(
        self,
        path: FilePath | None = None,
        tasks: Any = None,
        data_dir: FilePath = Path("data"),
        weight_column: Name | None = None,
        **common: Any,
    ) -> None:
        self.example = data_dir if path is None and not tasks else None
        if self.example is not None:
            path, tasks = self.example / NAME, TASKS
        super().__init__(path, tasks, **common)
        self.weight_column = weight_column
        self.weight_columns += [] if weight_column is None else [weight_column]
        twice = f"data.weight_column={shown(weight_column)}: this column is also named as an input"
        require(weight_column not in self.given.columns, twice)

    def prepare_data(self) -> None:
        if self.example is not None:
            write_example(self.example)
        for option, path in self.source_files().items():
            files_of(path, option)

    def load(self) -> tuple[DataSpec, dict[str, Batch]]:
        """Return the DataSpec and the wanted splits; only training rows, or a checkpoint's state, teach the encoder."""
        if self.example is not None and "train" in self._files():
            logger.warning("data.path is not given: using the made-up rows of %s", self.paths["train"])
        frames = self._split()
        where = {name: str(self.paths.get(name, self.paths["train"])) for name in SPLITS}
        spec = self._learn(frames["train"], where["train"]) if self.row_encoder is None else self.spec
        assert self.row_encoder is not None
        splits = {name: self._batch(frames[name], spec.tasks, where[name], name != "train") for name in self.wanted}
        self.row_encoder.bad.report()
        for path in dict.fromkeys(where[name] for name in splits):
            counts = (f"{len(rows)} {name}" for name, rows in splits.items() if where[name] == path)
            logger.info("%s: %s", path, ", ".join(counts))
        return spec, splits

    def labelled(self, frame: pl.DataFrame, where: str) -> Batch:
        """Return other rows with their labels; raise InputError, with ``where``, for a missing column or a bad cell."""
        rows, columns = checked_rows(frame, Path(where)), [task.column for task in self.labels]
        grouped = [] if self.group_column is None else [self.group_column]
        check_columns(named(rows), [*columns, *self.weight_columns, *grouped], where, "")
        return self._batch(rows, self.spec.tasks, where, grouped=True)

    def _batch(self, frame: pl.DataFrame, tasks: Sequence[TaskSpec], where: str, grouped: bool) -> Batch:
        """Return the rows of ``frame`` with their labels, weights and, if ``grouped``, groups. Raises InputError."""
        assert self.row_encoder is not None
        inputs, targets = self.row_encoder.encode(frame, where), self.targets(frame, tasks, where)
        weights = self._weights(frame, tasks, targets, where)
        return Batch(inputs, targets, weights, self.groups(frame) if grouped else None)

    def _learn(self, train: pl.DataFrame, where: str) -> DataSpec:
        from_text = "train" not in self.frames and files_of(self.paths["train"])[0].suffix != ".parquet"
        spec = self.learn(lambda _: iter([(train, where)]), len(train), named(train), from_text)
        assert self.row_encoder is not None
        self.row_encoder.bad.found.clear()  # encoding the rows of all splits counts bad cells again
        return spec

    def _read(self, split: str) -> pl.DataFrame:
        """Return the rows of the file of ``split``; raise InputError if a column named in an option is missing."""
        path = self.paths[split]
        if split in self.frames:
            frame = checked_rows(self.frames[split], path)
        else:
            frame = read_tables(path, self.separator, self.null_values, f"data.{OPTION[split]}")
        self._check_named(named(frame), path)
        return frame

    def _split(self) -> dict[str, pl.DataFrame]:
        """Return the rows of each split, from one file or several."""
        frames = {name: self._read(name) for name in self._files()}
        if "train" not in frames:
            return frames
        rest = frames.pop("train")
        for name, frame in frames.items() if self.row_encoder is None else ():
            missing = [column for column in named(rest) if column not in (*frame.columns, *self.ignore)]
            require(not missing, f"{self.paths[name]} lacks columns of {self.paths['train']}: {listed(missing)}")
        if self.split_column is not None:
            return self._by_column(rest, self.split_column)
        shares = {name: share for name, share in self.shares.items() if name == "train" or name not in self.paths}
        order = torch.randperm(len(rest), generator=torch.Generator().manual_seed(self.seed))
        parts = divided(order, shares, f"{self.paths['train']}: of its {len(rest)} rows")
        frames |= {name: rest[part.sort().values.numpy()] for name, part in parts.items()}
        return frames

    def _by_column(self, rows: pl.DataFrame, column: str) -> dict[str, pl.DataFrame]:
        split = split_names(rows, column, str(self.paths["train"]))
        frames = {name: rows.filter(split == name) for name in SPLITS}
        for name, frame in frames.items():
            require(len(frame) > 0, f"{self.paths['train']}, column {column!r}: no row is marked {name}")
        return frames

    def _weights(
        self, frame: pl.DataFrame, tasks: Sequence[TaskSpec], targets: Mapping[str, Tensor], where: str
    ) -> dict[str, Tensor]:
        """Return the weight of each row for each task ``[N]``, with a mean of 1 over the rows that have a label.

        Raises InputError, which names the first bad cell of a column of weights.
        """
        if not self.weight_columns:
            return {}
        weights, read = dict[str, Tensor](), {name: read_weights(frame, name, where) for name in self.weight_columns}
        for known, task in zip(self.labels, tasks, strict=True):
            column = known.weight_column or self.weight_column
            raw = torch.ones(len(frame)) if column is None else read[column]
            mask = labelled(task, targets[task.name])
            mean = float(raw[mask].mean()) if bool(mask.any()) else 1.0
            require(mean > 0, f"{where}, column {column!r}: all labels of task {task.name!r} have weight 0")
            weights[task.name] = (raw / mean).float()
        return weights


def read_weights(frame: pl.DataFrame, name: str, where: str) -> Tensor:
    """Return a column of weights ``[N]``, float64. Raises InputError, which names the first bad cell."""
    column = numbers(frame, name, where)
    bad = (~(column.is_not_nan() & (column >= 0) & (column <= HEAVIEST))).arg_true()
    if len(bad):
        raise InputError(f"{cell(frame, name, bad[0], where)} is not a weight, a number from 0 to {HEAVIEST:g}")
    return torch.from_numpy(column.to_numpy(writable=True))

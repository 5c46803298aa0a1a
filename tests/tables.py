"""Write tables, load them in memory and streamed, and compare their rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import torch
from mtl.data_modules.table import TableDataModule
from mtl.data_modules.tables.encoder import TableEncoder

from mtl.types import Batch
from tests.loaded import loaded

WAYS = ("csv", "streamed")
Y = {"y": {"kind": "binary"}}
# All rows are in each split
SAME: dict[str, Any] = {"split": {"fractions": [1, 0, 0]}, "val_path": "same", "test_path": "same"}


def load_table(path: Path | str, way: str = "csv", tasks: Any = None, **options: Any) -> Any:
    options = {name: str(path) if value == "same" else value for name, value in options.items()}
    window = {"window_rows": 480} if way == "streamed" else {}
    return loaded(TableDataModule(str(path), tasks or Y, **{"batch_size": 8, "eval_batch_size": 64} | window | options))


def write_table(frame: pl.DataFrame, path: Path) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    frame.write_parquet(path, row_group_size=60) if path.suffix == ".parquet" else frame.write_csv(path)
    return path


def write_parts(frame: pl.DataFrame, folder: Path, suffix: str = ".parquet", count: int = 4) -> Path:
    """Write the rows to several files of a folder."""
    size = -(-len(frame) // count)
    for number in range(count):
        write_table(frame[number * size : (number + 1) * size], folder / f"part-{number}{suffix}")
    return folder


def serve_rows(frame: pl.DataFrame, folder: Path, way: str, tasks: Any = None, **options: Any) -> Any:
    """Serve ``frame``, with labels ``y`` if it has none; a streamed one comes from several files."""
    if "y" not in frame.columns:
        frame = frame.with_columns(y=pl.int_range(pl.len()) // 2 % 2)
    path = write_parts(frame, folder / "rows") if way == "streamed" else write_table(frame, folder / f"t.{way}")
    return load_table(path, way, tasks, **(SAME | options))


def rows_of(data: Any, split: str = "val") -> Batch:
    """Return the rows of a split in the order of the files."""
    loader = data.train_dataloader() if split == "train" else getattr(data, f"{split}_dataloader")()
    batches = list(loader)
    first = batches[0]
    inputs = {name: torch.cat([batch.inputs[name] for batch in batches]) for name in first.inputs}
    targets = {name: torch.cat([batch.targets[name] for batch in batches]) for name in first.targets}
    return Batch(inputs, targets)


def restore_encoder(data: Any) -> TableEncoder:
    """Return the encoder from its state, as a checkpoint holds it."""
    return TableEncoder.from_state(json.loads(json.dumps(data.row_encoder.state())))


def assert_same_rows(one: Batch, other: Batch, exact: bool = True) -> None:
    for there, here in ((one.inputs, other.inputs), (one.targets, other.targets)):
        assert list(there) == list(here)
        for name in there:
            torch.testing.assert_close(
                there[name], here[name], rtol=0, atol=0 if exact else 1e-6, equal_nan=True, msg=name
            )

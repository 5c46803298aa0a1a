"""Feed a streamed table to several processes without training: ``python benchmarks/feed.py``.

A table of 7 categorical and 3 numeric columns and 2 tasks, in Parquet files of 500 thousand rows, is read for an epoch
as by each of ``--processes`` processes, one after the other, so that each has the cores that it would have on a larger
machine. Shown are the rows a second of the slowest one, and how often a block of rows is read by all of them together.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import numpy as np
import polars as pl
from mtl.data_modules.table import TableDataModule

FILE, BATCH = 500_000, 4096  # rows of a file, and of a global batch
SIZES = {"user": 100_000, "item": 20_000, "city": 500, "device": 12, "hour": 24, "day": 7, "shop": 2_000}
TASKS = {"click": {"kind": "binary"}, "spent": {"kind": "regression"}}


class Part(TableDataModule):
    """The rows of process ``rank`` of ``processes``, without a process group; ``read`` counts the blocks."""

    rank, processes, read = 0, 1, 0

    def _processes(self) -> tuple[int, int]:
        return self.rank, self.processes

    def _batch(self, *args: Any) -> Any:
        self.read += 1
        return super()._batch(*args)


def make(folder: Path, rows: int) -> None:
    for number, start in enumerate(range(0, rows, FILE)):
        draw, count = np.random.default_rng(number), min(FILE, rows - start)
        columns: dict[str, Any] = {name: draw.integers(0, size, count, np.int32) for name, size in SIZES.items()}
        columns |= {name: draw.normal(size=count).astype(np.float32) for name in ("age", "price", "stay")}
        columns["click"] = draw.integers(0, 2, count, np.int8)
        columns["spent"] = draw.normal(size=count).astype(np.float32)
        pl.DataFrame(columns).write_parquet(folder / f"{number:04d}.parquet", row_group_size=50_000)


def feed(path: str, rank: int, processes: int) -> tuple[float, float]:
    """Return the rows a second of a process in an epoch, and how many of all blocks it reads."""
    split = {"fractions": [0.98, 0.01, 0.01]}
    data = Part(path, TASKS, batch_size=BATCH // processes, split=split, window_rows=1 << 20)
    data.rank, data.processes = rank, processes
    data.prepare_data()
    data.setup()
    data.read, start = 0, time.perf_counter()
    rows = sum(len(batch) for batch in data.train_dataloader())
    return rows / (time.perf_counter() - start), data.read / len(data.splits["train"].counts)


def main() -> None:
    args = common.options(
        __doc__,
        rounds=3,
        rows=(int, 4_000_000, "rows of the table"),
        processes=(common.listed, ["1", "2", "4"], "numbers of processes"),
    )
    times: dict[int, list[tuple[float, float]]] = {int(number): [] for number in args.processes}
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), args.rows)
        for _ in range(args.rounds):
            for processes, values in times.items():
                speeds, reads = zip(*(feed(folder, rank, processes) for rank in range(processes)), strict=True)
                values.append((min(speeds), sum(reads)))
    print("| processes | rows a second of the slowest | readings of a block |")
    print("|---|---|---|")
    for processes, values in times.items():
        speed, read = map(statistics.median, zip(*values, strict=True))
        print(f"| {processes} | {speed:,.0f} | {read:.2f} |")


if __name__ == "__main__":
    main()

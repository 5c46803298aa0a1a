"""Train on a streamed table of 50 million rows: rows per second and peak memory, beside a part of it in memory.

python benchmarks/streaming.py [--rows N] [--part N] [--steps N] [--folder FOLDER]. The rows are made up (7 categorical
and 3 numeric columns, 2 tasks), written to a new folder below FOLDER and deleted at the end. Each measurement has a
process of its own, for its peak memory; in the last one, both ways of feeding the part take turns, 100 steps each.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from common import options, write

# isort: split
import numpy as np
import polars as pl
import torch
from mtl.data_modules.table import TableDataModule
from mtl.data_modules.table_base import TableBase
from mtl.data_modules.table_stream import TableStreamDataModule

from mtl.experts.dense import StackedDense
from mtl.gates import TopKGate
from mtl.networks.bottom import TabularBottom
from mtl.networks.heads import Heads
from mtl.networks.mmoe import MMoE
from mtl.training.module import MultiTaskModule

FILE, BATCH, PIECE, SOME = 1_000_000, 4096, 20, 100
SIZES = {"user": 100_000, "item": 20_000, "city": 500, "device": 12, "hour": 24, "day": 7, "shop": 2_000}
TASKS = {"click": {"kind": "binary"}, "spent": {"kind": "regression"}}


def make(folder: Path, rows: int) -> None:
    """Write files of a million rows, so that no more are in memory."""
    for number, start in enumerate(range(0, rows, FILE)):
        draw, count = np.random.default_rng(number), min(FILE, rows - start)
        columns: dict[str, Any] = {name: draw.integers(0, size, count, np.int32) for name, size in SIZES.items()}
        columns |= {name: draw.normal(size=count).astype(np.float32) for name in ("age", "price", "stay")}
        score = np.sin(columns["user"]) + np.cos(columns["item"]) + columns["age"]
        columns["click"] = (score + draw.normal(size=count) > 1).astype(np.int8)
        columns["spent"] = (score * columns["price"] + draw.normal(size=count)).astype(np.float32)
        frame = pl.DataFrame(columns).with_columns(pl.format("city {}", "city").alias("city"))
        frame.write_parquet(folder / f"{number:04d}.parquet")


def memory() -> float:
    """Return the most memory that this process has had, in GB; getrusage would count that of its parent before exec."""
    [line] = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e9


def table(path: str, streaming: bool) -> TableBase:
    make = TableStreamDataModule if streaming else TableDataModule
    data = make(path, TASKS, batch_size=BATCH, split=[0.98, 0.01, 0.01])
    data.prepare_data()
    data.setup()
    return data


def steps(data: TableBase) -> Iterator[int]:
    """Train in a plain loop; yield the rows of each step."""
    network = MMoE(
        data.spec,
        num_experts=4,
        bottom=partial(TabularBottom, embedding_dim=8),
        experts=partial(StackedDense, units=[64]),
        gate=partial(TopKGate, k=2),
        heads=partial(Heads, units=[32]),
    )
    module = MultiTaskModule(network, data.spec.tasks, lambda p: torch.optim.Adam(p, 1e-3, fused=True))
    module.log = lambda *args, **kwargs: None
    module.train()
    optimizer = module.configure_optimizers()
    for index, batch in enumerate(data.train_dataloader()):
        loss = module.training_step(batch, index)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield len(batch)


def timed(rows: Iterator[int], count: int) -> tuple[int, float]:
    """Return the rows of the next ``count`` items, and the seconds that they took."""
    start = time.perf_counter()
    return sum(islice(rows, count)), time.perf_counter() - start


def alone(path: str, streaming: bool, count: int) -> dict[str, Any]:
    """Return what training on ``path`` takes, with the course of the peak memory in ten parts."""
    course, start = [memory()], time.perf_counter()
    data = table(path, streaming)
    learning = time.perf_counter() - start
    course.append(memory())
    rows, seconds, training = 0, 0.0, steps(data)
    for _ in range(10):
        more, took = timed(training, count // 10)
        rows, seconds = rows + more, seconds + took
        course.append(memory())
    return {"learning": learning, "rows": rows, "rows_per_second": rows / seconds, "memory": course}


def in_turn(path: str) -> dict[str, float]:
    """Return the rows per second of each way, with training and without, in turns of ``PIECE`` steps."""
    ways = {"streamed": table(path, True), "memory": table(path, False)}
    feeds = {name: (len(batch) for batch in data.train_dataloader()) for name, data in ways.items()}
    works = {f"{name}, training": steps(data) for name, data in ways.items()}
    found = {}
    for group in (feeds, works):
        sums = {name: [0, 0.0] for name in group}
        for _ in range(SOME // PIECE):
            for name, rows in group.items():
                more, took = timed(rows, PIECE)
                sums[name] = [sums[name][0] + more, sums[name][1] + took]
        found |= {name: rows / seconds for name, (rows, seconds) in sums.items()}
    return found


def child(*arguments: str) -> dict[str, Any]:
    """Run a measurement in a process of its own."""
    output = subprocess.run([sys.executable, __file__, *arguments], check=True, stdout=subprocess.PIPE).stdout
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    print(arguments, json.dumps(result), flush=True)
    return result


def main() -> None:
    if sys.argv[1:2] == ["alone"]:
        print(json.dumps(alone(sys.argv[2], sys.argv[3] == "true", int(sys.argv[4]))))
        return
    if sys.argv[1:2] == ["in_turn"]:
        print(json.dumps(in_turn(sys.argv[2])))
        return
    given = options(
        __doc__,
        rounds=1,
        rows=(int, 50_000_000, "rows of the streamed table"),
        part=(int, 2_000_000, "rows of the part that is also trained on in memory"),
        steps=(int, 2000, f"steps on the streamed table, of {BATCH} rows"),
        folder=(str, tempfile.gettempdir(), "where to write the rows"),
    )
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        whole, part = Path(name) / "whole", Path(name) / "part.parquet"
        whole.mkdir()
        start = time.perf_counter()
        make(whole, given.rows)
        size = sum(file.stat().st_size for file in whole.iterdir()) / 1e9
        print(f"{given.rows:,} rows, {size:.2f} GB, written in {time.perf_counter() - start:.0f} s", flush=True)
        pl.scan_parquet(whole / "*.parquet").head(given.part).sink_parquet(part)
        few = str(SOME)
        runs = {
            f"{given.rows:,} rows streamed": child("alone", str(whole), "true", str(given.steps)),
            f"{given.part:,} rows streamed": child("alone", str(part), "true", few),
            f"{given.part:,} rows in memory": child("alone", str(part), "false", few),
        }
        turns = child("in_turn", str(part))
    lines = [
        {
            "table": name,
            "learning, s": run["learning"],
            "trained rows": f"{run['rows']:,}",
            "rows/s": f"{run['rows_per_second']:,.0f}",
            **dict(
                zip(
                    ("at start, GB", "after learning", "at the end"),
                    [run["memory"][i] for i in (0, 1, -1)],
                    strict=True,
                )
            ),
        }
        for name, run in runs.items()
    ]
    ratios = [
        f"In turns on {given.part:,} rows, streamed / in memory: {turns['streamed'] / turns['memory']:.2f} of the rows "
        f"per second without training, {turns['streamed, training'] / turns['memory, training']:.2f} with it."
    ]
    write(given, "streaming", f"A table of {size:.2f} GB, streamed", lines, ratios)


if __name__ == "__main__":
    main()

"""Time feeding without training, and training on a streamed table compared to training on a part of it in memory.

python benchmarks/feed.py [--rounds N] [--rows N] [--part N] [--steps N] [--folder FOLDER]. First: an epoch of 1.6
million rows in batches of 512. Torch's default loader collates row by row, so it is timed on 200 batches and the time
is scaled. Then: a table of 7 categorical and 3 numeric columns and 2 tasks, written below FOLDER and deleted at the
end. Each measurement has a process of its own, for its peak memory; in the last one both ways of feeding the part take
turns.
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

from common import Row, medians, options, write

# isort: split
import numpy as np
import polars as pl
import torch
from mtl.data_modules.base import TensorDataModule
from mtl.data_modules.table import TableDataModule
from mtl.data_modules.table_stream import TableStreamDataModule
from torch.utils.data import DataLoader, TensorDataset

from mtl.experts.dense import StackedDense
from mtl.gates import TopKGate
from mtl.networks.bottom import TabularBottom
from mtl.networks.heads import Heads
from mtl.networks.mmoe import MMoE
from mtl.training.module import MultiTaskModule
from mtl.types import Batch, Categorical, DataSpec, TaskSpec

EPOCH, SMALL, SOME = 1_600_000, 512, 200  # rows, rows of a batch, and batches of torch's loader
FILE, BATCH, TURN = 1_000_000, 4096, 20  # rows of a file and of a batch of the table; steps of a turn
SIZES = {"user": 100_000, "item": 20_000, "city": 500, "device": 12, "hour": 24, "day": 7, "shop": 2_000}
TASKS = {"click": {"kind": "binary"}, "spent": {"kind": "regression"}}


class Rows(TensorDataModule):
    """Random ids and labels in the format of MovieLens."""

    def load(self) -> tuple[DataSpec, dict[str, Batch]]:
        spec = DataSpec({"user": Categorical(6040), "item": Categorical(3952)}, [TaskSpec("watch", "binary")])
        ids = {"user": torch.randint(6040, (EPOCH,)), "item": torch.randint(3952, (EPOCH,))}
        return spec, {"train": Batch(ids, {"watch": torch.randint(2, (EPOCH,)).float()})}


def loaders(rounds: int) -> list[Row]:
    """Time an epoch of torch's default loader and of ours, in turns."""
    data = Rows(batch_size=SMALL)
    data.setup()
    rows = data.train_dataloader().dataset.rows
    plain = DataLoader(TensorDataset(*rows.inputs.values(), *rows.targets.values()), batch_size=SMALL, shuffle=True)
    batches = -(-EPOCH // SMALL)
    seconds: dict[str, list[float]] = {"torch, default loader": [], "ours": []}
    for _ in range(rounds + 1):  # the first round is warm-up
        seconds["torch, default loader"].append(timed((1 for _ in plain), SOME)[1] * batches / SOME)
        total, took = timed((len(batch) for batch in data.train_dataloader()), batches)
        assert total == EPOCH
        seconds["ours"].append(took)
    times = medians({name: values[1:] for name, values in seconds.items()})
    return [{"loader": name, "epoch, s": value / 1000, "a batch, ms": value / batches} for name, value in times.items()]


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
    """Return the peak memory of this process in GB; getrusage would include the parent's memory before exec."""
    [line] = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e9


def table(path: str, streaming: bool) -> Any:
    kind = TableStreamDataModule if streaming else TableDataModule
    data = kind(path, TASKS, batch_size=BATCH, split=[0.98, 0.01, 0.01])
    data.prepare_data()
    data.setup()
    return data


def steps(data: Any) -> Iterator[int]:
    """Train in a plain loop; yield the rows of each step."""
    network = MMoE(
        data.spec,
        num_experts=4,
        bottom=partial(TabularBottom, embedding_dim=8),
        experts=partial(StackedDense, units=[64]),
        gate=partial(TopKGate, k=2),
        heads=partial(Heads, units=[32]),
    )
    module = MultiTaskModule(network, data.spec.tasks, partial(torch.optim.Adam, lr=1e-3, fused=True)).train()
    module.log = lambda *args, **kwargs: None
    optimizer = module.configure_optimizers()
    for index, batch in enumerate(data.train_dataloader()):
        loss = module.training_step(batch, index)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield len(batch)


def timed(rows: Iterator[int], count: int) -> tuple[int, float]:
    """Return the sum of the next ``count`` items, and the seconds that they took."""
    start = time.perf_counter()
    return sum(islice(rows, count)), time.perf_counter() - start


def alone(path: str, streaming: bool, count: int) -> Row:
    """Return time and memory of training on ``path``; memory is the peak so far."""
    row: Row = {"at start, GB": memory()}
    start = time.perf_counter()
    data = table(path, streaming)
    row |= {"learning, s": time.perf_counter() - start, "after learning, GB": memory()}
    rows, seconds = timed(steps(data), count)
    return row | {"trained rows": f"{rows:,}", "rows/s": rows / seconds, "at the end, GB": memory()}


def in_turn(path: str, count: int) -> Row:
    """Return the speed of streaming as a share of the speed from memory, with and without training, in turns."""
    ways = {"streamed": table(path, True), "memory": table(path, False)}
    feeds = {name: (len(batch) for batch in data.train_dataloader()) for name, data in ways.items()}
    found = {}
    for title, group in (("without training", feeds), ("with it", {n: steps(data) for n, data in ways.items()})):
        rows, seconds = dict.fromkeys(group, 0), dict.fromkeys(group, 0.0)
        for _ in range(max(1, count // TURN)):
            for name, each in group.items():
                more, took = timed(each, TURN)
                rows[name] += more
                seconds[name] += took
        speeds = {name: rows[name] / seconds[name] for name in group}
        found[title] = speeds["streamed"] / speeds["memory"]
    return found


def child(*arguments: object) -> Row:
    """Run a measurement in a process of its own."""
    command = [sys.executable, __file__, *map(str, arguments)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    result: Row = json.loads(output.splitlines()[-1])
    return result


def main() -> None:
    if sys.argv[1:2] == ["alone"]:
        return print(json.dumps(alone(sys.argv[2], sys.argv[3] == "True", int(sys.argv[4]))))
    if sys.argv[1:2] == ["in_turn"]:
        return print(json.dumps(in_turn(sys.argv[2], int(sys.argv[3]))))
    given = options(
        __doc__,
        rounds=5,
        rows=(int, 50_000_000, "rows of the streamed table"),
        part=(int, 2_000_000, "rows of the part that is also trained on in memory"),
        steps=(int, 500, f"steps on the streamed table, of {BATCH} rows; a fifth of them on the part"),
        folder=(str, tempfile.gettempdir(), "where to write the rows"),
    )
    write(given, "feed", "An epoch of 1.6 million rows", loaders(given.rounds))
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        whole, part, few = Path(name) / "whole", Path(name) / "part.parquet", max(1, given.steps // 5)
        whole.mkdir()
        make(whole, given.rows)
        size = sum(file.stat().st_size for file in whole.iterdir()) / 1e9
        pl.scan_parquet(whole / "*.parquet").head(given.part).sink_parquet(part)
        rows = [
            {"table": f"{given.rows:,} rows streamed"} | child("alone", whole, True, given.steps),
            {"table": f"{given.part:,} rows streamed"} | child("alone", part, True, few),
            {"table": f"{given.part:,} rows in memory"} | child("alone", part, False, few),
        ]
        turns = child("in_turn", part, few)
    shares = ", ".join(f"{share:.2f} {title}" for title, share in turns.items())
    note = f"In turns on {given.part:,} rows, rows per second streamed / in memory: {shares}."
    write(given, "streaming", f"A table of {size:.2f} GB, streamed", rows, [note])


if __name__ == "__main__":
    main()

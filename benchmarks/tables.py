"""Time of a step and memory against the number of rows of an embedding table: ``python benchmarks/tables.py``.

A step looks up 512 ids of a table of width 16, trains a linear layer on them and updates both. ``--rows`` lists the
sizes of the table in thousands, ``--optimizers`` the contenders.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import time
from typing import Any

import common
import torch
from torch import nn

from mtl.training.sparse import CompositeOptimizer, RowwiseAdagrad, make_sparse

BATCH, WIDTH, STEPS = 512, 16, 12
OF_TABLES: dict[str, Any] = {"adam": None, "sparse_adam": torch.optim.SparseAdam, "rowwise_adagrad": RowwiseAdagrad}


def measured(name: str, rows: int) -> tuple[float, float]:
    """Return the median seconds of a step and the peak memory in bytes of a process that trains with ``name``."""
    torch.set_num_threads(1)
    table, linear = nn.Embedding(rows, WIDTH, _weight=torch.full((rows, WIDTH), 0.01)), nn.Linear(WIDTH, 1)
    if OF_TABLES[name] is None:
        optimizer: Any = torch.optim.Adam([*table.parameters(), *linear.parameters()], fused=True)
    else:
        tables = OF_TABLES[name](make_sparse(table), lr=1e-3)
        optimizer = CompositeOptimizer([torch.optim.Adam(linear.parameters(), fused=True), tables])
    seconds = []
    for _ in range(STEPS):
        ids = torch.randint(rows, (BATCH,))
        start = time.perf_counter()
        optimizer.zero_grad()
        linear(table(ids)).square().mean().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:]), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def listed(text: str) -> list[str]:
    return text.split(",")


def main() -> None:
    given = common.options(
        __doc__,
        rounds=1,
        rows=(listed, ["100", "1000", "10000"], "thousands of rows"),
        optimizers=(listed, list(OF_TABLES), "contenders"),
    )
    print("| thousand rows | optimizer | ms a step | ratio to the smallest table | peak GB | table GB |")
    print("|---|---|---|---|---|---|")
    first: dict[str, float] = {}
    for thousands in map(int, given.rows):
        for name in given.optimizers:
            with multiprocessing.get_context("spawn").Pool(1) as pool:  # a fresh process, for its peak memory
                seconds, peak = min(pool.apply(measured, (name, thousands * 1000)) for _ in range(given.rounds))
            ratio = seconds / first.setdefault(name, seconds)
            size = thousands * 1000 * WIDTH * 4 / 1e9
            numbers = f"{seconds * 1e3:.2f} | {ratio:.2f} | {peak / 1e9:.2f} | {size:.2f}"
            print(f"| {thousands:,} | {name} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()

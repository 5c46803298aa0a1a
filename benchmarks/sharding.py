"""Memory and time of training a large embedding table in several processes: ``python benchmarks/sharding.py``.

Each process looks up 512 ids of a table of width 16, trains a linear layer on them and updates both with Adam; in
``rowwise`` and ``sparse_adam`` it updates the table with row-wise Adagrad and SparseAdam. ``--rows`` lists sizes of the
table in thousands, ``--ways`` the contenders. Memory is the growth of the peak of the largest process after its
imports, without checkpoints.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import socket
import statistics
import time
from typing import Any

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from mtl.networks.base import MultiTaskNetwork
from mtl.training.optimizers import CompositeOptimizer, RowwiseAdagrad, make_embeddings_sparse
from mtl.training.sharding import shard
from mtl.types import DataSpec

BATCH, WIDTH, STEPS = 512, 16, 8
WAYS = {"one": 1, "ddp": 2, "fsdp": 2, "rowwise": 1, "sparse_adam": 1}  # and the number of processes
OF_TABLES: dict[str, Any] = {"rowwise": RowwiseAdagrad, "sparse_adam": torch.optim.SparseAdam}


class Network(MultiTaskNetwork):
    """A table and a linear layer."""

    def __init__(self, rows: int) -> None:
        super().__init__(DataSpec({}, []))
        self.bottom = nn.Sequential(nn.Embedding(rows, WIDTH, _weight=torch.full((rows, WIDTH), 0.01)))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.bottom(ids))


def train(rank: int, way: str, rows: int, port: int, results: Any) -> None:
    """Be one process of a training; put the median seconds of a step and the growth of memory into ``results``."""
    torch.set_num_threads(1)
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": WAYS[way]}
    os.environ |= {name: str(value) for name, value in names.items()}
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (WAYS[way],))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    network = Network(rows)
    model, parts = network, []
    if way in OF_TABLES:
        parts = [OF_TABLES[way](make_embeddings_sparse(network), lr=1e-3)]
    if way == "fsdp":
        shard(network, nn.Identity(), mesh, split_rows=1)
    if way == "ddp":
        model = DistributedDataParallel(network, gradient_as_bucket_view=True)
    trained = network.head.parameters() if parts else network.parameters()
    optimizer = CompositeOptimizer([torch.optim.Adam(trained, fused=True), *parts])
    seconds = []
    for _ in range(STEPS):
        ids = torch.randint(rows, (BATCH,))
        start = time.perf_counter()
        optimizer.zero_grad()
        model(ids).square().mean().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    results.put((statistics.median(seconds[2:]), growth * 1024.0))
    dist.barrier()
    dist.destroy_process_group()


def measured(way: str, rows: int) -> tuple[float, float]:
    """Return the median seconds of a step, and the largest growth of the memory of a process in bytes."""
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [spawn.Process(target=train, args=(r, way, rows, port, results)) for r in range(WAYS[way])]
    for process in processes:
        process.start()
    measured_by_process = [results.get(timeout=500) for _ in processes]
    for process in processes:
        process.join()
    return max(seconds for seconds, _ in measured_by_process), max(growth for _, growth in measured_by_process)


def main() -> None:
    args = common.options(
        __doc__,
        rounds=1,
        rows=(common.listed, ["1000", "10000"], "thousands of rows"),
        ways=(common.listed, list(WAYS), "contenders"),
    )
    print("| thousand rows | way | processes | ms a step | GB of a process | tables |")
    print("|---|---|---|---|---|---|")
    for thousands in map(int, args.rows):
        for way in args.ways:
            seconds, growth = min(measured(way, thousands * 1000) for _ in range(args.rounds))
            tables = growth / (thousands * 1000 * WIDTH * 4)
            numbers = f"{seconds * 1e3:.1f} | {growth / 1e9:.2f} | {tables:.1f}"
            print(f"| {thousands:,} | {way} | {WAYS[way]} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()

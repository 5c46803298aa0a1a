"""Time one epoch of loading 1.6 million rows in batches of 512, without training.

python benchmarks/feed.py [--rounds N]. Torch's default loader collates row by row, so it is timed on 200 batches and
the time is scaled to the epoch.
"""

from __future__ import annotations

import time
from itertools import islice

from common import medians, options, write

# isort: split
import torch
from mtl.data_modules.base import TensorDataModule
from torch.utils.data import DataLoader, TensorDataset

from mtl.types import Batch, Categorical, DataSpec, TaskSpec

ROWS, BATCH, SOME = 1_600_000, 512, 200


class Rows(TensorDataModule):
    """Random ids and labels in the format of MovieLens."""

    def load(self) -> tuple[DataSpec, dict[str, Batch]]:
        spec = DataSpec({"user": Categorical(6040), "item": Categorical(3952)}, [TaskSpec("watch", "binary")])
        ids = {"user": torch.randint(6040, (ROWS,)), "item": torch.randint(3952, (ROWS,))}
        return spec, {"train": Batch(ids, {"watch": torch.randint(2, (ROWS,)).float()})}


def main() -> None:
    given = options(__doc__, rounds=5)
    data = Rows(batch_size=BATCH)
    data.setup()
    rows = data.train_dataloader().dataset.rows
    plain = DataLoader(TensorDataset(*rows.inputs.values(), *rows.targets.values()), batch_size=BATCH, shuffle=True)
    seconds: dict[str, list[float]] = {"torch, default loader": [], "ours": []}
    batches = -(-ROWS // BATCH)
    for number in range(given.rounds + 1):
        start = time.perf_counter()
        count = sum(1 for _ in islice(plain, SOME))
        middle = time.perf_counter()
        total = sum(len(batch) for batch in data.train_dataloader())
        end = time.perf_counter()
        assert count == SOME
        assert total == ROWS
        if number:
            seconds["torch, default loader"].append((middle - start) * batches / SOME)
            seconds["ours"].append(end - middle)
    times = medians(seconds)
    table = [
        {"loader": name, "epoch, s": value / 1000, "a batch, ms": value / batches} for name, value in times.items()
    ]
    write(given, "feed", "An epoch of 1.6 million rows", table)


if __name__ == "__main__":
    main()

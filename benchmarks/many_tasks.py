"""Time an epoch of 313 tasks against a plain loop of torch, and a step of 691 tasks.

python benchmarks/many_tasks.py [--rounds N] [--threads 1] [--molecules FOLDER]. The epoch: ChEMBL's training labels
(FOLDER has its three files, see benchmarks/many_tasks.md), or as many random ones, with 40 random bits of 2,048 a row;
a network 2,048 x 1,024 x 256 x 313, Adam, batches of 128, through our data module, module and Lightning's trainer, and
as the loop that one would write without them. They take turns, epoch by epoch. The step: 691 regressions of which .55 %
of the labels are there, batches of 512. All times are CPU seconds.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import common
import numpy as np
import polars as pl
import torch
from mtl.data_modules.base import TensorDataModule
from pytorch_lightning import Callback, Trainer
from torch import Tensor, nn

from mtl.experts.dense import StackedDense
from mtl.networks.baselines import SharedBottom
from mtl.networks.bottom import TabularBottom
from mtl.networks.heads import Heads
from mtl.training.module import MultiTaskModule
from mtl.types import Bag, Batch, DataSpec, TaskSpec

ROWS, BITS, ON, BATCH = 14_620, 2048, 40, 128
BOTTOM = partial(TabularBottom, embedding_dim=1024)  # what makes 1,024 numbers of the ids of a row's bits


class Molecules(TensorDataModule):
    """Serve random ids of bits ``[N, ON]`` and the given labels ``[N, T]``."""

    def __init__(self, labels: Tensor, batch_size: int) -> None:
        super().__init__(batch_size=batch_size)
        self.labels = labels

    def load(self) -> tuple[DataSpec, dict[str, Batch]]:
        ids = 1 + torch.rand(len(self.labels), BITS).topk(ON).indices.int()
        means, stds = self.labels.nanmean(0).tolist(), np.nanstd(self.labels.numpy(), 0).clip(0.1).tolist()
        tasks = [
            TaskSpec(f"t{n}", "regression", mean=m, std=s) for n, (m, s) in enumerate(zip(means, stds, strict=True))
        ]
        targets = {task.name: column.contiguous() for task, column in zip(tasks, self.labels.T, strict=True)}
        return DataSpec({"bits": Bag(BITS + 1, ON)}, tasks), {"train": Batch({"bits": ids}, targets)}


def read_labels(folder: Path) -> Tensor:
    """Return the training labels of the tasks with at least 5 labels in each of the three files."""
    parts = [
        pl.read_csv(folder / f"chembl_5thresh_ts_{part}.csv.gz").drop("smiles") for part in ("train", "valid", "test")
    ]
    names = [name for name in parts[0].columns if all(len(part) - part[name].null_count() >= 5 for part in parts)]
    return torch.from_numpy(parts[0].select(pl.col(names).cast(pl.Float64).fill_null(float("nan"))).to_numpy().copy())


def random_labels(rows: int, tasks: int, share: float) -> Tensor:
    """Return labels ``[rows, tasks]``, of which a ``share`` is there, at least two of each task."""
    there = torch.rand(rows, tasks) < share
    there[:2] = True
    return torch.where(there, torch.randn(rows, tasks).double() + 5, torch.nan)


def make_module(data: Molecules) -> MultiTaskModule:
    data.setup()
    parts: Any = (BOTTOM, partial(StackedDense, units=[256]), Heads)
    return MultiTaskModule(SharedBottom(data.spec, *parts), data.spec.tasks, partial(torch.optim.Adam, lr=1e-3))


class PlainLoop:
    """The same network and optimiser, as one would write them without this package."""

    def __init__(self, data: Molecules) -> None:
        widths = (BITS, 1024, 256, len(data.spec.tasks))
        layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
        self.network, self.batch_size = nn.Sequential(*layers[:-1]), data.batch_size
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=1e-3)
        self.x = torch.zeros(len(data.labels), BITS).scatter_(1, data.splits["train"].inputs["bits"].long() - 1, 1.0)
        mean, std = (torch.tensor([getattr(task, name) for task in data.spec.tasks]) for name in ("mean", "std"))
        self.y = ((data.labels - mean) / std).float()
        self.there = ~self.y.isnan()
        self.y = self.y.nan_to_num()

    def epoch(self) -> None:
        for rows in torch.randperm(len(self.x)).split(int(self.batch_size)):
            there = self.there[rows]
            errors = torch.where(there, self.network(self.x[rows]) - self.y[rows], 0.0).square()
            loss = (errors.sum(0) / there.sum(0).clamp(min=1)).sum()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


class TakeTurns(Callback):
    """Run an epoch of the plain loop after each of the trainer, and keep the CPU seconds of both."""

    def __init__(self, plain: PlainLoop) -> None:
        self.plain, self.seconds = plain, {"ours": list[float](), "plain": list[float]()}

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.start = time.process_time()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        middle = time.process_time()
        self.plain.epoch()
        self.seconds["ours"].append(middle - self.start)
        self.seconds["plain"].append(time.process_time() - middle)


def time_epochs(labels: Tensor, rounds: int) -> Mapping[str, list[float]]:
    data = Molecules(labels, BATCH)
    module = make_module(data)
    turns, quiet = TakeTurns(PlainLoop(data)), {"logger": False, "enable_checkpointing": False}
    options: Any = {**quiet, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    Trainer(max_epochs=rounds, callbacks=[turns], **options).fit(module, train_dataloaders=data.train_dataloader())
    return turns.seconds


def time_steps(rounds: int) -> dict[str, float]:
    """Return CPU milliseconds of a training step and of the evaluation of a batch, 691 tasks, and MB of memory."""
    data = Molecules(random_labels(2048, 691, 0.0055), 512)
    module = make_module(data)
    optimizer: Any = module.configure_optimizers()
    module._is_shown, seconds = False, {"step": list[float](), "evaluation": list[float]()}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(4 * rounds):
        start = time.process_time()
        batch = data.splits["train"].select(torch.randperm(2048)[:512])
        optimizer.zero_grad()
        module.training_step(batch, number)["loss"].backward()
        optimizer.step()
        seconds["step"].append(time.process_time() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.no_grad():
        for number in range(2 * rounds):
            start = time.process_time()
            module.validation_step(data.splits["train"].select(torch.arange(512)), number)
            seconds["evaluation"].append(time.process_time() - start)
    start = time.process_time()
    module.evaluation.compute()
    times = {name: 1000 * statistics.median(values[1:]) for name, values in seconds.items()}
    return times | {"metrics": 1000 * (time.process_time() - start), "MB of steps": (peak - before) / 1024}


def main() -> None:
    args = common.options(__doc__, rounds=4, molecules=(Path, None, "folder of ChEMBL's files"))
    print({name: round(value, 1) for name, value in time_steps(args.rounds).items()})
    labels = random_labels(ROWS, 313, 0.0055) if args.molecules is None else read_labels(args.molecules)
    seconds = time_epochs(labels, args.rounds + 1)
    rows = [{"": name, "seconds of an epoch": statistics.median(values[1:])} for name, values in seconds.items()]
    ratio = statistics.median(a / b for a, b in list(zip(*seconds.values(), strict=True))[1:])
    note = f"{labels.shape[1]} tasks, {len(labels)} rows; the ratio is {ratio:.2f}"
    common.write(args, "many_tasks", "An epoch of many tasks", rows, [note])


if __name__ == "__main__":
    main()

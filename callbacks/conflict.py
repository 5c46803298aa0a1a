"""Measure during the training how the tasks' gradients agree, and draw it at the end."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, Trainer

from mtl.analysis.conflicts import as_table, draw
from mtl.distributed import gather
from mtl.files.writing import write_text
from mtl.loggers.pictures import save_picture
from mtl.options import LargeCount, validated
from mtl.training.conflict import ALL, Row, measure
from mtl.training.measurements import log_values
from mtl.training.module import MultiTaskModule
from mtl.types import Batch

from .phase_length import did_step

MAX_BATCHES_PER_TASK = 8  # validation batches with labels of the same tasks, which are measured on in turn


class Conflict(Callback):
    """Every ``every_n_steps`` optimiser steps, take ``mtl.training.conflict.measure`` on validation batches.

    The gradients come from one half of a batch's rows, the losses for the affinities from the other; each measurement
    takes a task's next batch. Logged are ``conflict/norm/TASK``, ``conflict/cosine/TASK/OTHER``, and
    ``conflict/affinity/TASK/OTHER``; ``<dirpath>/conflict.csv`` has the layers too, and ``conflict.png`` is drawn at
    the end. Nothing is measured if ``every_n_steps`` is null, or if there is one task or no shared parameter.
    """

    @validated
    def __init__(self, dirpath: str, every_n_steps: LargeCount | None = None) -> None:
        self.folder, self.every_n_steps = Path(dirpath), every_n_steps
        self.rows: list[tuple[int, *Row]] = []
        self._batches: dict[tuple[str, ...], list[Batch]] = {}  # by the tasks that they have labels of

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: MultiTaskModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if not self.every_n_steps or len(pl_module.tasks) == 1:
            return
        if not did_step(trainer, batch_idx) or step % self.every_n_steps:
            return
        if not self._batches:
            self._batches = _collected(trainer)
        if not self._batches:  # no batch has two rows
            return
        number = step // self.every_n_steps
        turn = [batches[number % len(batches)].to(pl_module.device) for batches in self._batches.values()]
        orders = [torch.arange(len(val_batch), device=pl_module.device) for val_batch in turn]
        pairs = [*zip(turn, orders, strict=True)]
        even, odd = ([val_batch.select(rows[k::2]) for val_batch, rows in pairs] for k in (0, 1))
        rate = float(trainer.optimizers[0].param_groups[0]["lr"])
        modes = [(module, module.training) for module in pl_module.network.modules()]
        pl_module.network.eval()
        measured = measure(pl_module, even, odd, rate)
        for module, mode in modes:
            module.training = mode
        self.rows += [(step, *row) for row in measured]
        overall = [
            (quantity, dict.fromkeys(tasks), value) for quantity, layer, *tasks, value in measured if layer == ALL
        ]
        log_values(trainer, {"/".join(("conflict", quantity, *names)): value for quantity, names, value in overall})

    def on_train_end(self, trainer: Trainer, pl_module: MultiTaskModule) -> None:
        if self.rows and trainer.is_global_zero:
            table = as_table(self.rows)
            write_text(self.folder / "conflict.csv", table.write_csv())
            save_picture(draw([table]), self.folder / "conflict.png", trainer.loggers, trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": [list(row) for row in self.rows]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = [tuple(row) for row in state_dict["rows"]]


def _collected(trainer: Trainer) -> dict[tuple[str, ...], list[Batch]]:
    """Return validation batches of this process by the tasks that they have labels of.

    There are at most ``MAX_BATCHES_PER_TASK`` for each set of tasks.
    All processes get as many batches of the same tasks, in the same order: their forward passes communicate. A process
    that has no such batch, or no rows of it, gets one of 0 rows. Batches of fewer than two rows in all are left out.
    """
    datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]  # Lightning sets it without declaring it
    local_batches: dict[tuple[str, ...], list[Batch]] = {}
    loader: Any = datamodule.val_dataloader() if datamodule else trainer.val_dataloaders
    for batch in loader:
        batches = local_batches.setdefault(tuple(batch.targets), [])
        if len(batches) < MAX_BATCHES_PER_TASK:
            batches.append(batch)
    nothing = torch.arange(0)
    shapes = {tasks: (part[0].select(nothing), [*map(len, part)]) for tasks, part in local_batches.items()}
    everyone = gather(shapes)
    batches_by_tasks = {}
    for tasks, (empty, _) in {tasks: pair for part in everyone for tasks, pair in part.items()}.items():
        counts = [part[tasks][1] for part in everyone if tasks in part]
        rows = [sum(sizes) for sizes in zip_longest(*counts, fillvalue=0)]
        batches = [batch for batch, _ in zip_longest(local_batches.get(tasks, []), rows, fillvalue=empty)]
        batches_by_tasks[tasks] = [batch for batch, count in zip(batches, rows, strict=True) if count > 1]
    return {tasks: batches for tasks, batches in batches_by_tasks.items() if batches}
